"""A server with agents at work, killed again and again: its keys, episodes and tokens outlive it.

    python tests/fault_server.py FOLDER PORT MODEL     the process that is killed: server, scripted engine, learner, ledger

`server_faults` starts it, lets agents with the real `openai` client play through it, scores them over HTTP, and kills it at
random moments. The agents and the scorer only see refused connections, and try again.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from buffers.errors import LeaseError
from buffers.ledger import Ledger
from buffers.ledger_schema import read_database
from buffers.records import Task
from buffers.task_pool import TaskPool
from tests.child import child_process
from tests.faults import Log, check, child_environment

AGENTS = 6
ROUNDS = 3
PAUSE_S = 0.2
PATIENCE_S = 150.0
BROKEN = (httpx.TransportError, openai.APIConnectionError)


def serve(folder: Path, *, port: int, model: Path) -> None:
    """Runs until it is killed."""
    from configs.schema import RolloutConfig
    from mocked_server.keys import KeyRing, make_secret
    from tests.server_parts import ServerThread

    ledger = Ledger(folder / "ledger.sqlite", keep_running=True)
    thread = ServerThread(
        model,
        rollout=RolloutConfig(max_tokens=16, max_model_len=512),
        ledger=ledger,
        keys=KeyRing(make_secret(folder / "server.key")),
        port=port,
    )
    thread.start()
    thread.call(_add_tasks(thread.pool))
    print("ready", flush=True)
    step = ledger.position().result().step
    woken = threading.Event()
    ledger.watch(lambda _: woken.set())
    while True:
        woken.clear()
        batch = ledger.claim(2, min_version=0).result()
        if batch is None:
            woken.wait()
            continue
        step += 1
        try:
            ledger.commit_step(batch.lease_id, step=step, version=step).result()
        except LeaseError:
            continue
        print(json.dumps({"step": step, "lease": batch.lease_id}), flush=True)


async def _add_tasks(pool: TaskPool) -> None:
    """Tasks without end, whose ids no earlier process used."""
    start = time.time_ns()
    question = [{"role": "user", "content": "Where?"}]
    pool.add_source(Task(task_id=f"{start}:{number}", prompt=question) for number in itertools.count())


class Play:
    """Agents and their scorer, outside of what is killed."""

    def __init__(self, folder: Path, *, url: str) -> None:
        from mocked_server.keys import KeyRing, make_secret

        self._keys = KeyRing(make_secret(folder / "server.key"))
        self._url = url
        self.log = Log()
        self.calls: dict[str, int] = {}
        """Model calls that were answered, by episode."""
        self.finished, self.lost = 0, 0
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._agent, daemon=True) for _ in range(AGENTS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Each agent ends its episode first."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "an agent hangs"

    def _agent(self) -> None:
        headers = {"authorization": f"Bearer {self._keys.worker}"}
        with httpx.Client(base_url=self._url, timeout=10) as http:
            while not self._stopped.is_set():
                leased = self._again(lambda: http.get("/tasks", params={"wait": 1}, headers=headers))
                if leased.status_code == 200:
                    self._episode(http, leased.json())

    def _episode(self, http: httpx.Client, leased: dict[str, Any]) -> None:
        name = leased["episode_id"]
        client = openai.OpenAI(base_url=f"{self._url}/v1", api_key=leased["api_key"], max_retries=0, timeout=10)
        messages: list[Any] = list(leased["task"]["prompt"])
        for number in range(ROUNDS):
            answer = self._again(lambda: client.chat.completions.create(model="policy", messages=messages))
            self.calls[name] = number + 1
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": "And then?"})
        body = {"episode_id": name, "score": float(len(name))}
        headers = {"authorization": f"Bearer {self._keys.scorer}"}
        told = self._again(lambda: http.post("/scores", json=body, headers=headers))
        if told.status_code == 200:
            self.log.scores[name] = body["score"]
            self.finished += 1
        else:
            self.lost += 1

    def _again(self, act: Callable[[], Any]) -> Any:
        """The answer, however often the server has to be asked."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return act()
            except BROKEN:
                if time.monotonic() > until:
                    raise
                time.sleep(PAUSE_S)


@contextmanager
def start(folder: Path, *, port: int, model: Path) -> Iterator[subprocess.Popen[str]]:
    """A server that answers requests, until the end of the block."""
    command = [sys.executable, __file__, str(folder), str(port), str(model)]
    log = folder / "server.log"
    with log.open("ab") as errors, child_process(command, env=child_environment(), stderr=errors) as child:
        assert child.stdout is not None
        assert "ready\n" in child.stdout, f"the server did not start: {log.read_text()[-2000:]}"
        yield child


def server_faults(kills: int, *, seed: int, folder: Path) -> Log:
    """Kill the server so many times while agents play."""
    from configs.tiny_model import make_tiny_model

    chance, place = random.Random(seed), folder / "server"
    place.mkdir()
    model = make_tiny_model(folder / "tiny", seed=0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    play = Play(place, url=f"http://127.0.0.1:{port}")
    play.start()
    for _ in range(kills):
        with start(place, port=port, model=model) as child:
            before = play.finished
            deadline = time.monotonic() + PATIENCE_S
            wanted = before + chance.randint(3, 20)
            while play.finished < wanted and time.monotonic() < deadline:
                time.sleep(chance.random() * PAUSE_S)
            assert child.poll() is None, "it ended by itself"
            play.log.idle += play.finished == before
            os.kill(child.pid, signal.SIGKILL)
            out, _ = child.communicate()
        for line in out.splitlines(keepends=True):
            play.log.take(line)
        assert child.returncode == -signal.SIGKILL
        play.log.kills += 1
        check(place / "ledger.sqlite", log=play.log)
    with start(place, port=port, model=model):
        play.stop()
    check(place / "ledger.sqlite", log=play.log)
    _check_calls(place / "ledger.sqlite", play=play)
    assert play.log.kills == kills and play.log.idle == 0, "a kill that hit nothing"
    assert play.finished >= 0.99 * (play.finished + play.lost), f"{play.lost} episodes were lost"
    return play.log


def _check_calls(path: Path, *, play: Play) -> None:
    """Every call that was answered is a round, and the rounds of a conversation are one branch."""
    with closing(read_database(path)) as db:
        rounds = dict(db.execute("SELECT episode_id, count(*) FROM round GROUP BY episode_id").fetchall())
        missing = {name: calls for name, calls in play.calls.items() if rounds.get(name, 0) < calls}
        assert missing == {}, f"answered and not recorded: {missing}"


if __name__ == "__main__":
    serve(Path(sys.argv[1]), port=int(sys.argv[2]), model=Path(sys.argv[3]))
