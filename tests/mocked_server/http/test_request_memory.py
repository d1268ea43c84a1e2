"""What requests hold in memory: an episode's bodies and requests under way, the room for all bodies, answers kept for retries."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from mocked_server.client_retries import Answer, Answers
from mocked_server.conversation.live_episodes import EpisodeMemory
from mocked_server.http.request_limits import BodyRoom, RequestMemory
from mocked_server.http.uvicorn_server import PatientProtocol
from tests.support.patience import PATIENCE_S

CHAT = "/v1/chat/completions"
LARGE = 100_000


def chat_body(size: int = 0) -> bytes:
    """A chat's body, filled up with spaces."""
    return json.dumps({"model": "policy", "messages": [{"role": "user", "content": "x"}]}).encode().ljust(size)


def ask(served, client, *, size: int = 0, content=None, retry=None) -> httpx.Response:
    headers = {"authorization": f"Bearer {client.api_key}", "content-type": "application/json"}
    if retry is not None:
        headers["x-stainless-retry-count"] = str(retry)
    body = chat_body(size) if content is None else content
    return httpx.post(served.server.base_url + CHAT, content=body, headers=headers, timeout=PATIENCE_S)


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def held(served):
    """Generations wait; `in_background` asks in a thread. Afterwards nothing is held any more."""
    served.engine.gate.clear()
    with ThreadPoolExecutor(8) as threads:
        served.in_background = lambda *args, **more: threads.submit(ask, served, *args, **more)
        yield served
        served.engine.gate.set()
    episodes = [served.server.episodes.get(name).memory for name in served.server.episodes.ids()]
    nothing = EpisodeMemory()
    served.call(
        until(
            lambda: all(
                (each.in_flight_bytes, each.in_flight_requests) == (nothing.in_flight_bytes, nothing.in_flight_requests)
                for each in episodes
            )
        )
    )
    assert served.server.model_requests.room.num_bytes == 0


def memory_of(served, episode: str) -> EpisodeMemory:
    return served.server.episodes.get(episode).memory


@pytest.mark.seconds
@pytest.mark.parametrize("retry", [None, 0], ids=["plain", "a client that retries"])
def test_an_episode_that_holds_too_many_bytes_is_refused_more_and_another_is_not(held, monkeypatch, retry) -> None:
    monkeypatch.setattr("mocked_server.http.request_limits.MAX_EPISODE_BYTES", 2 * LARGE)
    (episode, client), (_, other) = held.lease(), held.lease()
    first = held.in_background(client, size=LARGE, retry=retry)
    held.call(until(lambda: memory_of(held, episode).in_flight_bytes == LARGE and len(held.engine.prompts) == 1))
    refused = ask(held, client, size=LARGE + 1, retry=retry)
    assert refused.status_code == 413 and f"{2 * LARGE} bytes" in refused.json()["error"]["message"]
    in_chunks = iter([chat_body(), *[b" " * 1000] * 200])
    assert ask(held, client, content=in_chunks, retry=retry).status_code == 413
    assert memory_of(held, episode).in_flight_bytes == LARGE
    second = held.in_background(other, size=LARGE)
    held.engine.gate.set()
    assert (first.result().status_code, second.result().status_code) == (200, 200)
    assert ask(held, client, size=LARGE + 1).status_code == 200


def test_an_episode_with_too_many_requests_is_told_to_come_back_and_another_is_not(held, monkeypatch) -> None:
    monkeypatch.setattr("mocked_server.http.request_limits.MAX_EPISODE_REQUESTS", 2)
    (episode, client), (_, other) = held.lease(), held.lease()
    first = [held.in_background(client, retry=retry) for retry in (None, 0)]
    held.call(until(lambda: memory_of(held, episode).in_flight_requests == 2))
    refused = ask(held, client)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "2 requests under way" in refused.json()["error"]["message"]
    second = held.in_background(other)
    held.engine.gate.set()
    assert [each.result().status_code for each in (*first, second)] == [200] * 3
    held.call(until(lambda: memory_of(held, episode).in_flight_requests == 0))
    assert ask(held, client).status_code == 200


def test_a_request_whose_client_has_gone_counts_until_its_generation_ends(held, monkeypatch) -> None:
    """Else who hangs up at once could have as many as it likes for the time that a retry may take to come."""
    monkeypatch.setattr("mocked_server.http.request_limits.MAX_EPISODE_REQUESTS", 1)
    monkeypatch.setattr("mocked_server.client_retries.GRACE_S", 60.0)
    episode, client = held.lease()
    held.hang_up(client, body=json.loads(chat_body()), headers={"x-stainless-retry-count": "0"})
    held.call(until(lambda: held.server.episodes.get(episode).requests == 0))
    assert memory_of(held, episode).in_flight_requests == 1
    assert ask(held, client).status_code == 429
    held.engine.gate.set()
    held.call(until(lambda: memory_of(held, episode).in_flight_requests == 0))


def test_a_body_waits_unread_for_room_and_is_not_cut_off(held, monkeypatch) -> None:
    """Its time to be there passes three times meanwhile: by our hand, as a short time would cut off whom the machine delays."""
    room = BodyRoom(LARGE * 3 // 2)
    monkeypatch.setattr(held.server.model_requests, "room", room)
    made, connection_made = [], PatientProtocol.connection_made
    monkeypatch.setattr(
        PatientProtocol, "connection_made", lambda self, pipe: (made.append(self), connection_made(self, pipe))
    )
    (_, client), (_, other) = held.lease(), held.lease()
    first = held.in_background(client, size=LARGE)
    held.call(until(lambda: room.num_bytes == LARGE and len(held.engine.prompts) == 1))
    second = held.in_background(other, size=LARGE * 5)
    held.call(until(lambda: room.num_waiting == 1 and made[-1].flow.read_paused))
    for _ in range(3):
        held.call(expire(made[-1]))
    small = held.in_background(other, retry=0)
    held.call(until(lambda: len(held.engine.prompts) == 2))  # what is small does not wait
    assert room.num_bytes == LARGE
    held.engine.gate.set()
    assert [each.result().status_code for each in (first, second, small)] == [200] * 3
    held.call(until(lambda: room.num_bytes == 0))


async def expire(connection: PatientProtocol) -> None:
    """The time is over that a request has to be there."""
    clock = connection._receiving
    assert clock is not None, "it is still looked after"
    connection._give_up()
    assert connection._receiving is not clock


async def test_room_goes_to_the_episode_that_holds_least() -> None:
    room, order = BodyRoom(10), []
    greedy, modest = EpisodeMemory(in_flight_bytes=8), EpisodeMemory(in_flight_bytes=1)

    async def take(name: str, episode: EpisodeMemory) -> None:
        await room.take(8, episode=episode)
        order.append(name)

    await room.take(8, episode=greedy)
    waiting = [asyncio.create_task(take(*each)) for each in (("greedy", greedy), ("gone", modest), ("modest", modest))]
    await until(lambda: room.num_waiting == 3)
    waiting[1].cancel()
    for expected in (["modest"], ["modest", "greedy"]):
        room.give(8)
        await until(lambda expected=expected: order == expected)
    room.give(8)
    assert (room.num_bytes, room.num_waiting) == (0, 0)


async def test_room_that_was_given_to_a_request_that_ends_in_that_moment_is_free_again() -> None:
    room, episode = BodyRoom(10), EpisodeMemory()
    await room.take(8, episode=episode)
    waiting = asyncio.create_task(room.take(8, episode=episode))
    await until(lambda: room.num_waiting == 1)
    room.give(8)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert (waiting.cancelled(), room.num_bytes) == (True, 0)


async def test_a_body_in_chunks_keeps_what_it_needs_and_no_more() -> None:
    room, episode = BodyRoom(), EpisodeMemory()
    memory = RequestMemory(episode, room)
    await memory.begin(None)
    memory.hold(1000)
    memory.is_read()
    assert (room.num_bytes, episode.in_flight_bytes, episode.in_flight_requests) == (1000, 1000, 1)
    memory.end()
    memory.end()
    assert (room.num_bytes, episode.in_flight_bytes, episode.in_flight_requests) == (0, 0, 0)


async def test_answers_kept_for_retries_are_bounded_in_bytes(monkeypatch) -> None:
    monkeypatch.setattr("mocked_server.client_retries.KEPT_BYTES", 1000)
    answers, keys = Answers(), [bytes([number]) for number in range(5)]
    sizes = (300, 300, 300, 300, 1001)
    for key, size in zip(keys, sizes, strict=True):
        answers.keep(key, answer := Answer())
        await answer._take({"type": "http.response.start", "status": 200, "headers": []})
        await answer._take({"type": "http.response.body", "body": b"x" * size})
        answer.ended_at = time.monotonic()
        answers.forget()
        assert sum(each.num_bytes for _, each in answers._answers) <= 1000
    assert [key for key in keys if answers.find(key, attempt=1) is not None] == keys[1:4]


async def test_answers_are_forgotten_when_they_are_old(monkeypatch) -> None:
    answers, answer = Answers(), Answer()
    answers.keep(b"key", answer)
    answer.ended_at = time.monotonic()
    monkeypatch.setattr("mocked_server.client_retries.KEPT_S", 0.0)
    answers.forget()
    assert answers.find(b"key", attempt=1) is None


@pytest.mark.parametrize("count", ["9" * 5000, "0" * 60_000, "9" * 18, "-1", "1e3", "x"])
def test_a_retry_count_that_is_none_is_a_first_request(served, count) -> None:
    episode, client = served.lease()
    assert [ask(served, client, retry=count).status_code for _ in range(2)] == [200] * 2
    assert len(served.engine.prompts) == len(served.stored(episode)) == 2


def test_counts_that_go_down_or_up_by_much_give_one_answer_for_each_recorded_round(served) -> None:
    episode, client = served.lease()
    asked = [ask(served, client, retry=count) for count in (5, 3, 999_999, 4, 0, 0, 1, 1, 2)]
    assert [each.status_code for each in asked] == [200] * 9
    told = {each.json()["id"] for each in asked}
    assert len(told) == len(served.engine.prompts) == len(served.stored(episode))


def test_two_connections_for_one_answer_get_it_once_and_a_conflict(held) -> None:
    episode, client = held.lease()
    first = held.in_background(client, retry=0)
    held.call(until(lambda: len(held.engine.prompts) == 1))
    second = held.in_background(client, retry=1)
    assert first.result().status_code == 409 and "later attempt" in first.result().json()["error"]["message"]
    held.engine.gate.set()
    assert second.result().status_code == 200
    assert len(held.stored(episode)) == 1
