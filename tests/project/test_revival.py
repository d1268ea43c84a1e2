"""What was under way when the engine or an agent died: generated again, told as an error, or tried again."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from buffers.errors import EpisodeClosed
from buffers.records import Task
from learner.recovery.restarts import end_silent
from mocked_server.keys import KeyRing
from mocked_server.server import MockedServer
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

BODY = {"model": "policy", "messages": [{"role": "user", "content": "Hello."}]}


@pytest.fixture
def mortal(served):
    """An engine that comes back when `dies` is False again."""
    served.engine.revives = True
    yield served
    served.engine.dies = served.engine.revives = False
    served.engine.gate.set()


def rounds(served, episode: str) -> list[str]:
    return [round_.finish_reason for round_ in served.ledger.rounds(episode).result()]


def add_task(served, name: str) -> None:
    served.call(served.pool.put([Task(task_id=f"revival-{name}", prompt="Hello.")]))


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_the_engine_was_generating_when_it_died_is_generated_again(mortal) -> None:
    episode, client = mortal.lease()
    mortal.engine.dies = True

    def come_back() -> None:
        while not mortal.engine.prompts:
            time.sleep(0.01)
        mortal.engine.dies = False

    threading.Thread(target=come_back).start()
    answer = client.with_options(max_retries=0).chat.completions.create(**BODY)
    assert answer.choices[0].message.content == "ok" and rounds(mortal, episode) == ["stop"]
    assert len(mortal.engine.prompts) > 1


def stream_over_a_death(mortal, client, **more):
    """The engine dies after the first token of an answer has left, and comes back."""
    mortal.engine.answer = lambda _: mortal.ids("The exit is north.")
    mortal.engine.gate.clear()
    stream = client.with_options(max_retries=0).chat.completions.create(**BODY, **more, stream=True)
    first = next(iter(stream))
    mortal.engine.dies = True
    mortal.engine.gate.set()
    threading.Timer(0.3, setattr, (mortal.engine, "dies", False)).start()
    return [first, *stream]


def test_an_answer_that_was_told_in_part_goes_on_without_a_break(mortal) -> None:
    episode, client = mortal.lease()
    chunks = stream_over_a_death(mortal, client)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The exit is north."
    assert rounds(mortal, episode) == ["stop"] and mortal.generation.stats.continued >= 1
    (stored,) = mortal.stored(episode)
    assert stored.sampled_ids.tolist() == mortal.ids("The exit is north.")


def test_an_answer_whose_sampling_has_a_state_fails_when_it_was_told_in_part(mortal) -> None:
    episode, client = mortal.lease()
    with pytest.raises(openai.APIError):
        stream_over_a_death(mortal, client, frequency_penalty=0.5)
    assert client.chat.completions.create(**BODY).choices[0].message.content == "The exit is north."
    assert rounds(mortal, episode) == ["abort", "stop"]


def test_a_workers_episodes_end_with_it_and_nobody_elses(served) -> None:
    keys: KeyRing = served.server.keys
    names = {}
    for worker in ("a", "b"):
        add_task(served, worker)
        with served.http(keys.worker_key(worker)) as client:
            names[worker] = client.get("/tasks?wait=5").json()["episode_id"]
    served.call(served.server.fail_all("agent exited with code -9", worker="a"))
    live = served.server.episodes
    with pytest.raises(EpisodeClosed, match="failed"):
        live.get(names["a"])
    assert live.get(names["b"]).worker == "b"
    served.call(served.server.fail_all("environment died"))
    assert live.ids() == []


def is_closed(server: MockedServer, episode_id: str) -> bool:
    try:
        server.episodes.get(episode_id)
    except EpisodeClosed:
        return True
    return False


def test_an_agent_that_says_nothing_is_given_up_and_one_that_is_answered_is_not(mortal) -> None:
    silent, busy = mortal.lease(), mortal.lease()
    mortal.engine.gate.clear()
    mortal.engine.answer = lambda _: mortal.ids("The exit is north.")
    thread = threading.Thread(target=busy[1].chat.completions.create, kwargs=BODY)
    thread.start()
    until(lambda: mortal.engine.prompts)
    server = mortal.server
    ending = asyncio.run_coroutine_threadsafe(
        end_silent(server.episodes.silent, fail=server.fail, seconds=0.5), mortal._loop
    )
    until(lambda: mortal.ledger.counts().get("failed/silent agent") == 1)
    until(lambda: is_closed(server, silent[0]))
    time.sleep(1.0)  # longer than it takes to give up who is silent
    assert mortal.ledger.counts()["failed/silent agent"] == 1 and server.episodes.get(busy[0])
    mortal.engine.gate.set()
    thread.join(PATIENCE_S)
    silent[1].close()
    until(lambda: mortal.ledger.counts()["failed/silent agent"] == 2)  # it has its answer, and asks for nothing more
    ending.cancel()


def test_keys_of_workers_are_not_guessed_from_one_another() -> None:
    keys, others = KeyRing(b"1" * 32), KeyRing(b"2" * 32)
    assert keys.worker_of(keys.worker_key("agent-0")) == "agent-0" and keys.worker_of(keys.worker) == ""
    forged = keys.worker_key("agent-0").replace("agent-0", "agent-1")
    for key in (forged, others.worker, keys.scorer, keys.admin, keys.episode_key("worker."), "us-worker.", "", "é"):
        assert keys.worker_of(key) is None
    assert keys.episode_of(keys.worker) is None


def test_who_hangs_up_while_it_waits_for_a_task_is_given_none(served) -> None:
    for _ in range(3):
        waiting = http.client.HTTPConnection(
            *served.server.base_url.removeprefix("http://").split(":"), timeout=PATIENCE_S
        )
        waiting.request("GET", "/tasks?wait=30", headers={"authorization": f"Bearer {served.server.keys.worker}"})
        time.sleep(0.3)
        waiting.close()
    time.sleep(0.3)
    add_task(served, "c")
    with served.http(served.server.keys.worker) as client:
        answer = client.get("/tasks?wait=5")
    assert answer.status_code == 200 and answer.json()["task"]["task_id"] == "revival-c"
    served.call(served.server.fail_all("the end of the test"))
