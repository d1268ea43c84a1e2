"""How an answer ended is told as it was: cut, with a call, or without the one that was required."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import pytest

from configs.schema import RolloutConfig
from tests.mocked_server.http.test_dialects import ASK, CALL, CHAT_TOOLS, MESSAGES_TOOLS, RESPONSES_TOOLS
from tests.support.server_parts import ServerThread

CODER = "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n30\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n<arg_key>b</arg_key>\n<arg_value>30</arg_value></tool_call>"
PARSERS = {"qwen3_coder": CODER, "glm45": GLM, "hermes": CALL}


@pytest.fixture(scope="module", params=PARSERS)
def calling(request, tiny_model) -> Iterator[tuple[ServerThread, str]]:
    rollout = RolloutConfig(max_tokens=300, max_model_len=4096)
    thread = ServerThread(tiny_model, rollout=rollout, tool_parser=request.param)
    thread.start()
    yield thread, PARSERS[request.param]
    thread.stop()


@pytest.mark.slow
def test_a_call_that_was_cut_is_none_to_run(calling) -> None:
    served, text = calling
    served.engine.answer = lambda _: served.ids(text)
    _, client = served.lease()
    whole, ends = len(served.ids(text)), set()
    for cut in range(4, whole, 7):
        told = client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": ASK}], tools=CHAT_TOOLS, max_tokens=cut
        )
        ends.add(told.choices[0].finish_reason)
        with anthropic.Anthropic(base_url=served.server.base_url, api_key=client.api_key, max_retries=0) as asking:
            said = asking.messages.create(
                model="policy", messages=[{"role": "user", "content": ASK}], tools=MESSAGES_TOOLS, max_tokens=cut
            )
        ends.add(said.stop_reason)
    assert ends == {"length", "max_tokens"}
    told = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": ASK}], tools=CHAT_TOOLS, max_tokens=whole
    )
    assert told.choices[0].finish_reason == "tool_calls"
    assert json.loads(told.choices[0].message.tool_calls[0].function.arguments) == {"a": 12, "b": 30}


@pytest.mark.parametrize("text", ["It is 42.", CALL], ids=["words", "a call"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_response_that_was_cut_is_incomplete_with_its_last_item(tools_server, text, stream) -> None:
    tools_server.engine.answer = lambda _: tools_server.ids("<think>\nhm\n</think>\n\n" + text + " and more")
    _, client = tools_server.lease()
    num_tokens = len(tools_server.ids("<think>\nhm\n</think>\n\n" + text, end=False))
    options = {"model": "policy", "input": ASK, "tools": RESPONSES_TOOLS, "max_output_tokens": num_tokens}
    if stream:
        *events, last = list(client.responses.create(**options, stream=True))
        assert last.type == "response.incomplete" and last.sequence_number == len(events)
        items = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.status for item in items] == [item.status for item in last.response.output]
        told = last.response
    else:
        told = client.responses.create(**options)
    assert (told.status, told.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert told.output[-1].status == "incomplete" and told.output[-1].type in ("message", "function_call")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_complete_response_is_completed(tools_server, stream) -> None:
    tools_server.engine.answer = lambda _: tools_server.ids("<think>\nhm\n</think>\n\n" + CALL)
    _, client = tools_server.lease()
    options = {"model": "policy", "input": ASK, "tools": RESPONSES_TOOLS}
    if stream:
        events = list(client.responses.create(**options, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        told = events[-1].response
    else:
        told = client.responses.create(**options)
    assert told.status == "completed" and told.output[-1].status == "completed"


def test_a_required_call_that_was_not_made_is_told_as_none(tools_server) -> None:
    tools_server.engine.answer = lambda _: tools_server.ids("<think>\nhm\n</think>\n\nNo.")
    _, client = tools_server.lease()
    told = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": ASK}], tools=CHAT_TOOLS, tool_choice="required"
    )
    assert (told.choices[0].finish_reason, told.choices[0].message.tool_calls or []) == ("stop", [])
