"""Two server processes before one scripted engine: who owns an episode, what is passed on, and what a kill loses (nothing)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
from openai import OpenAI

from buffers.records import Task
from configs.schema import RolloutConfig
from tests.support.patience import PATIENCE_S
from tests.support.server_parts import LOGPROB, ServerThread, whole_prompt

pytestmark = [pytest.mark.slow]

HELLO = [{"role": "user", "content": "Hello."}]


@pytest.fixture(scope="module")
def two(tiny_model: Path) -> Iterator[ServerThread]:
    """The run's own process (0) and one more (1)."""
    thread = ServerThread(
        tiny_model,
        rollout=RolloutConfig(max_tokens=96, max_model_len=4096),
        processes=2,
        tool_parser=None,
        pool={"deadline_s": 600.0},
    )
    thread.start()
    yield thread
    thread.stop()


@pytest.fixture(autouse=True)
def answers_ok(two: ServerThread) -> Iterator[None]:
    two.engine.answer = lambda _: two.ids("ok")
    two.engine.gate.set()
    yield
    two.engine.gate.set()


class Leased:
    """An episode that this process was asked for over HTTP."""

    def __init__(self, two: ServerThread, process: int) -> None:
        number = sum(count for name, count in two.ledger.counts().items() if name.startswith("groups/"))
        two.call(
            two.pool.put([Task(task_id=f"two-{number}-{time.monotonic_ns()}", prompt=HELLO, ground_truth="secret")])
        )
        worker = {"Authorization": f"Bearer {two.server.keys.worker}"}
        self.said = httpx.get(f"{two.server.url_of(process)}/tasks?wait=20", headers=worker, timeout=PATIENCE_S).json()
        self.id, self.key = self.said["episode_id"], self.said["api_key"]
        self._two = two

    def client(self, process: int, *, max_retries: int = 0) -> OpenAI:
        """OpenAI's client at this process."""
        return OpenAI(
            base_url=f"{self._two.server.url_of(process)}/v1", api_key=self.key, max_retries=max_retries, timeout=200
        )

    def ask(self, process: int, messages: Any = HELLO, **more: Any) -> Any:
        with self.client(process, max_retries=more.pop("max_retries", 0)) as client:
            return client.chat.completions.create(model="policy", messages=messages, **more)

    @property
    def rounds(self) -> list[Any]:
        return self._two.stored(self.id)


def until(check: Callable[[], bool], *, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, f"it did not come within {seconds:.0f} s"
        time.sleep(0.05)


def figures(two: ServerThread, name: str) -> dict[str, Any]:
    with two.http(two.server.keys.admin) as http:
        return http.get("/status").json()["processes"][name]


@pytest.mark.parametrize("process", [0, 1])
def test_the_process_that_was_asked_for_a_task_owns_it_and_is_named(two: ServerThread, process: int) -> None:
    leased = Leased(two, process)
    url = two.server.url_of(process)
    assert leased.said["base_url"] == url and two.server.keys.owned_by(leased.key) == (leased.id, process)
    variables = two.server.environment(leased.key)
    assert variables["OPENAI_BASE_URL"] == f"{url}/v1" and variables["TASKS_URL"] == f"{url}/tasks"


def test_workers_have_the_processes_in_turn_and_leases_in_python_are_spread(two: ServerThread) -> None:
    urls = {two.server.environment(two.server.keys.worker_key(name))["TASKS_URL"] for name in ("a", "b", "a")}
    assert urls == {f"{two.server.url_of(process)}/tasks" for process in (0, 1)}
    owners = [two.server.processes.owner(f"spread-{number}", asked=None) for number in range(40)]
    for number in range(40):
        two.server.processes.closed(f"spread-{number}", "closed")
    assert set(owners[-10:]) == {0, 1}


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("asked", [0, 1])
def test_a_conversation_goes_on_token_for_token_at_whichever_process(two: ServerThread, owner: int, asked: int) -> None:
    leased = Leased(two, owner)
    before = len(two.engine.prompts)
    first = leased.ask(asked, logprobs=True)
    assert first.choices[0].message.content == "ok"
    assert [each.logprob for each in first.choices[0].logprobs.content] == [LOGPROB] * len(two.ids("ok"))
    later = [*HELLO, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "Go on."}]
    leased.ask(1 - asked, later)
    one, other = leased.rounds
    assert other.parent == 0 and one.sampled_ids.tolist() == two.ids("ok")
    assert whole_prompt([one, other], other).tolist() == two.engine.prompts[before + 1]
    assert set(one.logprobs.tolist()) == {LOGPROB} and set(one.versions.tolist()) == {0}


@pytest.mark.parametrize(("owner", "asked"), [(0, 1), (1, 0), (1, 1)])
def test_a_stream_is_passed_on_as_it_comes(two: ServerThread, owner: int, asked: int) -> None:
    leased = Leased(two, owner)
    two.engine.answer = lambda _: two.ids("The exit is north.")
    two.engine.gate.clear()
    with leased.client(asked) as client:
        stream = client.chat.completions.create(model="policy", messages=HELLO, stream=True)
        chunks = iter(stream)
        text = ""
        while not text:  # the engine waits after its first token
            text = next(chunks).choices[0].delta.content or ""
        two.engine.gate.set()
        text += "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "The exit is north." and [each.finish_reason for each in leased.rounds] == ["stop"]


def test_who_hangs_up_on_a_stream_that_is_passed_on_ends_its_generation(two: ServerThread) -> None:
    leased = Leased(two, 1)
    two.engine.answer = lambda _: two.ids("The exit is north.")
    two.engine.gate.clear()
    with leased.client(0) as client:
        stream = client.chat.completions.create(model="policy", messages=HELLO, stream=True)
        while not next(iter(stream)).choices[0].delta.content:
            pass
        stream.close()
    until(lambda: two.generation.stats.running == 0)
    until(lambda: [each.finish_reason for each in leased.rounds] == ["abandoned"])


def test_a_retry_gets_the_recorded_answer(two: ServerThread) -> None:
    leased = Leased(two, 1)
    answers = [
        leased.ask(asked, extra_headers={"x-stainless-retry-count": str(attempt)}).id
        for attempt, asked in enumerate((1, 0, 1))
    ]
    assert len(set(answers)) == 1 and len(leased.rounds) == 1


def test_scores_and_tasks_are_the_runs_at_each_process_and_end_the_episode_at_its_owner(two: ServerThread) -> None:
    leased = Leased(two, 1)
    leased.ask(1)
    url, keys = two.server.url_of(1), two.server.keys
    scorer = {"Authorization": f"Bearer {keys.scorer}"}
    seen = httpx.get(f"{url}/episode", headers={**scorer, "X-Episode-Key": leased.key}).json()
    assert seen["episode_id"] == leased.id and seen["task"]["ground_truth"] == "secret"
    said = httpx.post(f"{url}/scores", headers=scorer, json={"episode_id": leased.id, "score": 1.0})
    assert said.status_code == 200 and said.json()["stored"]
    for asked in (0, 1):
        with pytest.raises(openai.PermissionDeniedError, match="has ended"):
            leased.ask(asked)
    never_asked = Leased(two, 1)
    two.call(two.server.fail(never_asked.id, "no reason"))
    with pytest.raises(openai.PermissionDeniedError, match="has ended"):
        never_asked.ask(1)


def test_keys_open_at_each_process_what_they_open_at_the_runs(two: ServerThread) -> None:
    leased, url, keys = Leased(two, 1), two.server.url_of(1), two.server.keys
    forged = leased.key.replace("1~", "0~")
    for key, path, status in (
        (forged, "/v1/chat/completions", 401), ("", "/v1/chat/completions", 401), (keys.worker, "/v1/models", 200),
        (leased.key, "/v1/models", 200), (leased.key, "/sleep", 401), ("", "/tasks", 401), ("", "/health", 200),
    ):  # fmt: skip
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        method = "GET" if path in ("/v1/models", "/tasks", "/health") else "POST"
        content = b"{}" if method == "POST" else None
        assert httpx.request(method, url + path, headers=headers, content=content).status_code == status, path
    assert (
        httpx.post(
            f"{url}/e/{leased.key}/v1/chat/completions", json={"messages": HELLO}, timeout=PATIENCE_S
        ).status_code
        == 200
    )
    tokens = {"prompt_ids": [40, 41, 42], "sampling_params": {"max_tokens": 4}}
    for key in (leased.key, keys.worker):
        said = httpx.post(
            f"{url}/generate", headers={"Authorization": f"Bearer {key}"}, json=tokens, timeout=PATIENCE_S
        ).json()
        assert said["token_ids"] == two.ids("ok") and set(said["log_probs"]) == {LOGPROB}
    assert len(leased.rounds) == 2


def test_a_refusal_at_another_process_is_counted_by_the_run(two: ServerThread) -> None:
    leased = Leased(two, 1)
    with pytest.raises(openai.BadRequestError, match="tool"):
        leased.ask(1, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    until(lambda: any("tool" in reason for reason in two.server.model_requests.refused))


def test_a_killed_process_is_replaced_and_its_episodes_go_on(two: ServerThread) -> None:
    leased, streaming = Leased(two, 1), Leased(two, 1)
    leased.ask(1)
    two.engine.answer = lambda _: two.ids("The exit is north.")
    two.engine.gate.clear()
    before = figures(two, "p1")
    with streaming.client(1) as client:
        stream = client.chat.completions.create(model="policy", messages=HELLO, stream=True)
        while not next(iter(stream)).choices[0].delta.content:
            pass
        os.kill(before["pid"], signal.SIGKILL)
        with pytest.raises((httpx2.HTTPError, openai.APIError)):  # of OpenAI's client
            list(stream)
    until(lambda: two.generation.stats.running == 0)  # the run has seen that it is gone
    two.engine.gate.set()
    later = [*HELLO, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "Go on."}]
    answer = leased.ask(1, later, max_retries=5)
    assert answer.choices[0].message.content == "The exit is north."
    one, other = leased.rounds
    assert (one.parent, other.parent) == (None, 0), "the new process continues what the old one had served"
    assert [each.finish_reason for each in streaming.rounds] == ["abandoned"]
    until(lambda: figures(two, "p1")["is_up"])
    after = figures(two, "p1")
    assert (
        after["restarts"] == before["restarts"] + 1 and after["pid"] != before["pid"] and after["url"] == before["url"]
    )


def test_a_stopped_process_is_found_and_replaced(two: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two.server.processes._host, "_silent_s", 4.0)
    until(lambda: figures(two, "p1")["is_up"])
    leased, before = Leased(two, 1), figures(two, "p1")
    os.kill(before["pid"], signal.SIGSTOP)
    assert leased.ask(0, max_retries=5).choices[0].message.content == "ok"
    assert figures(two, "p1")["restarts"] == before["restarts"] + 1
