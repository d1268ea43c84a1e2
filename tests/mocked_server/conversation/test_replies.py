"""What agents send back as an earlier answer, and what models say, is data: no spelling of it is a failure of the server."""

from __future__ import annotations

import json
import logging
import random
import re

import pytest

from mocked_server.conversation.chat_history import (
    BranchCause,
    ChatOptions,
    ParsedReply,
    canonical_arguments,
    difference,
    reply_of,
    same_text,
)
from mocked_server.vllm.reply_parser import ReplyParser
from tests.support.server_parts import whole_prompt

DEEP = "[" * 100_000 + "]" * 100_000
ARGUMENTS = {
    "infinite": '{"a": 1e400}',
    "no number": '{"a": NaN}',
    "a long number": '{"a": ' + "1" * 5000 + "}",
    "deep": '{"a": ' + DEEP + "}",
    "open": "[" * 100_000,
    "a large exponent": '{"a": 1e99999999999}',
    "half a pair": '{"a": "\\ud800"}',
    "a list": "[1]",
    "no JSON": "{a",
}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_python_cannot_read_are_compared_as_text(arguments: str) -> None:
    assert canonical_arguments(arguments) == canonical_arguments(arguments)
    assert canonical_arguments(arguments) != canonical_arguments('{"a": 1}')


def test_spellings_of_the_same_arguments_are_one() -> None:
    assert len({canonical_arguments(each) for each in ('{"a":1.0,"b":2}', '{ "b": 2, "a": 1 }', {"a": 1, "b": 2})}) == 1
    assert {canonical_arguments(each) for each in ("", "null", " ", "{}", None)} == {"{}"}


def test_a_first_thought_may_be_cut_out_of_an_answer() -> None:
    """As the expression says that was used before; it takes a time that grows with the square of the spaces."""
    thought, draw = re.compile(r"\s*<think>.*?</think>", re.DOTALL), random.Random(0)
    for _ in range(20_000):
        text = "".join(draw.choice([" ", "\n", "<think>", "</think>", "a"]) for _ in range(draw.randrange(9)))
        cut = thought.sub("", text, count=1)
        assert same_text(reply_of({"content": cut}), text), text
        assert same_text(reply_of({"content": text + "b"}), text) is False
    spaces = " " * 1_000_000 + "a<think>"
    assert not same_text(reply_of({"content": "b"}), spaces) and same_text(
        reply_of({"content": "a b"}), spaces + "</think> b"
    )


@pytest.mark.seconds
def test_a_thought_that_the_template_opened_may_be_cut_out_or_get_its_mark_back() -> None:
    text = "Two numbers.\n</think>\n\n3"
    for content in ("3", text, f"<think>{text}", f"<think>\n{text}\n"):
        assert same_text(reply_of({"role": "assistant", "content": content}), text), content
    for content in ("4", "<think>Three.\n</think>\n\n3", "Two numbers."):
        assert not same_text(reply_of({"role": "assistant", "content": content}), text), content
    assert same_text(reply_of({"role": "assistant", "content": "b"}), "a</think>b"), "whatever a thought says"
    assert not same_text(reply_of({"role": "assistant", "content": "<think>3"}), "3"), "there was no thought"


def test_reasoning_that_a_client_put_back_before_the_content_is_the_same_answer() -> None:
    told = ParsedReply("3", (), "Two numbers.")
    for thought, cause in (
        ("Two numbers.", None),
        ("\nTwo numbers.\n", None),
        ("Three.", BranchCause.REASONING_EDITED),
    ):
        assert difference(reply_of({"role": "assistant", "content": f"<think>{thought}</think>\n\n3"}), told) is cause
    edited = {"role": "assistant", "content": "<think>Two numbers.</think>4"}
    assert difference(reply_of(edited), told) is BranchCause.CONTENT_EDITED
    assert (
        difference(reply_of({"role": "assistant", "content": "<think>a</think>3"}), ParsedReply("3"))
        is BranchCause.CONTENT_EDITED
    )


@pytest.mark.parametrize("error", [RecursionError, TimeoutError, KeyError, AttributeError, ValueError, AssertionError])
def test_a_text_that_the_parser_fails_at_is_content(error: type[Exception]) -> None:
    class Fails:
        def __init__(self, *_: object, **__: object) -> None: ...

        def parse(self, *_: object, **__: object) -> None:
            raise error("no")

    parser = ReplyParser(Fails, tokenizer=None, model_config=None)
    assert parser(" text ", ChatOptions.of({}, None)) == ParsedReply("text")


def history(path: str, arguments: str) -> dict:
    """A conversation in which the agent claims that the model called a tool like this."""
    call = {"name": "f", "arguments": arguments}
    if path == "/v1/responses":
        said = {"type": "function_call", "call_id": "1", **call}
        return {"input": [USER, said, {"type": "function_call_output", "call_id": "1", "output": "x"}]}
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]}
    return {"messages": [USER, said, {"role": "tool", "tool_call_id": "1", "content": "x"}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_no_arguments_in_a_history_fail_the_server_or_break_a_conversation(tools_server, path, arguments) -> None:
    tools_server.engine.answer = lambda _: tools_server.ids("<think>\nhm\n</think>\n\nok")
    (episode, client), (_, attacker) = tools_server.lease(), tools_server.lease()
    said = client.chat.completions.create(model="policy", messages=[USER]).choices[0].message
    with tools_server.http(attacker.api_key) as http:
        for agent in (attacker, client):
            http.headers["authorization"] = f"Bearer {agent.api_key}"
            assert http.post(path, json={"model": "policy", **history(path, arguments)}).status_code in (200, 400)
    messages = [USER, {"role": "assistant", "content": said.content}, USER]
    client.chat.completions.create(model="policy", messages=messages)
    rounds = tools_server.stored(episode)
    assert rounds[-1].parent == 0
    exact = [*whole_prompt(rounds, rounds[0]), *rounds[0].sampled_ids]
    assert whole_prompt(rounds, rounds[-1])[: len(exact)].tolist() == exact


@pytest.mark.seconds
@pytest.mark.parametrize("retry", [{}, {"x-stainless-retry-count": "0"}], ids=["plain", "a client that retries"])
@pytest.mark.parametrize("choice", ["f", "absent"])
def test_a_tool_of_another_shape_is_refused_and_its_connection_goes_on(served, caplog, choice, retry) -> None:
    caplog.set_level(logging.WARNING, logger="mocked_server.http.model_requests")
    episode, client = served.lease()
    tools, named = [{"type": "function"}], {"type": "function", "function": {"name": choice}}
    body = {"model": "policy", "messages": [USER], "tools": tools, "tool_choice": named}
    with served.http(client.api_key) as http:
        refused = http.post("/v1/chat/completions", json=body, headers=retry)
        assert refused.status_code == 400 and "KeyError: 'function'" in refused.json()["error"]["message"]
        assert refused.headers.get("connection") != "close"
        assert http.post("/v1/chat/completions", json={"model": "policy", "messages": [USER]}).status_code == 200
    assert f"episode {episode}" in caplog.text


def test_a_failure_after_something_was_generated_is_the_servers(served, monkeypatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("mocked_server.vllm.serving._Generation.remember", fails)
    _, client = served.lease()
    with served.http(client.api_key) as http:
        assert http.post("/v1/chat/completions", json={"model": "policy", "messages": [USER]}).status_code == 500


def test_a_deep_call_of_the_models_own_loses_no_conversation(tools_server) -> None:
    """Sampled, not claimed: the server parses it when the agent sends it back."""
    deep = '<tool_call>\n{"name": "f", "arguments": {"a": "' + "[" * 40 + '"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    tools_server.engine.answer = lambda _: tools_server.ids(deep)
    episode, client = tools_server.lease()
    said = client.chat.completions.create(model="policy", messages=[USER], tools=tools).choices[0].message
    assert json.loads(said.tool_calls[0].function.arguments) == {"a": "[" * 40}
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "x"}
    messages = [USER, said.model_dump(exclude_none=True), result]
    client.chat.completions.create(model="policy", messages=messages, tools=tools)
    assert [each.parent for each in tools_server.stored(episode)] == [None, 0]
