"""What the model says is its answer, whatever it is: never the agent's bad request, in no dialect, streamed or not."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from configs.schema import RolloutConfig
from tests.mocked_server.http.test_dialects import ASK, CHAT_TOOLS, MESSAGES_TOOLS, RESPONSES_TOOLS
from tests.mocked_server.http.test_dialects import served as served
from tests.mocked_server.http.test_gemini import TOOLS, asked, says
from tests.support.server_parts import ServerThread, whole_prompt

ARGUMENTS = {
    "half a pair": '{"a": "\\ud83d"}',
    "the other half, as a name": '{"\\ude00": 1}',
    "no number": '{"a": NaN}',
    "infinite": '{"a": -Infinity}',
    "too large": '{"a": 1e999}',
    "a list": "[1, 2]",
    "a text": '"ls -la"',
    "nothing": "null",
}


def told_as_object(arguments: Any, text: str) -> None:
    """An object that any JSON has."""
    if not text:
        return
    assert isinstance(arguments, dict)
    json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    assert arguments in ({}, {"arguments": arguments.get("arguments")}) and (text == "null") == (arguments == {})


def chat(client, messages, *, stream, text) -> None:
    options = {"model": "policy", "messages": messages, "tools": CHAT_TOOLS}
    if stream:
        with client.chat.completions.stream(**options) as events:
            reply = events.until_done().get_final_completion()
    else:
        reply = client.chat.completions.create(**options)
    messages.append(reply.choices[0].message.model_dump(exclude_none=True))
    for call in reply.choices[0].message.tool_calls or ():
        call.function.arguments.encode()
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "no such arguments"})


def responses(client, items, *, stream, text) -> None:
    options = {"model": "policy", "input": items, "tools": RESPONSES_TOOLS, "store": False}
    if stream:
        with client.responses.stream(**options) as events:
            reply = events.get_final_response()
    else:
        reply = client.responses.create(**options)
    items += [item.model_dump(exclude_none=True) for item in reply.output]
    for call in (item for item in reply.output if item.type == "function_call"):
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "no such arguments"})


def messages(client, turns, *, stream, text) -> None:
    options = {"model": "policy", "messages": turns, "tools": MESSAGES_TOOLS, "max_tokens": 96}
    base_url = str(client.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=base_url, api_key=client.api_key, max_retries=0) as asking:
        if stream:
            with asking.messages.stream(**options) as events:
                reply = events.get_final_message()
        else:
            reply = asking.messages.create(**options)
    turns.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]})
    calls = [block for block in reply.content if block.type == "tool_use"]
    for call in calls:
        told_as_object(call.input, text)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "no such arguments"} for call in calls]
    turns.append({"role": "user", "content": results or "And?"})


TURNS = {"chat": chat, "responses": responses, "messages": messages}


def says_a_call(served, arguments: str, *, name: str = "add") -> None:
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    served.engine.answer = lambda _: served.ids("<think>\nhm\n</think>\n\n" + call)


def is_one_row(served, episode: str) -> None:
    rounds = served.stored(episode)
    live = served.server.episodes.get(episode)
    assert ([r.parent for r in rounds], live.branch_causes) == ([None, 0], {})
    assert [whole_prompt(rounds, r).tolist() for r in rounds] == served.engine.prompts


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", TURNS)
@pytest.mark.parametrize("text", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_json_has_not_are_told_and_recognised(served, dialect, stream, text) -> None:
    says_a_call(served, text)
    episode, client = served.lease()
    conversation = [{"role": "user", "content": ASK}]
    for _ in range(2):
        TURNS[dialect](client, conversation, stream=stream, text=text)
    is_one_row(served, episode)


@pytest.mark.parametrize("way", ["whole", "list", "stream"])
@pytest.mark.parametrize("text", ARGUMENTS.values(), ids=ARGUMENTS)
def test_so_are_they_in_googles_dialect(served, way, text) -> None:
    says_a_call(served, text)
    episode, client = served.lease()
    contents = [says(ASK)]
    with served.http(client.api_key) as http:
        for _ in range(2):
            answers = asked(http, {"contents": contents, "tools": TOOLS}, way=way)
            parts = [part for answer in answers for part in answer["candidates"][0]["content"]["parts"]]
            calls = [part["functionCall"] for part in parts if "functionCall" in part]
            for call in calls:
                told_as_object(call["args"], text)
            contents += [answer["candidates"][0]["content"] for answer in answers]
            result = {"name": "add", "response": {"result": "no such arguments"}}
            contents.append(
                {"role": "user", "parts": [{"functionResponse": {"id": call["id"], **result}} for call in calls]}
                if calls
                else says("And?")
            )
    is_one_row(served, episode)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", TURNS)
def test_a_name_that_cannot_be_sent_is_told(served, dialect, stream) -> None:
    says_a_call(served, '{"a": 1}', name="\\udc00")
    _, client = served.lease()
    TURNS[dialect](client, [{"role": "user", "content": ASK}], stream=stream, text="")
    assert len(served.engine.prompts) == 1


@pytest.mark.parametrize("dialect", TURNS)
@pytest.mark.parametrize("error", [ValueError, KeyError, RecursionError, OSError])
def test_what_the_layer_above_fails_at_after_it_was_sampled_is_told_as_text(
    served, monkeypatch, dialect, error
) -> None:
    """Whatever it fails at: here its usage, which has nothing to do with what was said."""
    says_a_call(served, '{"a": 1}')
    state = served.serving_state()
    failed = []

    def fails(*_: Any, **__: Any) -> Any:
        failed.append(1)
        if len(failed) == 1:
            raise error("no")
        return 0

    for part in (state.openai_serving_chat, state.openai_serving_responses, state.anthropic_serving_messages):
        parser = getattr(part, "parser_cls", None) or part.parser
        monkeypatch.setattr(parser, "count_reasoning_tokens", fails)
    episode, client = served.lease()
    conversation = [{"role": "user", "content": ASK}]
    for _ in range(2):
        TURNS[dialect](client, conversation, stream=False, text="")
        if dialect != "messages" and len(conversation) < 3:
            conversation.append({"role": "user", "content": "And?"})
    assert len(served.engine.prompts) == 2, "nothing was sampled again"
    is_one_row(served, episode)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_input_of_a_custom_tool_is_told(served, stream) -> None:
    says_a_call(served, '{"input": "\\ud83d"}')
    episode, client = served.lease()
    items: list[Any] = [{"role": "user", "content": ASK}]
    for _ in range(2):
        options = {"model": "policy", "input": items, "tools": [{"type": "custom", "name": "add"}]}
        if stream:
            with client.responses.stream(**options) as events:
                reply = events.get_final_response()
        else:
            reply = client.responses.create(**options)
        (call,) = (item for item in reply.output if item.type == "custom_tool_call")
        assert call.input == "\\ud83d"
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        items.append({"type": "custom_tool_call_output", "call_id": call.call_id, "output": "no such input"})
    is_one_row(served, episode)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", TURNS)
def test_a_text_that_the_parser_fails_at_is_told(served, monkeypatch, dialect, stream) -> None:
    from vllm.parser.abstract_parser import DelegatingParser

    def fails(*_: Any, **__: Any) -> Any:
        raise TimeoutError("the pattern took too long")

    for name in ("_extract_tool_calls", "_extract_tool_calls_streaming"):
        monkeypatch.setattr(DelegatingParser, name, fails)
    says_a_call(served, '{"a": 1}')
    episode, client = served.lease()
    conversation = [{"role": "user", "content": ASK}]
    for _ in range(2):
        TURNS[dialect](client, conversation, stream=stream, text="")
        if dialect != "messages" and len(conversation) < 4:
            conversation.append({"role": "user", "content": "And?"})
    is_one_row(served, episode)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", TURNS)
@pytest.mark.parametrize("said", ['<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>', "<tool_call>\n"])
def test_an_answer_of_which_no_parser_tells_anything_is_told_as_text(served, dialect, stream, said) -> None:
    served.engine.answer = lambda _: served.ids(said)
    episode, client = served.lease()
    conversation = [{"role": "user", "content": ASK}]
    for _ in range(2):
        TURNS[dialect](client, conversation, stream=stream, text="")
        if conversation[-1].get("role") != "user":
            conversation.append({"role": "user", "content": "And?"})
    is_one_row(served, episode)


@pytest.mark.slow
@pytest.mark.parametrize("text", ['{"a": "\\ud83d"}', '{"\\uDE00": [1]}', '{"a": "\\ud83d\\ude00"}'])
def test_they_are_no_bad_request_where_the_whole_history_is_rendered(tiny_model, text) -> None:
    rollout = RolloutConfig(max_tokens=96, max_model_len=4096)
    server = ServerThread(
        tiny_model, rollout=rollout, tool_parser="hermes", reasoning_parser="qwen3", replay_match="strict"
    )
    server.start()
    try:
        says_a_call(server, text)
        episode, client = server.lease()
        conversation = [{"role": "user", "content": ASK}]
        for _ in range(2):
            chat(client, conversation, stream=False, text=text)
        assert len(server.stored(episode)) == 2
    finally:
        server.stop()
