"""Errors on streams: refused with a status before anything was generated, told as an event afterwards."""

from __future__ import annotations

import json

import openai
import pytest

from buffers.errors import EngineError
from mocked_server.http.dialects import CHAT, COMPLETIONS, MESSAGES, RESPONSES, error_event

HI = [{"role": "user", "content": "hi"}]
BODIES = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 4},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_is_refused_before_it_generates_has_a_status_and_names_the_field(served, path):
    _, client = served.lease()
    with served.http(client.api_key) as http:
        wrong = (
            {"stop_sequences": [str(number) for number in range(100)]}
            if path == MESSAGES
            else {"logit_bias": {"99999": 1}}
        )
        answer = http.post(path, json={"model": "policy", "stream": True, **wrong, **BODIES[path]})
    assert answer.status_code == 400 and ("stop" if path == MESSAGES else "logit_bias") in answer.text, answer.text
    assert answer.headers["content-type"] == "application/json" and served.engine.prompts == []


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_fails_after_it_began_ends_with_an_error_and_no_broken_connection(served, path):
    _, client = served.lease()
    served.engine.answer = lambda _: served.ids("The exit is north.")

    def break_off(output: object) -> None:
        raise EngineError("lost")

    kept, served.generation._count = served.generation._count, lambda *_: break_off(None)
    served.engine.revives = True
    try:
        with served.http(client.api_key) as http:
            answer = http.post(path, json={"model": "policy", "stream": True, **BODIES[path]})
    finally:
        served.generation._count, served.engine.revives = kept, False
    assert answer.status_code == 200 and "error" in answer.text


def test_the_error_event_of_the_responses_api_is_what_its_client_reads():
    (line,) = [
        part
        for part in error_event(RESPONSES, status=503, message="lost", code="gone").decode().split("\n")
        if "data" in part
    ]
    event = openai.types.responses.ResponseErrorEvent.model_validate(json.loads(line.removeprefix("data: ")))
    assert (event.type, event.code, event.message) == ("error", "gone", "lost")


@pytest.mark.parametrize("field", ["background", "truncation", "temperature", "tools", "tool_choice", "metadata"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_null_field_of_the_responses_api_is_as_if_it_were_not_there(served, field, stream):
    _, client = served.lease()
    with served.http(client.api_key) as http:
        answer = http.post(RESPONSES, json={"model": "policy", "input": "hi", "stream": stream, field: None})
    assert answer.status_code == 200 and "error" not in answer.text.replace('"error":null', "")
