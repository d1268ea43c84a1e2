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
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp

from buffers.errors import UnderstudyError
from buffers.records import Round
from configs.fork_server import own_context
from mocked_server.http.attribution import Forward
from mocked_server.http.uvicorn_server import ServerError, bind
from mocked_server.keys import KeyRing, process_secret
from mocked_server.processes.prompt_host import PromptHost, RunServer
from mocked_server.processes.server_process import READY, ProcessSettings, main
from mocked_server.vllm.engine_arguments import EngineSettings
from mocked_server.vllm.hosted.outputs import VLLMCodec

logger = logging.getLogger(__name__)

START_S = 180.0
"""Seconds for a process to answer requests; where it is not forked, it has to import vLLM."""
END_S = 5.0


class ProcessDied(UnderstudyError):
    """A server process ended by itself."""


def _never_again(_: str, error: Exception) -> None:
    raise error


class ServerProcesses:
    """See the module. `engine`: what vLLM's HTTP layer is built from; `rounds`: of an episode, as stored.
    `record_death(name, error)`: counts a death, and raises `error` when that process may not be started again. Making one raises
    ServerError where a port is in use."""

    def __init__(
        self,
        engine: EngineSettings,
        *,
        keys: KeyRing,
        rounds: Callable[[str], Future[list[Round]]],
        record_death: Callable[[str, Exception], None] = _never_again,
    ) -> None:
        server = engine.server
        self._engine = engine
        self._keys = keys
        self._rounds = rounds
        self._record_death = record_death
        self._number = server.processes
        if server.port and server.port + self._number - 1 > 65535:
            raise ServerError(
                f"server.port must leave {self._number - 1} ports after it for server.processes={self._number}, got "
                f"{server.port}; set a lower one"
            )
        self._sockets = [bind(server.host, server.port and server.port + n) for n in range(1, self._number)]
        self.urls: Sequence[str] = [f"http://{server.host}:{sock.getsockname()[1]}" for sock in self._sockets]
        self._forwards = [Forward(url) for url in self.urls]
        self._children: dict[int, _Child] = {}
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
        secret = process_secret(self._keys.secret)
        self._host = PromptHost(server, VLLMCodec(), rounds=self._rounds, secret=secret, on_dead=self._kill)
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
        await asyncio.gather(*(self._end(child) for child in self._children.values()))
        if self._host is not None:
            await self._host.aclose()
        for sock in self._sockets:
            sock.close()

    # Episodes

    def process_of(self, key: str) -> int:
        """The process of an episode's key. Workers have them in turn, as they are asked for; the one without a name has the
        run's."""
        if (owned := self._keys.owned_by(key)) is not None:
            return owned.process % self._number
        if not (worker := self._keys.worker_of(key)):
            return 0
        return self._workers.setdefault(worker, len(self._workers) % self._number)

    def elsewhere(self, key: str, _: str) -> ASGIApp | None:
        """What passes a request with this key on; None: it is the run's own."""
        owned = self._keys.owned_by(key)
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
        child = self._children.get(process)
        figures = None if self._host is None else self._host.figures(process)
        return {
            "pid": None if child is None else child.pid,
            "url": self.urls[process - 1],
            "is_up": child is not None and child.is_up and figures is not None,
            "restarts": self._restarts[process],
            "episodes_leased": self._loads[process],
            "requests": 0 if figures is None else figures.requests,
            "forwarded": 0 if figures is None else figures.forwarded,
            "cpu_s": 0.0 if figures is None else figures.cpu_s,
        }

    # Processes

    async def _keep(self, process: int) -> None:
        while True:
            code = await self._children[process].wait()
            assert self._host is not None
            self._host.lose(process)
            self._record_death(
                f"p{process}", ProcessDied(f"server process {process} ended with {code}; see the run's log")
            )
            self._restarts[process] += 1
            await self._start(process)

    async def _start(self, process: int) -> None:
        """Start it, again while `record_death` lets it."""
        while (code := await self._launch(process)) is not None:
            error = ProcessDied(f"server process {process} ended with {code} before it answered; its log is above")
            self._record_death(f"p{process}", error)

    async def _launch(self, process: int) -> int | None:
        """A new process; how it ended, if it did before it was ready."""
        assert self._host is not None
        settings = ProcessSettings(
            engine=self._engine,
            secret=self._keys.secret,
            run=str(self._host.address),
            process=process,
            urls=[self._server.base_url, *self.urls],
        )
        child = self._children[process] = _Child(settings, self._sockets[process - 1])
        try:
            if await asyncio.wait_for(child.until_ready(), START_S):
                return None
        except TimeoutError:
            logger.error("server process %d did not answer within %.0f s", process, START_S)
        child.kill()
        return await child.wait()

    def _kill(self, process: int) -> None:
        """It is stopped, or stuck: `run` starts another."""
        if (child := self._children.get(process)) is not None:
            child.kill()

    async def _end(self, child: _Child) -> None:
        child.end()
        try:
            await asyncio.wait_for(child.wait(), END_S)
        except TimeoutError:
            child.kill()
            await child.wait()


class _Child:
    """A server process, started on `sock`, and the channel to it. Made and used on the event loop."""

    def __init__(self, settings: ProcessSettings, sock: socket.socket) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = own_context().Process(
                target=main,
                args=(settings, sock, theirs),
                name=f"server process {settings.process}",
                daemon=True,
            )
            self._process.start()
        self.pid: int = self._process.pid
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._process.sentinel, self._see_end)
        self._channel.setblocking(False)

    def _see_end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._process.join()
        self._ended.set()

    @property
    def is_up(self) -> bool:
        return not self._ended.is_set()

    async def until_ready(self) -> bool:
        """Whether it answers now; else it has ended."""
        with suppress(ConnectionError):
            return await self._loop.sock_recv(self._channel, len(READY)) == READY
        return False

    async def wait(self) -> int:
        """Its exit code, once it has ended; -9 after SIGKILL."""
        await self._ended.wait()
        self._channel.close()
        code: int = self._process.exitcode
        return code

    def end(self) -> None:
        """Ask it to end."""
        self._channel.close()

    def kill(self) -> None:
        if self.is_up:
            self._process.kill()
