"""Rules of mocked_server/client_retries.py without a server: which answer a retry gets, for how long, and when one is given up."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from mocked_server import client_retries
from mocked_server.client_retries import KEPT_S, Answer, Answers
from tests.support.patience import PATIENCE_S

HEAD = {"type": "http.response.start", "status": 200, "headers": []}
BODY = {"type": "http.response.body", "body": b"ok"}


class Client:
    """A connection: what it was sent, and when it goes away."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.gone = asyncio.Event()

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


class Generation:
    """An application that answers once `gate` is set, unless it is told before that nobody waits."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.num_asked = 0
        self.is_given_up = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_asked += 1
        assert (await receive())["body"] == b"{}"
        opened, left = asyncio.create_task(self.gate.wait()), asyncio.create_task(receive())
        await asyncio.wait({opened, left}, return_when=asyncio.FIRST_COMPLETED)
        self.is_given_up = left.done()
        for each in (opened, left):
            each.cancel()
        await send(HEAD)
        await send(BODY)


def begun(generation: Generation) -> Answer:
    answer = Answer()
    answer.start(generation, {}, b"{}")
    return answer


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def leave(answer: Answer, client: Client) -> None:
    """The client asks, and goes away before it is answered."""
    asking = asyncio.create_task(answer.deliver(client.receive, client.send))
    await asyncio.sleep(0)
    client.gone.set()
    await asking


async def test_a_generation_without_a_client_is_given_up_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_retries, "GRACE_S", 0.01)
    generation = Generation()
    answer = begun(generation)
    await leave(answer, Client())
    assert answer.replayable
    await until(lambda: generation.is_given_up and answer.ended_at is not None)
    assert not answer.replayable and not answer.delivered


async def test_a_retry_that_came_in_time_gets_the_answer_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Any] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda delay, call, *arguments: timers.append((delay, call)))
    generation, retry = Generation(), Client()
    answer = begun(generation)
    await leave(answer, Client())
    assert [delay for delay, _ in timers] == [client_retries.GRACE_S]
    asking = asyncio.create_task(answer.deliver(retry.receive, retry.send))
    await asyncio.sleep(0)
    timers[0][1]()  # the moment is over
    await asyncio.sleep(0)
    assert not generation.is_given_up and answer.replayable
    generation.gate.set()
    await asking
    assert retry.sent == [HEAD, BODY] and generation.num_asked == 1 and answer.delivered


async def test_an_answer_is_delivered_when_its_last_part_was_sent_to_a_client_that_was_there() -> None:
    generation, client = Generation(), Client()
    answer = begun(generation)
    generation.gate.set()
    await answer.deliver(client.receive, client.send)
    assert answer.delivered and client.sent == [HEAD, BODY]


async def test_an_answer_to_a_client_that_hung_up_meanwhile_is_not_delivered_until_it_is_replayed() -> None:
    generation, client, retry = Generation(), Client(), Client()

    async def send(message: Any) -> None:
        if message is BODY:
            client.gone.set()  # it hangs up while the last part is sent
            await until(lambda: answer._hung_up is not None and answer._hung_up.done())
        client.sent.append(message)

    answer = begun(generation)
    generation.gate.set()
    await answer.deliver(client.receive, send)
    await until(lambda: answer.ended_at is not None)
    assert not answer.delivered
    await answer.deliver(retry.receive, retry.send)
    assert retry.sent == [HEAD, BODY] and answer.delivered


def kept(*, attempt: int = 0, ended_s_ago: float | None = 1.0, delivered: bool = False) -> Answer:
    answer = Answer()
    answer.attempt, answer.delivered = attempt, delivered
    answer.ended_at = None if ended_s_ago is None else time.monotonic() - ended_s_ago
    return answer


def test_a_retry_gets_the_answer_that_did_not_arrive_and_of_those_the_latest() -> None:
    answers = Answers()
    lost, told = kept(), kept(delivered=True)
    answers.keep(b"a", lost)
    answers.keep(b"a", told)
    assert answers.find(b"a", attempt=1) is lost
    answers.keep(b"a", later := kept())
    assert answers.find(b"a", attempt=1) is later
    answers.keep(b"b", other := kept(ended_s_ago=None))
    assert answers.find(b"b", attempt=1) is other and answers.find(b"c", attempt=1) is None
    assert answers.find(b"a", attempt=0) is None, "a first request is none again"
    later.replayable = False
    assert answers.find(b"a", attempt=1) is lost


def test_a_retry_is_given_an_answer_of_an_earlier_attempt_only() -> None:
    answers = Answers()
    answers.keep(b"a", second := kept(attempt=2))
    assert answers.find(b"a", attempt=1) is None and answers.find(b"a", attempt=2) is None
    assert answers.find(b"a", attempt=3) is second


def test_old_answers_are_forgotten_and_those_under_way_are_not() -> None:
    answers = Answers()
    answers.keep(b"old", kept(ended_s_ago=KEPT_S + 1.0))
    answers.keep(b"young", young := kept(ended_s_ago=KEPT_S - 5.0))
    answers.keep(b"running", running := kept(ended_s_ago=None))
    assert [answers.find(key, attempt=1) for key in (b"old", b"young", b"running")] == [None, young, running]
