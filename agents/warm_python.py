"""Programs in Python that find modules imported (`agents.preload`): each is a fork of one interpreter that has imported them.

`WarmPython` is the run's side, used by `agents.external`. Run as a program, this file is that interpreter, of the programs' own
command, without anything of ours on its import path: `python warm_python.py SCRIPT MODULE...`. Invariants: a program has its own
folder, environment, streams and session, as one that starts by itself; it ends with the run; an interpreter that died is replaced.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Forked:
    """A program that was forked, as `Child` knows one. `wait` gives its exit code (negative: the signal that ended it)."""

    pid: int
    ended: asyncio.Task[int]

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)


class WarmPython:
    """`modules` are imported by the program of `command`; `folder`: its own, with its log."""

    def __init__(self, command: Sequence[str], *, modules: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self._command = [command[0], __file__, command[1], *modules]
        self._env, self._folder = dict(env), folder
        self._starting = asyncio.Lock()
        self._asked: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def fork(self, *command: str, cwd: Path, env: Mapping[str, str], **streams: Any) -> Forked:
        """Start it; `asyncio.create_subprocess_exec` takes the same. Raises AgentError where a module cannot be imported."""
        order = json.dumps({"command": command, "cwd": os.path.abspath(cwd), "env": dict(env)}).encode()
        while True:
            async with self._starting:
                if self._asked is None:
                    await self._start()
                asked = self._asked
            assert asked is not None, "it is there, or that is an error"
            ours, theirs = socket.socketpair()
            told, writer = await asyncio.open_connection(sock=ours)
            try:
                with theirs, suppress(ConnectionError):
                    files = [theirs, *(streams[name] for name in ("stdin", "stdout", "stderr"))]
                    socket.send_fds(asked, [b"."], [each.fileno() for each in files])
                with suppress(ConnectionError):
                    writer.write(order + b"\n")
                    if pid := await told.readline():
                        return Forked(int(pid), asyncio.create_task(_exit_code(told, writer)))
            except asyncio.CancelledError:
                writer.close()  # which ends the program
                raise
            writer.close()
            if self._asked is asked:
                await self.aclose()

    async def _start(self) -> None:
        from buffers.disk import end_of  # the interpreter has nothing of ours
        from buffers.errors import AgentError

        log = self._folder / "log.txt"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._asked, theirs = socket.socketpair()
        self._asked.setblocking(False)
        with theirs, log.open("ab") as sink:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, cwd=self._folder, env=self._env, stdin=theirs.fileno(), stdout=sink, stderr=sink,
                start_new_session=True,
            )  # fmt: skip
        if not await asyncio.get_running_loop().sock_recv(self._asked, 1):
            raise AgentError(
                f"agents.preload must name modules that {self._command[0]} can import, got {self._command[3:]}; leave out the "
                f"others: {end_of(log, chars=2000)}"
            )
        self._asked.setblocking(True)

    async def aclose(self) -> None:
        """The interpreter ends; programs that run go on."""
        if self._asked is not None:
            self._asked.close()
        self._asked = None
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


async def _exit_code(told: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    with closing(writer):  # which ends the program, where it still runs
        return int(await told.readline() or -signal.SIGKILL)


def serve(script: str, modules: Sequence[str]) -> None:
    """The interpreter: for each byte, which comes with descriptors, a program, until the other end is closed."""
    sys.path[0] = os.path.dirname(script)
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as asked:
        asked.send(b".")
        while files := socket.recv_fds(asked, 1, 4)[1]:
            if os.fork() == 0:
                break
            for each in files:
                os.close(each)
        else:
            return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _run(socket.socket(fileno=files[0]), files[1:])


def _run(told: socket.socket, streams: Sequence[int]) -> None:
    """Waits, as the parent of the program, until it has ended; the program itself returns when it is done."""
    with told.makefile("rb") as lines:
        order = json.loads(lines.readline())
    if pid := os.fork():
        if told.fileno() in select.select([told.fileno(), os.pidfd_open(pid)], [], [])[0]:  # the run has ended
            with suppress(ProcessLookupError):  # it has not begun: no group is its own yet
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(ConnectionError):
            told.send(f"{code}\n".encode())
        os._exit(0)
    os.setsid()
    told.send(f"{os.getpid()}\n".encode())
    told.close()
    for number, each in enumerate(streams):
        os.dup2(each, number)
        os.close(each)
    os.chdir(order["cwd"])
    os.environ.update(order["env"])  # beside what the modules have set
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.argv = order["command"][1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
