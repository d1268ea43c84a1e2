"""Errors on streams: refused with a status before anything was generated, told as an event afterwards."""

from __future__ import annotations

import json
import queue

import openai
import pytest

from buffers.errors import EngineError, EpisodeError, RequestFailed, RequestRefused
from buffers.prompt_queue import QueueClosed
from mocked_server.http.dialects import CHAT, COMPLETIONS, COUNT_TOKENS, GEMINI, MESSAGES, RESPONSES, error_event

HI = [{"role": "user", "content": "hi"}]
BODIES = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 4},
    GEMINI: {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}
WRONG = {
    MESSAGES: ("stop", {"stop_sequences": [str(number) for number in range(100)]}),
    GEMINI: ("stop", {"generationConfig": {"stopSequences": [str(number) for number in range(100)]}}),
}


def post(http, path, *, stream, **fields):
    if path == GEMINI:
        way = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return http.post(f"/v1beta/models/policy:{way}", json={**BODIES[path], **fields})
    return http.post(path, json={"model": "policy", "stream": stream, **BODIES[path], **fields})


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_is_refused_before_it_generates_has_a_status_and_names_the_field(served, path):
    _, client = served.lease()
    with served.http(client.api_key) as http:
        name, wrong = WRONG.get(path, ("logit_bias", {"logit_bias": {"99999": 1}}))
        answer = post(http, path, stream=True, **wrong)
    assert answer.status_code == 400 and name in answer.text, answer.text
    assert answer.headers["content-type"] == "application/json" and served.engine.prompts == []


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_fails_after_it_began_ends_with_an_error_and_no_broken_connection(served, path):
    _, client = served.lease()
    served.engine.answer = lambda _: served.ids("The exit is north.")

    def break_off(*_: object) -> None:
        raise RuntimeError("a defect")

    kept, served.generation._count = served.generation._count, break_off
    try:
        with served.http(client.api_key) as http:
            answer = post(http, path, stream=True)
    finally:
        served.generation._count = kept
    assert answer.status_code == 200 and "error" in answer.text


FAILED = {
    "restarting": (EngineError("restarting"), 503, "1"),
    "closed": (QueueClosed("closed"), 503, "1"),
    "full": (queue.Full("full"), 503, "1"),
    "over": (EpisodeError("over"), 403, None),
    "too much": (RequestRefused("too much", status=413), 413, None),
    "failed": (RequestFailed("failed"), 500, None),
}


@pytest.mark.seconds
@pytest.mark.parametrize("name", FAILED)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", BODIES)
def test_what_fails_before_anything_was_generated_has_its_status_in_every_dialect(
    served, monkeypatch, path, stream, name
):
    """When it is put into the queue, and when it waits there."""
    error, status, retry_after = FAILED[name]

    def refuse(prompt):
        raise error

    _, client = served.lease()
    for put in (refuse, lambda prompt: prompt.reply.fail(error)):
        monkeypatch.setattr(served.server.prompt_queue, "put", put)
        with served.http(client.api_key) as http:
            answer = post(http, path, stream=stream)
        assert (answer.status_code, answer.headers.get("retry-after")) == (status, retry_after), answer.text
        assert answer.headers.get("x-should-retry") == ("false" if status < 500 else None)
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["message"] == name and ("type" in answer.json()) == (path == MESSAGES)


def test_what_fails_while_an_anthropic_request_is_rendered_has_its_status(served, monkeypatch):
    _, client = served.lease()

    async def refuse(*_, **__):
        raise RequestRefused("too much", status=413)

    monkeypatch.setattr(served.server._client.renderer, "render_chat_async", refuse)
    with served.http(client.api_key) as http:
        for path in (MESSAGES, COUNT_TOKENS):
            answer = http.post(path, json={"model": "policy", **BODIES[MESSAGES]})
            assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")


def test_the_error_event_of_the_responses_api_is_what_its_client_reads():
    (line,) = [
        part
        for part in error_event(RESPONSES, status=503, message="lost", code="gone").decode().split("\n")
        if "data" in part
    ]
    event = openai.types.responses.ResponseErrorEvent.model_validate(json.loads(line.removeprefix("data: ")))
    assert (event.type, event.code, event.message) == ("error", "gone", "lost")


@pytest.mark.seconds
@pytest.mark.parametrize("field", ["background", "truncation", "temperature", "tools", "tool_choice", "metadata"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_null_field_of_the_responses_api_is_as_if_it_were_not_there(served, field, stream):
    _, client = served.lease()
    with served.http(client.api_key) as http:
        answer = http.post(RESPONSES, json={"model": "policy", "input": "hi", "stream": stream, field: None})
    assert answer.status_code == 200 and "error" not in answer.text.replace('"error":null', "")
