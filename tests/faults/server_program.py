"""The processes that `server_faults` kills: a server (scripted engine, learner, ledger), and agents that play through
it.

    python tests/faults/server_program.py MODEL CHANNEL     their nursery

Both tell what was acknowledged: the server each step, an agent each lease, answer and score. An agent is a program with the
real `openai` client; that its server is away it sees as a broken connection, and tries again.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai

from buffers.ledger.ledger import Ledger
from buffers.records import Task
from buffers.tasks.task_pool import TaskPool
from configs.schema import RolloutConfig
from mocked_server.keys import KeyRing, make_secret
from mocked_server.vllm.engine_arguments import set_process_environment
from tests.support.processes.forked_children import Channel, raise_children
from tests.support.server_parts import ServerThread

GROUP_SIZE = 2
ROUNDS = 3
DEADLINE_S = 2.0
"""Of an episode: that of a killed agent ends then."""
ATTEMPTS = 1000
"""No group is given up."""
PAUSE_S = 0.05
PATIENCE_S = 60.0
ANSWER_S = 30.0
"""A server that takes longer hangs."""
ROLLOUT = RolloutConfig(max_tokens=16, max_model_len=512)
BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, openai.APIConnectionError)


def serve(channel: Channel, *, model: str, folder: str, port: int, slots: int) -> None:
    """Serves and learns until it is killed."""
    place = Path(folder)
    ledger = Ledger(place / "ledger.sqlite", resume_episodes=True)
    served = ServerThread(
        Path(model),
        rollout=ROLLOUT,
        group_size=GROUP_SIZE,
        ledger=ledger,
        keys=KeyRing(make_secret(place / "server.key")),
        pool={"max_running": slots, "deadline_s": DEADLINE_S, "max_attempts": ATTEMPTS},
        port=port,
    )
    served.start()
    chance = random.Random(os.urandom(8))
    served.engine.answer = lambda _: served.ids(f"{chance.getrandbits(40):010x}")
    served.call(_add_tasks(served.pool))
    served.submit(served.wait()).add_done_callback(_loop_ended)
    channel.tell(ready=port)
    _learn(ledger, channel)


def _learn(ledger: Ledger, channel: Channel) -> None:
    woken, step = threading.Event(), ledger.position().result().step
    ledger.watch(lambda _: woken.set())
    while True:
        woken.clear()
        batch = ledger.claim(2, min_version=0).result()
        if batch is None:
            woken.wait()
            continue
        step += 1
        ledger.commit_step(batch.lease_id, step=step, version=step).result()
        channel.tell(step=step, lease=batch.lease_id)


async def _add_tasks(pool: TaskPool) -> None:
    """Tasks without end, whose ids no earlier process used."""
    start = time.time_ns()
    question = [{"role": "user", "content": "Where?"}]
    pool.add_source(Task(task_id=f"{start}:{number}", prompt=question) for number in itertools.count())


def _loop_ended(ended: Future[None]) -> None:
    """A server whose loop is gone would be waited for."""
    traceback.print_exception(ended.exception())
    os._exit(1)


class Agent:
    """Plays one episode after the other and reports its score, as its own judge. SIGTERM: after the present one it ends."""

    def __init__(self, channel: Channel, *, folder: str, port: int) -> None:
        keys = KeyRing(make_secret(Path(folder) / "server.key"))
        url = f"http://127.0.0.1:{port}"
        self._http = httpx.Client(base_url=url, timeout=ANSWER_S)
        self._model = openai.OpenAI(base_url=f"{url}/v1", api_key=keys.worker, max_retries=0, timeout=ANSWER_S)
        self._tell = channel.tell
        self._worker = {"authorization": f"Bearer {keys.worker}"}
        self._scorer = {"authorization": f"Bearer {keys.scorer}"}
        self._asked = 0.0
        """When the request was begun that was answered: an earlier server did not answer it."""
        self._stopped = threading.Event()

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self._stopped.set())
        while not self._stopped.is_set():
            leased = self._again(lambda: self._http.get("/tasks", params={"wait": 0.5}, headers=self._worker))
            if leased.status_code == 204:
                self._tell(waits=True)
                continue
            assert leased.status_code == 200, leased.text
            self._episode(leased.json())

    def _episode(self, leased: dict[str, Any]) -> None:
        name = leased["episode_id"]
        self._tell(leased=name)
        try:
            self._converse(name, leased)
        except openai.APIStatusError as error:
            self._refused(name, error.status_code, error.response.text)
            return
        body = {"episode_id": name, "score": float(len(name))}
        told = self._again(lambda: self._http.post("/scores", json=body, headers=self._scorer))
        if told.status_code == 200:
            self._tell(score=[name, body["score"]], asked=self._asked)
        else:
            self._refused(name, told.status_code, told.text)

    def _converse(self, name: str, leased: dict[str, Any]) -> None:
        messages: list[Any] = list(leased["task"]["prompt"])
        ask = self._model.with_options(api_key=leased["api_key"]).chat.completions.create
        for _ in range(ROUNDS):
            answer = self._again(partial(ask, model="policy", messages=messages))
            said = answer.choices[0].message.content
            self._tell(answer=[name, said], asked=self._asked)
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": "And then?"})

    def _refused(self, name: str, status: int, text: str) -> None:
        """Its episode has ended; the ledger has to know why."""
        assert status in (401, 403, 410), f"{status}: {text}"
        self._tell(refused=name)

    def _again(self, act: Callable[[], Any]) -> Any:
        """The answer, however often the server has to be asked. A server that is there and does not answer is an error."""
        until = time.monotonic() + PATIENCE_S
        while True:
            self._asked = time.monotonic()
            try:
                return act()
            except BROKEN as error:
                if isinstance(error, openai.APITimeoutError) or self._asked > until:  # openai counts it as a broken one
                    raise
                time.sleep(PAUSE_S * (0.5 + random.random()))


def play(channel: Channel, *, folder: str, port: int) -> None:
    Agent(channel, folder=folder, port=port).run()


def warm_up(model: Path) -> None:
    """One life in this process, without a ledger file: what it imports and looks up is there for all who follow."""
    served = ServerThread(model, rollout=ROLLOUT)
    served.start()
    _, client = served.lease()
    with client:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Where?"}])
    served.stop()


def main() -> None:
    set_process_environment()
    model, channel = sys.argv[1:]
    warm_up(Path(model))
    raise_children({"serve": partial(serve, model=model), "play": play}, channel=int(channel))


if __name__ == "__main__":
    main()
