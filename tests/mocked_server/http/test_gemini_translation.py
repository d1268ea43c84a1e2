"""Rules of mocked_server/http/gemini_requests.py and gemini_routes.py: requests and answers in other words, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from mocked_server.conversation.chat_history import ParsedReply, arguments_of, difference, reply_of
from mocked_server.http.gemini_requests import generation_of, json_schema_of
from mocked_server.http.gemini_routes import StreamedAnswer, whole_answer


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": 1, "b": {"c": [1.5, null]}}', {"a": 1, "b": {"c": [1.5, None]}}),
        ("", {}),
        ("  ", {}),
        ("[1]", {"arguments": "[1]"}),
        ('"city"', {"arguments": '"city"'}),
        ("{a: 1}", {"arguments": "{a: 1}"}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
        ('{"a": 1e400}', {"arguments": '{"a": 1e400}'}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
    ],
)
def test_arguments_are_an_object(text: str, arguments: dict[str, Any]) -> None:
    assert arguments_of(text) == arguments


@pytest.mark.parametrize(
    ("google", "schema"),
    [
        ({"type": "STRING", "format": "date"}, {"type": "string"}),
        ({"type": "STRING", "nullable": True, "enum": ["a"]}, {"type": ["string", "null"], "enum": ["a", None]}),
        ({"type": "TYPE_UNSPECIFIED", "nullable": False, "title": "x"}, {"title": "x"}),
        (
            {"type": "ARRAY", "min_items": "2", "maxItems": 3, "items": {"any_of": [{"type": "NUMBER"}, {"type": "NULL"}]}},
            {"type": "array", "minItems": 2, "maxItems": 3, "items": {"anyOf": [{"type": "number"}, {"type": "null"}]}},
        ),
        (
            {"type": "OBJECT", "properties": {"type": {"type": "INTEGER"}, "min_items": {"type": "BOOLEAN"}},
             "required": ["min_items"], "propertyOrdering": ["type"]},
            {"type": "object", "properties": {"type": {"type": "integer"}, "min_items": {"type": "boolean"}},
             "required": ["min_items"]},
        ),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "STRING"}}}, {"$ref": "#/$defs/x", "$defs": {"x": {"type": "string"}}}),
        ({"minLength": "many", "items": True}, {"minLength": "many", "items": True}),
    ],
)  # fmt: skip
def test_a_schema_is_said_as_json_schema_says_it(google: Any, schema: Any) -> None:
    assert json_schema_of(google) == schema


MESSAGE = {
    "reasoning": "Hm.",
    "content": "Let me add.",
    "tool_calls": [
        {"id": "1", "function": {"name": "add", "arguments": '{"a":12,"b":30.0}'}},
        {"id": "2", "function": {"name": "add", "arguments": "{}"}},
    ],
}
TOLD = ParsedReply("Let me add.", (("add", '{"a": 12, "b": 30}'), ("add", "{}")), "Hm.")


def chunk(**delta: Any) -> dict[str, Any]:
    return {"id": "x", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def part_of_call(index: int, arguments: str, **others: Any) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": arguments, **others.pop("function", {})}, **others}


CHUNKS = [
    chunk(role="assistant", content=""),
    chunk(reasoning="H"),
    chunk(reasoning="m."),
    chunk(content="Let me "),
    chunk(content="add."),
    chunk(tool_calls=[part_of_call(0, "", id="1", function={"name": "add"})]),
    chunk(tool_calls=[part_of_call(0, '{"a":12,')]),
    chunk(tool_calls=[part_of_call(0, '"b":30.0}'), part_of_call(1, "{}", id="2", function={"name": "add"})]),
    {"id": "x", "model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    {"id": "x", "model": "m", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}},
]


def replied(contents: list[Any]) -> dict[str, Any]:
    """The assistant message of a next request that sends these contents back."""
    question = {"role": "user", "parts": [{"text": "?"}]}
    messages = generation_of({"contents": [question, *contents, question]}, model="m", streams=False)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    answer: dict[str, Any] = messages[1]
    return answer


@pytest.mark.parametrize("shows", [False, True])
def test_an_answer_that_comes_back_is_the_answer_that_was_given(shows: bool) -> None:
    chat = {"id": "x", "model": "m", "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "tool_calls"}]}
    whole = whole_answer(chat, shows_thoughts=shows)
    assert difference(reply_of(replied([whole["candidates"][0]["content"]])), TOLD) is None
    streamed = StreamedAnswer(shows_thoughts=shows)
    told = [answer for each in CHUNKS if (answer := streamed.take(each)) is not None]
    assert difference(reply_of(replied([answer["candidates"][0]["content"] for answer in told])), TOLD) is None
    parts = [part for answer in told for part in answer["candidates"][0]["content"]["parts"]]
    assert parts[-2:] == [
        {"functionCall": {"id": "1", "name": "add", "args": {"a": 12, "b": 30.0}}},
        {"functionCall": {"id": "2", "name": "add", "args": {}}},
    ]
    assert ({"text": "H", "thought": True} in parts) == shows and len(told) == 3 + 2 * shows
    assert [answer["candidates"][0].get("finishReason") for answer in told][-2:] == [None, "STOP"]
    assert told[-1]["usageMetadata"] == {"promptTokenCount": 5, "candidatesTokenCount": 7, "totalTokenCount": 12}


@pytest.mark.parametrize(
    ("reason", "told"), [("stop", "STOP"), ("tool_calls", "STOP"), ("length", "MAX_TOKENS"), ("abort", "OTHER")]
)
def test_why_an_answer_ended(reason: str, told: str) -> None:
    chat = {"id": "x", "model": "m", "choices": [{"index": 0, "message": {"content": ""}, "finish_reason": reason}]}
    (candidate,) = whole_answer(chat, shows_thoughts=True)["candidates"]
    assert candidate == {"content": {"role": "model", "parts": [{"text": ""}]}, "index": 0, "finishReason": told}


def test_results_of_calls_without_ids_are_matched_by_name_and_order() -> None:
    calls = [{"functionCall": {"name": name, "args": {}}} for name in ("add", "sub", "add")]
    results = [{"functionResponse": {"name": name, "response": {"result": text}}} for name, text in
               (("add", "1"), ("add", "2"), ("sub", "3"), ("other", "4"))]  # fmt: skip
    contents = [{"parts": [{"text": "?"}]}, {"role": "model", "parts": calls}, {"parts": results}]
    messages = generation_of({"contents": contents}, model="m", streams=False)["messages"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["call_0", "call_1", "call_2"]
    assert [(message["tool_call_id"], message["content"]) for message in messages[2:]] == [
        ("call_0", "1"), ("call_2", "2"), ("call_1", "3"), ("other", "4"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("thinking", "effort"),
    [
        ({"thinkingBudget": 0}, "none"),
        ({"thinkingBudget": -1}, None),
        ({"thinkingBudget": 8192, "thinkingLevel": "HIGH"}, "high"),
        ({"thinkingLevel": "THINKING_LEVEL_UNSPECIFIED"}, None),
    ],
)
def test_how_much_is_thought(thinking: dict[str, Any], effort: str | None) -> None:
    body = {"contents": [{"parts": [{"text": "?"}]}], "generationConfig": {"thinkingConfig": thinking}}
    assert generation_of(body, model="m", streams=False).get("reasoning_effort") == effort
