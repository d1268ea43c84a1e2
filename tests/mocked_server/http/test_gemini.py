"""Google's dialect: captured and continued token for token as the others are, with its own errors; and what it cannot serve."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mocked_server.vllm.sampling_rules import seed_of
from tests.mocked_server.http.test_dialects import ANSWERS, ASK, CALL, FUNCTION, SCHEMA, THOUGHT, script
from tests.mocked_server.http.test_dialects import served as served
from tests.support.server_parts import LOGPROB, whole_prompt

GENERATE = "/v1beta/models/policy:generateContent"
STREAM = "/v1beta/models/policy:streamGenerateContent"
COUNT = "/v1beta/models/policy:countTokens"
PARAMETERS = {"type": "OBJECT", "properties": {"a": {"type": "NUMBER"}, "b": {"type": "NUMBER", "nullable": True}}}
TOOLS = [{"functionDeclarations": [{"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}]}]
Fields = dict[str, Any]


def says(text: str) -> Fields:
    return {"role": "user", "parts": [{"text": text}]}


HELLO = {"contents": [says("Hi")]}


def chunks_of(answer: Any) -> list[Fields]:
    """The answers in a stream of events."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event for event in answer.text.split("\r\n\r\n") if event]
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event[len("data: ") :]) for event in events]


def asked(http: Any, body: Fields, *, way: str) -> list[Fields]:
    """The answer, or its chunks."""
    if way == "whole":
        answer = http.post(GENERATE, json=body)
    else:
        answer = http.post(STREAM, json=body, params={"alt": "sse"} if way == "stream" else {})
    assert answer.status_code == 200, answer.text
    return chunks_of(answer) if way == "stream" else answer.json() if way == "list" else [answer.json()]


@pytest.mark.parametrize("way", ["whole", "list", "stream"])
@pytest.mark.parametrize("shows", [False, True], ids=["", "thoughts"])
def test_tools_and_reasoning_continue_token_for_token(served, way, shows):
    """A stream's chunks are kept as they came, each a content of its own, as Google's client keeps them."""
    script(served, ANSWERS)
    episode, client = served.lease()
    config = {"maxOutputTokens": 96, "thinkingConfig": {"includeThoughts": shows, "thinkingBudget": 8192}}
    contents = [says(ASK)]
    with served.http(client.api_key) as http:
        for turn in range(len(ANSWERS)):
            body = {"contents": contents, "tools": TOOLS, "generationConfig": config}
            answers = asked(http, body, way=way)
            parts = [part for answer in answers for part in answer["candidates"][0]["content"]["parts"]]
            assert [answer["candidates"][0].get("finishReason") for answer in answers][-1] == "STOP"
            assert answers[-1]["usageMetadata"]["candidatesTokenCount"] == len(served.ids(ANSWERS[turn]))
            thought = "".join(part["text"] for part in parts if part.get("thought"))
            assert thought.strip() == ("Two numbers." if shows else "")
            calls = [part["functionCall"] for part in parts if "functionCall" in part]
            assert [(call["name"], call["args"]) for call in calls] == (
                [("add", {"a": 12, "b": 30})] if turn < 2 else []
            )
            contents += [answer["candidates"][0]["content"] for answer in answers]
            results = [
                {"functionResponse": {"id": call["id"], "name": "add", "response": {"result": "42"}}} for call in calls
            ]
            contents.append({"role": "user", "parts": results} if results else says("And then?"))
    rounds = served.stored(episode)
    live = served.server.episodes.get(episode)
    assert ([r.parent for r in rounds], live.branch_causes) == ([None, 0, 1, 2], {})
    assert [whole_prompt(rounds, r).tolist() for r in rounds] == served.engine.prompts
    assert [r.sampled_ids.tolist() for r in rounds] == [served.ids(answer) for answer in ANSWERS]
    assert {float(p) for r in rounds for p in r.logprobs} == {LOGPROB}


def test_the_prompt_is_that_of_the_same_chat(served):
    """Also where a client says neither ids nor roles, and sends signatures back."""
    parameters = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": ["number", "null"]}}}
    _, client = served.lease()
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    client.chat.completions.create(
        model="policy",
        messages=[
            {"role": "system", "content": "Count."},
            {"role": "user", "content": ASK},
            {"role": "assistant", "content": "Well.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_0", "content": "42"},
            {"role": "tool", "tool_call_id": "call_0", "content": '{"error": "none", "code": 1}'},
            {"role": "user", "content": "Sure?"},
        ],
        tools=[{"type": "function", "function": {**FUNCTION, "parameters": parameters}}],
    )
    body = {
        "system_instruction": {"parts": {"text": "Count."}},
        "contents": [
            {"parts": [{"text": ASK}]},
            {"role": "model", "parts": [{"text": "We"}, {"text": "ll.", "thoughtSignature": "abc="}]},
            {"role": "model", "parts": [{"functionCall": {"name": "add", "args": {"a": 1}}, "thought_signature": "x"}]},
            {"parts": [{"functionResponse": {"name": "add", "response": {"output": "42"}}}]},
            {"role": "function", "parts": [
                {"function_response": {"name": "other", "response": {"error": "none", "code": 1}}},
                {"text": "Sure?"},
            ]},
        ],
        "tools": [{"function_declarations": TOOLS[0]["functionDeclarations"][0]}],
    }  # fmt: skip
    with served.http(client.api_key) as http:
        assert http.post(GENERATE, json=body).status_code == 200
        counted = http.post(COUNT, json={"generateContentRequest": body}).json()
    chat, google = served.engine.prompts
    assert chat == google and counted == {"totalTokens": len(google)}


def test_sampling_fields_reach_the_engine(served):
    episode, client = served.lease()
    config = {
        "stopSequences": ["END", "STOP"], "seed": 7, "maxOutputTokens": 9, "presencePenalty": 0.5, "frequencyPenalty": -0.5,
        "candidateCount": 3, "temperature": 0.1, "topK": 40.0, "responseMimeType": "text/plain",
    }  # fmt: skip
    with served.http(client.api_key) as http:
        answer = http.post(GENERATE, json={**HELLO, "generationConfig": config}).json()
        streamed = chunks_of(http.post(STREAM, json={**HELLO, "generationConfig": config}, params={"alt": "sse"}))
    assert [candidate["index"] for candidate in answer["candidates"]] == [0, 1, 2]
    assert [candidate["index"] for candidate in streamed[-1]["candidates"]] == [0, 1, 2]
    params, again = served.engine.params
    assert (params.stop, params.seed, params.max_tokens, params.n) == (["END", "STOP"], seed_of(episode, 7), 9, 3)
    assert (params.presence_penalty, params.frequency_penalty, params.temperature, again.n) == (0.5, -0.5, 1.0, 3)


@pytest.mark.parametrize("field", ["responseSchema", "responseJsonSchema"])
def test_structured_output_reaches_the_engine(served, field):
    _, client = served.lease()
    schema = {"type": "OBJECT", "properties": {"sum": {"type": "INTEGER", "format": "int32"}}, "required": ["sum"]}
    config = {"responseMimeType": "application/json", field: schema if field == "responseSchema" else SCHEMA}
    with served.http(client.api_key) as http:
        assert http.post(GENERATE, json={**HELLO, "generationConfig": config}).status_code == 200
    (params,) = served.engine.params
    assert params.structured_outputs.json == SCHEMA


@pytest.mark.parametrize("allowed", [[], ["add"]])
def test_a_forced_call_continues_and_is_not_the_policys_choice(served, allowed):
    script(served, [THOUGHT + CALL, THOUGHT + "It is 42."])
    episode, client = served.lease()
    forced = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": allowed}}
    with served.http(client.api_key) as http:
        first = http.post(GENERATE, json={"contents": [says(ASK)], "tools": TOOLS, "toolConfig": forced}).json()
        contents = [says(ASK), first["candidates"][0]["content"]]
        contents.append({"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"sum": 42}}}]})
        http.post(GENERATE, json={"contents": contents, "tools": TOOLS})
    assert [r.parent for r in served.stored(episode)] == [None, 0]
    forced_params, free = served.engine.params
    assert "<tool_call>" in forced_params.structured_outputs.structural_tag
    assert free.structured_outputs is None


def of_part(**part: Any) -> Fields:
    return {"contents": [{"role": "user", "parts": [part]}]}


def configured(**config: Any) -> Fields:
    return {**HELLO, "generationConfig": config}


def choosing(mode: str, *names: str) -> Fields:
    calling = {"mode": mode, "allowedFunctionNames": list(names)}
    return {**HELLO, "tools": TOOLS, "toolConfig": {"functionCallingConfig": calling}}


REFUSED = [
    (of_part(inlineData={"mimeType": "image/png", "data": "iVBORw0KGgo="}), "inlineData"),
    (of_part(file_data={"fileUri": "gs://x"}), "fileData"),
    (of_part(executableCode={"code": "1"}), "executableCode"),
    (of_part(functionResponse={"name": "add", "parts": [{"inlineData": {}}]}), "functionResponse.parts"),
    (of_part(functionCall={"name": "add", "args": 3}), "functionCall.args"),
    (of_part(functionResponse={"name": "add", "response": "x"}), "functionResponse.response"),
    (of_part(text=3), "contents.0.parts.0.text"),
    ({"contents": []}, "contents"),
    ({}, "contents"),
    ({"contents": [{"role": "assistant", "parts": [{"text": "x"}]}]}, "role must be user or model"),
    ({"contents": [{"parts": [{"text": "x"}]}] * 4097}, "contents must be at most 4,096"),
    ({**HELLO, "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_LOW_AND_ABOVE"}]}, "safetySettings"),
    ({**HELLO, "cachedContent": "cachedContents/1"}, "cachedContent"),
    ({**HELLO, "tools": [{"googleSearch": {}}]}, "tools.googleSearch"),
    ({**HELLO, "tools": [{"code_execution": {}}]}, "tools.code_execution"),
    (choosing("SOME"), "mode"),
    (choosing("ANY", "x", "y"), "allowedFunctionNames"),
    (configured(responseLogprobs=True), "responseLogprobs"),
    (configured(responseModalities=["IMAGE"]), "responseModalities"),
    (configured(responseMimeType="text/x.enum"), "responseMimeType"),
    (configured(speechConfig={"voiceConfig": {}}), "speechConfig"),
    (configured(candidateCount=129), "n x prompts"),
    (configured(maxOutputTokens="many"), "generationConfig.maxOutputTokens"),
    (configured(topK=1.5), "topK"),
]  # fmt: skip


@pytest.mark.parametrize("way", [GENERATE, STREAM + "?alt=sse"], ids=["whole", "stream"])
@pytest.mark.parametrize(("body", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_cannot_be_served_is_refused_by_name(served, body, named, way):
    episode, client = served.lease()
    with served.http(client.api_key) as http:
        answer = http.post(way, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "status"} and named in error["message"], error
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert served.engine.prompts == [] and served.stored(episode) == []
    assert served.server.model_requests.refused, "it is counted"


def test_fields_that_ask_for_nothing_are_taken(served):
    _, client = served.lease()
    body = {
        **HELLO, "labels": {"a": "b"}, "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "OFF"}],
        "tools": [{"functionDeclarations": []}, {"googleSearch": None}], "toolConfig": {}, "cachedContent": "",
        "generationConfig": {"mediaResolution": "MEDIA_RESOLUTION_LOW", "responseModalities": ["TEXT"], "logprobs": None},
    }  # fmt: skip
    with served.http(client.api_key) as http:
        answer = http.post(GENERATE, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "path", "status", "kind"),
    [
        ("{", GENERATE, 400, "INVALID_ARGUMENT"),
        ("3", GENERATE, 400, "INVALID_ARGUMENT"),
        ('{"contents": ' + 130 * "[" + 130 * "]" + "}", STREAM, 400, "INVALID_ARGUMENT"),
        (json.dumps(HELLO), GENERATE.replace("policy", "gemini-3"), 404, "NOT_FOUND"),
        (json.dumps(HELLO), STREAM.replace("policy", "gemini-3") + "?alt=sse", 404, "NOT_FOUND"),
        (json.dumps({"contents": [says("word " * 16_000)]}), GENERATE, 400, "INVALID_ARGUMENT"),
        (json.dumps({"contents": [says("word " * 16_000)]}), STREAM + "?alt=sse", 400, "INVALID_ARGUMENT"),
    ],
)
def test_errors_are_in_googles_form(served, body, path, status, kind):
    episode, client = served.lease()
    with served.http(client.api_key) as http:
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["status"]) == (status, kind) and error["message"]
    assert served.stored(episode) == []


def test_the_key_is_in_googles_header_in_the_query_or_in_the_path(served):
    episode, client = served.lease()
    key = client.api_key
    with served.http() as http:
        for path, headers in (
            (GENERATE, {"x-goog-api-key": key}),
            (f"{GENERATE}?key={key}", {}),
            (f"{STREAM}?alt=sse&key={key}", {}),
            (f"/e/{key}{GENERATE}", {"x-goog-api-key": "placeholder"}),
            (GENERATE.replace("v1beta", "v1"), {"Authorization": f"Bearer {key}"}),
        ):
            assert http.post(path, json=HELLO, headers=headers).status_code == 200, path
        assert len(served.stored(episode)) == 5
        refused = http.post(GENERATE, json=HELLO)
        assert (refused.status_code, refused.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
        assert http.post(f"/v1/chat/completions?key={key}", json={}).status_code == 401, "of Google's dialect only"
        assert http.post("/tokenize", json=HELLO, headers={"x-goog-api-key": key}).status_code == 404
        assert http.get(GENERATE, headers={"x-goog-api-key": key}).status_code in (404, 405)
