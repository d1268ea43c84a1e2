"""Automatic retries and hang-ups: one round and one generation, whatever happens to the connections."""

from __future__ import annotations

import threading
import time

import pytest

from mocked_server.client_retries import KEPT_ANSWERS, KEPT_DELIVERED, Answer, Answers
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow  # servers of their own

HELLO = [{"role": "user", "content": "Hello."}]
BODY = {"model": "policy", "messages": HELLO}
LONG = "The exit is north."


async def until(condition):
    import asyncio

    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def in_thread(work):
    """Run `work()` in a thread -> (thread, where its result or error will be)."""
    box = {}

    def run():
        try:
            box["result"] = work()
        except Exception as error:
            box["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    return thread, box


def attempts(served, episode):
    """Attempt numbers of the answers that a retry could ask for."""
    return [answer.attempt for _, answer in served.server.episodes.get(episode).answers._answers]


@pytest.fixture
def held(served):
    """Generations stop after the request was queued, until the gate is set."""
    served.engine.gate.clear()
    yield served
    served.engine.gate.set()


def test_a_retry_joins_the_generation_that_runs(held):
    episode, client = held.lease()
    impatient = client.with_options(timeout=0.3, max_retries=10)
    thread, box = in_thread(lambda: impatient.chat.completions.create(**BODY))
    held.call(until(lambda: max(attempts(held, episode), default=0) >= 1))
    held.engine.gate.set()
    thread.join()
    assert box["result"].choices[0].message.content == "ok"
    assert len(held.engine.prompts) == 1
    assert [r.finish_reason for r in held.stored(episode)] == ["stop"]


def send(served, client, attempt, *, path="/v1/chat/completions", body=BODY):
    headers = {"x-stainless-retry-count": str(attempt)} if attempt is not None else {}
    with served.http(client.api_key) as http:
        return http.post(path, json=body, headers=headers)


def test_a_retry_after_the_answer_replays_it(served):
    episode, client = served.lease()
    first, second = send(served, client, 0), send(served, client, 1)
    assert first.status_code == second.status_code == 200
    assert first.content == second.content
    assert len(served.engine.prompts) == len(served.stored(episode)) == 1


def test_the_same_request_again_is_another_generation(served):
    episode, client = served.lease()
    for attempt in (0, 0, None):
        assert send(served, client, attempt).status_code == 200
    assert len(served.engine.prompts) == len(served.stored(episode)) == 3


def test_a_retry_of_another_episode_or_another_body_is_a_generation_of_its_own(served):
    _, client = served.lease()
    _, other = served.lease()
    send(served, client, 0)
    send(served, other, 1)
    send(served, client, 1, body={**BODY, "max_tokens": 5})
    assert len(served.engine.prompts) == 3


def test_an_error_is_not_replayed(served):
    episode, client = served.lease()
    body = {**BODY, "max_tokens": -1}
    assert send(served, client, 0, body=body).status_code == 400
    assert send(served, client, 1, body=body).status_code == 400
    assert served.server.episodes.get(episode).answers.find(b"", attempt=1) is None


def test_only_the_latest_answers_are_kept(served):
    episode, client = served.lease()
    for turn in range(KEPT_DELIVERED + 4):
        send(served, client, 0, body={**BODY, "max_tokens": 5 + turn})
    served.call(until(lambda: len(attempts(served, episode)) == KEPT_DELIVERED))


@pytest.mark.parametrize(("delivered", "kept"), [(False, KEPT_ANSWERS), (True, KEPT_DELIVERED)])
async def test_answers_that_did_not_arrive_are_kept_longer(delivered, kept):
    answers, keys = Answers(), [bytes([number]) for number in range(KEPT_ANSWERS + 4)]
    for key in keys:
        answers.keep(key, answer := Answer())
        answer.ended_at, answer.delivered = time.monotonic(), delivered
    answers.keep(b"new", Answer())
    found = [key for key in keys if answers.find(key, attempt=1) is not None]
    assert found == keys[-kept:]


@pytest.mark.parametrize("retries", [True, False], ids=["a client that retries", "a client that does not"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_hanging_up_aborts_what_is_generated(held, stream, retries):
    held.engine.answer = lambda _: held.ids(LONG)
    episode, client = held.lease()
    before = held.generation.stats.aborted
    headers = {"x-stainless-retry-count": "0"} if retries else {}
    if stream:
        with held.http(client.api_key) as http:
            request = http.build_request("POST", "/v1/chat/completions", json={**BODY, "stream": True}, headers=headers)
            response = http.send(request, stream=True)
            next(response.iter_lines())
            response.close()
    else:
        held.hang_up(client, body=BODY, headers=headers)
    held.call(until(lambda: held.generation.stats.aborted == before + 1))
    held.engine.gate.set()
    assert [r.finish_reason for r in held.stored(episode)] in ([["abandoned"]] if stream else [[], ["abort"]])
    assert held.server.episodes.get(episode).rounds == []


def test_an_answer_that_was_given_up_is_generated_again(held):
    episode, client = held.lease()
    before = held.generation.stats.aborted
    held.hang_up(client, body=BODY)
    held.call(until(lambda: held.generation.stats.aborted == before + 1))
    held.engine.gate.set()
    assert send(held, client, 1).json()["choices"][0]["message"]["content"] == "ok"
    assert [r.finish_reason for r in held.stored(episode) if r.finish_reason != "abort"] == ["stop"]


GOOGLES = "/v1beta/models/policy:generateContent"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages", GOOGLES])
def test_retries_are_joined_in_every_dialect(served, path):
    bodies = {
        "/v1/completions": {"model": "policy", "prompt": "Hello."},
        "/v1/responses": {"model": "policy", "input": "Hello."},
        "/v1/messages": {"model": "policy", "messages": HELLO, "max_tokens": 8},
        GOOGLES: {"contents": [{"role": "user", "parts": [{"text": "Hello."}]}]},
    }
    episode, client = served.lease()
    answers = [send(served, client, attempt, path=path, body=bodies[path]) for attempt in (0, 1, 2)]
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    assert len({answer.content for answer in answers}) == 1
    assert len(served.stored(episode)) == 1
