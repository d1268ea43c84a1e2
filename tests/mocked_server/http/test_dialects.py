"""Every dialect of the model API: captured, continued token for token, streaming or not, with its own errors."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

from mocked_server.vllm.sampling_rules import seed_of
from tests.support.server_parts import LOGPROB, whole_prompt

FUNCTION = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS = [{"type": "function", "strict": False, **FUNCTION}]
MESSAGES_TOOLS = [{"name": "add", "description": "Add two numbers.", "input_schema": FUNCTION["parameters"]}]
THOUGHT = "<think>\nTwo numbers.\n</think>\n\n"
CALL = '<tool_call>\n{"name":"add","arguments":{"a":12,"b":30}}\n</tool_call>'
ANSWERS = [THOUGHT + "Let me add.\n" + CALL, THOUGHT + CALL, THOUGHT + "It is 42.", THOUGHT + "Bye."]
ASK = "What is 12 + 30?"


@pytest.fixture
def served(tools_server):
    tools_server.engine.answer = lambda _: tools_server.ids(THOUGHT + "ok")
    tools_server.engine.prompts.clear()
    tools_server.engine.params.clear()
    return tools_server


def script(served, answers):
    left = iter(answers)
    served.engine.answer = lambda _: served.ids(next(left))


def chat_turns(served, client, *, stream):
    messages = [{"role": "user", "content": ASK}]
    for turn in range(len(ANSWERS)):
        options = {"model": "policy", "messages": messages, "tools": CHAT_TOOLS}
        if stream:
            with client.chat.completions.stream(**options) as events:
                reply = events.until_done().get_final_completion()
        else:
            reply = client.chat.completions.create(**options)
        message = reply.choices[0].message
        expected = "tool_calls" if turn < 2 else "stop"
        assert reply.choices[0].finish_reason == expected
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 12, "b": 30})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "And then?"})


def responses_turns(served, client, *, stream):
    items = [{"role": "user", "content": ASK}]
    for turn in range(len(ANSWERS)):
        options = {"model": "policy", "input": items, "tools": RESPONSES_TOOLS, "store": False}
        if stream:
            with client.responses.stream(**options) as events:
                reply = events.get_final_response()
        else:
            reply = client.responses.create(**options)
        assert reply.status == "completed"
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        assert len(calls) == (1 if turn < 2 else 0)
        for call in calls:
            assert (call.name, json.loads(call.arguments)) == ("add", {"a": 12, "b": 30})
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "42"})
        if not calls:
            items.append({"role": "user", "content": "And then?"})


def messages_turns(served, client, *, stream):
    client = anthropic.Anthropic(base_url=served.server.base_url, api_key=client.api_key, max_retries=0)
    messages = [{"role": "user", "content": ASK}]
    with client:
        for turn in range(len(ANSWERS)):
            options = {"model": "policy", "messages": messages, "tools": MESSAGES_TOOLS, "max_tokens": 96}
            if stream:
                with client.messages.stream(**options) as events:
                    reply = events.get_final_message()
            else:
                reply = client.messages.create(**options)
            assert reply.stop_reason == ("tool_use" if turn < 2 else "end_turn")
            messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
            calls = [block for block in reply.content if block.type == "tool_use"]
            results = []
            for call in calls:
                assert (call.name, call.input) == ("add", {"a": 12, "b": 30})
                results.append({"type": "tool_result", "tool_use_id": call.id, "content": "42"})
            messages.append({"role": "user", "content": results or "And then?"})


TURNS = {"chat": chat_turns, "responses": responses_turns, "messages": messages_turns}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", TURNS)
def test_tools_and_reasoning_continue_token_for_token(served, dialect, stream):
    script(served, ANSWERS)
    episode, client = served.lease()
    TURNS[dialect](served, client, stream=stream)
    rounds = served.stored(episode)
    live = served.server.episodes.get(episode)
    assert ([r.parent for r in rounds], live.branch_causes) == ([None, 0, 1, 2], {})
    assert [whole_prompt(rounds, r).tolist() for r in rounds] == served.engine.prompts
    assert [r.sampled_ids.tolist() for r in rounds] == [served.ids(answer) for answer in ANSWERS]
    assert {float(p) for r in rounds for p in r.logprobs} == {LOGPROB}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_completions_are_recorded(served, stream):
    episode, client = served.lease()
    reply = client.completions.create(model="policy", prompt=["One", "Two"], max_tokens=30, stream=stream)
    texts = ["", ""]
    for choice in (choice for chunk in reply for choice in chunk.choices) if stream else reply.choices:
        texts[choice.index] += choice.text
    assert texts == 2 * [THOUGHT + "ok"]
    assert len(served.stored(episode)) == 2


def test_sampling_fields_reach_the_engine(served):
    episode, client = served.lease()
    client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": ASK}], stop=["END", "STOP"], seed=7, max_completion_tokens=9,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"5": 1.5}, n=3, logprobs=True, top_logprobs=2,
        extra_body={"repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [3]},
    )  # fmt: skip
    (params,) = served.engine.params
    assert (params.stop, params.seed, params.max_tokens, params.n) == (["END", "STOP"], seed_of(episode, 7), 9, 3)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (params.logit_bias, params.logprobs, params.min_tokens) == ({5: 1.5}, 2, 2)
    assert 3 in params.stop_token_ids


def test_logprobs_are_those_that_are_recorded(served):
    episode, client = served.lease()
    reply = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": ASK}], logprobs=True, max_tokens=30
    )
    shown = [token.logprob for token in reply.choices[0].logprobs.content]
    (stored,) = served.stored(episode)
    assert shown == stored.logprobs.tolist()


SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_structured_output_reaches_the_engine(served, dialect):
    _, client = served.lease()
    message = [{"role": "user", "content": ASK}]
    if dialect == "chat":
        wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
        client.chat.completions.create(model="policy", messages=message, response_format=wanted)
    elif dialect == "responses":
        wanted = {"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA}}
        client.responses.create(model="policy", input=ASK, text=wanted)
    else:
        wanted = {"format": {"type": "json_schema", "schema": SCHEMA}}
        body = {"model": "policy", "messages": message, "max_tokens": 50, "output_config": wanted}
        with served.http(client.api_key) as http:
            assert http.post("/v1/messages", json=body).status_code == 200
    (params,) = served.engine.params
    assert params.structured_outputs.json == SCHEMA


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_tool_call_continues_token_for_token(served, choice):
    script(served, [THOUGHT + CALL, THOUGHT + "It is 42."])
    episode, client = served.lease()
    messages = [{"role": "user", "content": ASK}]
    reply = client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS, tool_choice=choice)
    message = reply.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 12, "b": 30})
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS)
    assert [r.parent for r in served.stored(episode)] == [None, 0]
    forced, free = served.engine.params
    assert "<tool_call>" in forced.structured_outputs.structural_tag
    assert free.structured_outputs is None


def test_counting_tokens_gives_the_length_of_the_exact_prompt_and_records_nothing(served):
    episode, client = served.lease()
    messages = [{"role": "user", "content": ASK}]
    with anthropic.Anthropic(base_url=served.server.base_url, api_key=client.api_key) as counter:
        first = counter.messages.count_tokens(model="policy", messages=messages).input_tokens
        reply = counter.messages.create(model="policy", messages=messages, max_tokens=50)
        messages += [{"role": "assistant", "content": reply.content[-1].text}, {"role": "user", "content": "And then?"}]
        second = counter.messages.count_tokens(model="policy", messages=messages).input_tokens
        counter.messages.create(model="policy", messages=messages, max_tokens=50)
    assert [first, second] == [len(prompt) for prompt in served.engine.prompts]
    assert len(served.stored(episode)) == 2


REFUSED = [
    ("/v1/chat/completions", "use_beam_search", True),
    ("/v1/chat/completions", "prompt_logprobs", 1),
    ("/v1/chat/completions", "echo", True),
    ("/v1/chat/completions", "functions", [FUNCTION]),
    ("/v1/chat/completions", "function_call", "auto"),
    ("/v1/chat/completions", "modalities", ["text", "audio"]),
    ("/v1/chat/completions", "return_token_ids", True),
    ("/v1/chat/completions", "truncate_prompt_tokens", 10),
    ("/v1/chat/completions", "chat_template", "x"),
    ("/v1/completions", "prompt_embeds", "AAAA"),
    ("/v1/completions", "best_of", 2),
    ("/v1/completions", "suffix", "end"),
    ("/v1/chat/completions", "structured_outputs", False),
    ("/v1/responses", "previous_response_id", "resp_1"),
    ("/v1/responses", "conversation", "conv_1"),
    ("/v1/responses", "background", True),
    ("/v1/messages", "mcp_servers", [{"type": "url", "url": "http://x", "name": "x"}]),
    ("/v1/messages", "context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
    ("/v1/messages", "messages", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "One, two"}]),
    ("/v1/messages", "messages", [{"role": "assistant", "content": [{"type": "text", "text": "{"}]}]),
]


def smallest(path):
    asks = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    return {"model": "policy", **({"input": "Hi"} if path == "/v1/responses" else asks), "max_tokens": 50}


@pytest.mark.parametrize(("path", "field", "value"), REFUSED, ids=[f"{p} {f}" for p, f, _ in REFUSED])
def test_a_field_that_cannot_be_served_is_refused_by_name(served, path, field, value):
    episode, client = served.lease()
    with served.http(client.api_key) as http:
        answer = http.post(path, json={**smallest(path), field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert field in error["message"]
    if path == "/v1/messages":
        assert (answer.json()["type"], error["type"]) == ("error", "invalid_request_error")
    else:
        assert (error["param"], error["code"]) == (field, "unsupported_field")
    assert served.engine.prompts == [] and served.stored(episode) == []


ANSWER = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"}


@pytest.mark.parametrize("parts", [[{"type": "refusal", "refusal": "No."}], []])
def test_an_earlier_answer_that_refused_or_said_nothing_is_a_text(served, parts):
    episode, client = served.lease()
    input_ = [{"role": "user", "content": "Hi"}, {**ANSWER, "content": parts}, {"role": "user", "content": "Why?"}]
    with served.http(client.api_key) as http:
        answer = http.post("/v1/responses", json={**smallest("/v1/responses"), "input": input_})
    assert answer.status_code == 200, answer.text
    assert ("No." in served.server.decode(served.engine.prompts[0])) == bool(parts)
    assert len(served.stored(episode)) == 1


HARMLESS = [
    ("/v1/chat/completions", {"modalities": ["text"], "functions": None, "user": "me", "metadata": {"echo": "x"}}),
    ("/v1/completions", {"best_of": 1, "suffix": None, "echo": False}),
    ("/v1/responses", {"previous_response_id": None, "background": False, "store": True}),
    ("/v1/messages", {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
]


MOST = {
    "/v1/chat/completions": ["max_tokens", "max_completion_tokens"],
    "/v1/completions": ["max_tokens"],
    "/v1/responses": ["max_output_tokens"],
    "/v1/messages": ["max_tokens"],
    "/v1beta/models/policy:generateContent": ["generationConfig"],
}


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, fields in MOST.items() for field in fields])
def test_more_tokens_than_the_run_gives_are_capped(served, path, field):
    _, client = served.lease()
    if field == "generationConfig":
        body = {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}], field: {"maxOutputTokens": 32_000}}
    else:
        body = {**smallest(path), field: 32_000}
        if path != "/v1/messages" and field != "max_tokens":
            body.pop("max_tokens")
    with served.http(client.api_key) as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert len(served.engine.prompts) == 1


def test_a_budget_of_thoughts_is_left_to_the_model_without_a_reasoning_parser(served):
    episode, client = served.lease()
    thinking = {"type": "enabled", "budget_tokens": 31_000}
    with served.http(client.api_key) as http:
        answer = http.post(
            "/v1/messages", json={**smallest("/v1/messages"), "max_tokens": 32_000, "thinking": thinking}
        )
    assert answer.status_code == 200, answer.text
    (round_,) = served.stored(episode)
    assert round_.trained is None, "all of it is trained"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_several_answers_at_an_agents_temperature_of_0_are_sampled(served, path):
    episode, client = served.lease()
    with served.http(client.api_key) as http:
        answer = http.post(path, json={**smallest(path), "temperature": 0, "n": 2})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 2 and len(served.stored(episode)) == 2


@pytest.mark.parametrize(("path", "fields"), HARMLESS)
def test_fields_that_ask_for_nothing_are_taken(served, path, fields):
    _, client = served.lease()
    with served.http(client.api_key) as http:
        answer = http.post(path, json={**smallest(path), **fields})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ("{", 400, "invalid_request_error"),
        ('{"model": "policy"}', 400, "invalid_request_error"),
        ('{"model": "policy", "messages": 3, "max_tokens": 5}', 400, "invalid_request_error"),
        ('{"model": "policy", "messages": [{"role": "user", "content": "x"}]}', 400, "invalid_request_error"),
        ('{"model": "other", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}', 404, "not_found_error"),
    ],
)
def test_messages_answers_errors_in_its_own_form(served, body, status, kind):
    episode, client = served.lease()
    with served.http(client.api_key) as http:
        answer = http.post("/v1/messages", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"type", "error"} and answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == kind and answer.json()["error"]["message"]
    assert served.stored(episode) == []


def test_a_prompt_that_is_too_long_is_an_error_of_each_dialect(served):
    _, client = served.lease()
    text = "word " * 16000
    with pytest.raises(openai.BadRequestError, match="4096"):
        client.responses.create(model="policy", input=text)
    other = anthropic.Anthropic(base_url=served.server.base_url, api_key=client.api_key)
    with other, pytest.raises(anthropic.BadRequestError, match="4096"):
        other.messages.create(model="policy", messages=[{"role": "user", "content": text}], max_tokens=8)
    assert served.engine.prompts == []


def test_images_are_refused(served):
    _, client = served.lease()
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": [part]}])
    assert served.engine.prompts == []


def test_images_are_refused_also_where_the_model_sees(served, monkeypatch):
    """Only token ids are passed on and recorded: the image itself would be lost on the way."""
    _, client = served.lease()
    seen = served.server._client
    generate = seen.generate
    monkeypatch.setattr(
        seen, "generate", lambda prompt, *args, **kw: generate({**prompt, "type": "multimodal"}, *args, **kw)
    )
    with pytest.raises(openai.BadRequestError, match="only text is served"):
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": ASK}])
    assert served.engine.prompts == []


def test_both_keys_may_be_sent_one_of_them_a_placeholder(served):
    episode, client = served.lease()
    headers = {"x-api-key": "placeholder", "Authorization": f"Bearer {client.api_key}"}
    with served.http() as http:
        answer = http.post("/v1/messages", json=smallest("/v1/messages"), headers=headers)
    assert answer.status_code == 200, answer.text
    assert len(served.stored(episode)) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_the_key_in_the_path_works_in_every_dialect(served, path):
    episode, client = served.lease()
    with served.http() as http:
        answer = http.post(f"/e/{client.api_key}{path}", json=smallest(path))
    assert answer.status_code == 200, answer.text
    assert len(served.stored(episode)) == 1
