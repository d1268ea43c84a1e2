"""The further server processes of a run, as its own one has them: their addresses, their episodes, their lives.

Made by `learner.pipeline` for `server.processes` > 1, handed to `MockedServer`. Each has a socket that this process has bound and
keeps: what connects while one is being started again waits, and its address never changes. Loop row: `run` waits for the death of
each; gives a new process in its place, which asks for its episodes as their agents send requests. Invariants: the owner of an
episode follows from its key; it never changes while the number of processes stays.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any

from starlette.types import ASGIApp

from buffers.errors import UnderstudyError
from buffers.records import Round
from buffers.remote.actor import ChildActor
from configs.fork_server import own_context
from mocked_server.http.attribution import Forward
from mocked_server.http.uvicorn_server import ServerError, bind
from mocked_server.keys import KeyRing, process_secret
from mocked_server.processes.prompt_host import PromptHost, RunServer
from mocked_server.processes.server_process import ProcessSettings, ServerProcess
from mocked_server.vllm.engine_arguments import EngineSettings
from mocked_server.vllm.hosted.outputs import VLLMCodec

logger = logging.getLogger(__name__)

START_S = 180.0
"""Seconds for a process to answer requests; where it is not forked, it has to import vLLM."""
END_S = 5.0
TITLE = "understudy::server_process"


class ProcessDied(UnderstudyError):
    """A server process ended by itself."""


def _never_again(_: str, error: Exception) -> None:
    raise error


@dataclass(eq=False)
class ServerProcesses:
    """See the module. `engine`: what vLLM's HTTP layer is built from; `rounds`: of an episode, as stored.
    `record_death(name, error)`: counts a death, and raises `error` when that process may not be started again. Making one raises
    ServerError where a port is in use."""

    engine: EngineSettings
    _: KW_ONLY
    keys: KeyRing
    rounds: Callable[[str], Future[list[Round]]]
    record_death: Callable[[str, Exception], None] = _never_again

    def __post_init__(self) -> None:
        server = self.engine.server
        self._number = server.processes
        if server.port and server.port + self._number - 1 > 65535:
            raise ServerError(
                f"server.port must leave {self._number - 1} ports after it for server.processes={self._number}, got "
                f"{server.port}; set a lower one"
            )
        self._sockets = [bind(server.host, server.port and server.port + n) for n in range(1, self._number)]
        self.urls: Sequence[str] = [f"http://{server.host}:{sock.getsockname()[1]}" for sock in self._sockets]
        self._forwards = [Forward(url) for url in self.urls]
        self._actors: dict[int, ChildActor] = {}
        self._serving: set[int] = set()
        self._restarts: Counter[int] = Counter()
        self._owned: dict[str, int] = {}
        """Leased episode -> its owner."""
        self._loads: Counter[int] = Counter()
        self._workers: dict[str, int] = {}
        """Worker -> the process that it asks."""
        self._begun: list[str] = []
        self._host: PromptHost | None = None

    async def start(self, server: RunServer) -> None:
        """Start all; returns when they answer. Raises ProcessDied, or what `record_death` raises."""
        self._server = server
        secret = process_secret(self.keys.secret)
        self._host = PromptHost(server, VLLMCodec(), rounds=self.rounds, secret=secret, on_dead=self._kill)
        self._host.listen(asyncio.get_running_loop())
        for episode_id in self._begun:
            self._host.begun(episode_id)
        async with asyncio.TaskGroup() as starting:
            for process in range(1, self._number):
                starting.create_task(self._start(process), name=f"start server process {process}")

    async def run(self) -> None:
        """Start those that die again, until cancelled."""
        async with asyncio.TaskGroup() as keeping:
            for process in range(1, self._number):
                keeping.create_task(self._keep(process), name=f"keep server process {process}")

    async def close(self) -> None:
        """End all."""
        for forward in self._forwards:
            await forward.close()
        await asyncio.gather(*(self._end(actor) for actor in self._actors.values()))
        if self._host is not None:
            await self._host.aclose()
        for sock in self._sockets:
            sock.close()

    # Episodes

    def process_of(self, key: str) -> int:
        """The process of an episode's key. Workers have them in turn, as they are asked for; the one without a name has the
        run's."""
        if (owned := self.keys.owned_by(key)) is not None:
            return owned.process % self._number
        if not (worker := self.keys.worker_of(key)):
            return 0
        return self._workers.setdefault(worker, len(self._workers) % self._number)

    def elsewhere(self, key: str, _: str) -> ASGIApp | None:
        """Forward of a request with this key; None: it is the run's own."""
        owned = self.keys.owned_by(key)
        process = 0 if owned is None else owned.process % self._number
        return None if process == 0 else self._forwards[process - 1]

    def owner(self, episode_id: str, *, asked: int | None) -> int:
        """`asked`, or the process with the fewest episodes owns this one from now on."""
        fewest = min(range(self._number), key=lambda process: self._loads[process])
        process = fewest if asked is None else asked % self._number
        self._owned[episode_id] = process
        self._loads[process] += 1
        return process

    def begun(self, episode_id: str) -> None:
        """Rounds of this episode are in the ledger. Called before `start`."""
        self._begun.append(episode_id)

    def closed(self, episode_id: str, reason: str) -> None:
        """The episode has ended."""
        if (process := self._owned.pop(episode_id, None)) is not None:
            self._loads[process] -= 1
        if self._host is not None:
            self._host.closed(episode_id, reason)

    def status(self) -> dict[str, dict[str, Any]]:
        """Figures of each process by its name; p0 is the run's own."""
        own = {
            "pid": os.getpid(),
            "url": self._server.base_url,
            "is_up": True,
            "restarts": 0,
            "episodes_leased": self._loads[0],
            "requests": self._server.model_requests.count,
            "forwarded": sum(forward.count for forward in self._forwards),
            "cpu_s": time.process_time(),
        }
        return {"p0": own} | {f"p{process}": self._status(process) for process in range(1, self._number)}

    def _status(self, process: int) -> dict[str, Any]:
        actor = self._actors.get(process)
        figures = None if self._host is None else self._host.figures(process)
        return {
            "pid": None if actor is None else actor.pid,
            "url": self.urls[process - 1],
            "is_up": process in self._serving and figures is not None,
            "restarts": self._restarts[process],
            "episodes_leased": self._loads[process],
            "requests": 0 if figures is None else figures.requests,
            "forwarded": 0 if figures is None else figures.forwarded,
            "cpu_s": 0.0 if figures is None else figures.cpu_s,
        }

    # Processes

    async def _keep(self, process: int) -> None:
        while True:
            actor = self._actors[process]
            try:
                why = f"lost the run: {await actor.call('until_lost')}"
            except UnderstudyError as death:
                why = str(death)
            actor.kill()
            self._serving.discard(process)
            assert self._host is not None
            self._host.lose(process)
            self.record_death(f"p{process}", ProcessDied(f"server process {process} ended: {why}"))
            self._restarts[process] += 1
            await self._start(process)

    async def _start(self, process: int) -> None:
        """Start it, again while `record_death` lets it."""
        while (why := await self._launch(process)) is not None:
            error = ProcessDied(f"server process {process} ended before it answered: {why}")
            self.record_death(f"p{process}", error)

    async def _launch(self, process: int) -> str | None:
        """A new process; why it does not serve, if it does not."""
        assert self._host is not None
        settings = ProcessSettings(
            engine=self.engine,
            secret=self.keys.secret,
            run=str(self._host.address),
            process=process,
            urls=[self._server.base_url, *self.urls],
        )
        title, sock = f"{TITLE}_{process}", self._sockets[process - 1]
        actor = self._actors[process] = ChildActor(own_context(), title, ServerProcess, settings, sock=sock)
        try:
            await asyncio.wait_for(actor.call("start"), START_S)
        except TimeoutError:
            why = f"it did not answer within {START_S:.0f} s"
        except UnderstudyError as error:
            why = str(error)
        else:
            self._serving.add(process)
            return None
        actor.kill()
        return why

    def _kill(self, process: int) -> None:
        """Kill a process that is stopped or stuck: `run` starts another."""
        if (actor := self._actors.get(process)) is not None:
            actor.kill()

    async def _end(self, actor: ChildActor) -> None:
        with suppress(UnderstudyError, TimeoutError):
            await asyncio.wait_for(actor.call("close"), END_S)
        actor.kill()
