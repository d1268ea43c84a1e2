"""Whole runs, vLLM's servers and Python's fork servers without their imports: each is a fork of one process that has them.

`start(command...)` is for `tests.support.run_parts`, `start_vllm` for `tests.support.served_models`, `fork_here` for
`tests.conftest`. The first one starts that process for the whole test session, whose workers share it:
`python -m tests.support.processes.warm_runs NAME`. It forks a run for each connection and tells how the run ended. What a run
inherits is what a new process would have: its folder, environment, streams and process group, and in `/proc` its own mark.
Invariants: it has no threads while it forks; it ends when no worker is left. It judges nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import arbitrary_address
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[3]
START_S = 300.0
"""Imports, on a busy machine."""
NUMBER = struct.Struct("i")
MARK = "UNDERSTUDY_TEST_RUN"
"""The variable that names a run; its value has 32 characters."""
_held: list[socket.socket] = []
"""The connection that keeps the warm process alive while this process lives."""


VLLM_SERVER = "vllm.entrypoints.openai.api_server"
FORK_SERVER = "multiprocessing.forkserver"


class ForkedProgram:
    """A program that was forked: what `subprocess.Popen` offers of one."""

    def __init__(self, connection: socket.socket, *, pid: int) -> None:
        self.pid = pid
        """Of its process group, too."""
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            answer = self._connection.recv(NUMBER.size)
            assert len(answer) == NUMBER.size, "the process that runs are forked of has died"
            (self.returncode,) = NUMBER.unpack(answer)
            self._connection.close()
        return self.returncode


class ForkedRun(ForkedProgram):
    """A run that was forked, whose output is text in a pipe."""

    def __init__(self, connection: socket.socket, *, pid: int, stdout: IO[str]) -> None:
        super().__init__(connection, pid=pid)
        self.stdout = stdout

    def communicate(self, timeout: float = 3600.0) -> tuple[str, None]:
        """All that it and what it started print, until none of them holds the pipe any more."""
        until, found = time.monotonic() + timeout, bytearray()
        while select.select([self.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            if not (more := os.read(self.stdout.fileno(), 65536)):
                self.wait(max(1.0, until - time.monotonic()))
                return found.decode(errors="replace"), None
            found += more
        raise subprocess.TimeoutExpired("a forked run", timeout, output=bytes(found))


def start(arguments: list[str], *, folder: Path, environment: Mapping[str, str]) -> ForkedRun:
    """`python -m learner.run` with these arguments. `MARK` is in its environment."""
    reading, writing = os.pipe()
    connection, pid = _forked("learner.run", arguments, folder=folder, environment=environment, files=[writing])
    os.close(writing)
    return ForkedRun(connection, pid=pid, stdout=os.fdopen(reading, encoding="utf-8"))


def start_vllm(arguments: list[str], *, folder: Path, environment: Mapping[str, str], sink: IO[bytes]) -> ForkedProgram:
    """vLLM's server with these arguments, which it reads itself; its engine is forked too. `sink`: a file for what it prints."""
    connection, pid = _forked(VLLM_SERVER, arguments, folder=folder, environment=environment, files=[sink.fileno()])
    return ForkedProgram(connection, pid=pid)


def fork_here() -> None:
    """Python's fork server of this process is a fork of the warm one from its first use on, and ends with this process."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]

    def start() -> None:
        server._forkserver_address = arbitrary_address("AF_UNIX")
        server.ensure_running = lambda: None  # it asks the system for a child of this process
        alive, server._forkserver_alive_fd = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(server._forkserver_address)
            os.chmod(server._forkserver_address, 0o600)
            listener.listen()
            files = [2, listener.fileno(), alive]
            _held.append(_forked(FORK_SERVER, [], folder=ROOT, environment=os.environ, files=files)[0])
            atexit.register(_held[-1].close)
        os.close(alive)

    server.ensure_running = start


def _forked(
    program: str, arguments: list[str], *, folder: Path, environment: Mapping[str, str], files: list[int]
) -> tuple[socket.socket, int]:
    """The connection that tells how it ended, and its process id. `files`: where it prints, and more that it is given."""
    _hold()
    connection = _connect()
    request = {
        "program": program, "arguments": arguments, "folder": str(folder), "environment": dict(environment),
    }  # fmt: skip
    connection.sendall(b"run\n")
    socket.send_fds(connection, [b"."], files)
    connection.sendall(json.dumps(request).encode() + b"\n")
    answer = connection.recv(NUMBER.size)
    assert len(answer) == NUMBER.size, "the process that runs are forked of has died"
    return connection, NUMBER.unpack(answer)[0]


def _hold() -> None:
    """Keep the warm process alive with this one."""
    if not _held:
        held = _connect()
        held.sendall(b"hold\n")
        _held.append(held)
        atexit.register(held.close)


def _connect() -> socket.socket:
    """To the warm process, which is started if there is none; while it imports, it is waited for by what is asked of it."""
    name = f"understudy-runs-{os.environ.get('PYTEST_XDIST_TESTRUNUID') or os.getpid()}"
    until, started = time.monotonic() + START_S, False
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect("\0" + name)
            return connection
        except ConnectionRefusedError:
            connection.close()
            assert time.monotonic() < until, f"no process to fork runs of within {START_S} s"
            if not started:
                started = True
                _start_server(name)
            time.sleep(0.05)


def _start_server(name: str) -> None:
    """It ends by itself. Where two workers start one at once, the second sees that the name is taken, and ends."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment.pop(MARK, None)
    environment[MARK] = "0" * 32  # room for the runs' marks, at the end: a title is written over the beginning
    command = [sys.executable, "-m", "tests.support.processes.warm_runs", name]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **quiet)
    process.returncode = 0  # nobody waits for it


# The warm process's side.


def serve(name: str) -> None:
    """Until no worker holds a connection."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind("\0" + name)
    except OSError:  # another worker has started one
        return
    listener.listen(64)
    _import_all()
    held, ever = 0, False
    with selectors.DefaultSelector() as awaited:
        awaited.register(listener, selectors.EVENT_READ, data="new")
        while held or not ever:
            for key, _ in awaited.select():
                if key.data == "new":
                    connection, _ = listener.accept()
                    if not _is_ours(connection):
                        connection.close()
                    elif (what := _line(connection)) == b"hold":
                        awaited.register(connection, selectors.EVENT_READ, data="hold")
                        held, ever = held + 1, True
                    elif what == b"run":
                        pid = _fork(connection, awaited)
                        awaited.register(os.pidfd_open(pid), selectors.EVENT_READ, data=(pid, connection))
                elif key.data == "hold":
                    awaited.unregister(key.fileobj)
                    key.fileobj.close()
                    held -= 1
                else:
                    pid, connection = key.data
                    awaited.unregister(key.fileobj)
                    os.close(key.fileobj)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with suppress(OSError), connection:
                        connection.sendall(NUMBER.pack(code))


def _import_all() -> None:
    from tests.matrix.start import import_everything

    import_everything()
    import_module("tests.support.processes.forked_programs")


def _is_ours(connection: socket.socket) -> bool:
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return user == os.getuid()


def _line(connection: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        if not (byte := connection.recv(1)):
            return b""
        found += byte
    return found[:-1]


def _fork(connection: socket.socket, awaited: selectors.BaseSelector) -> int:
    """In the child this does not return."""
    _, (output, *more), *_ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile("rb").readline())
    if pid := os.fork():
        for each in (output, *more):
            os.close(each)
        with suppress(OSError):  # it does so itself as well: whichever is first
            os.setpgid(pid, pid)
        connection.sendall(NUMBER.pack(pid))
        return pid
    from configs.child_processes import leave

    code = 1
    try:
        os.setpgid(0, 0)
        connection.close()
        for key in list(awaited.get_map().values()):
            os.close(key.fd)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        code = _run(request, more)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # all that it may be: the child ends here
        traceback.print_exc()
    finally:
        leave(code)


def _run(request: dict[str, Any], files: list[int]) -> int:
    import random

    import setproctitle

    setproctitle.getproctitle()  # finds where an engine's title is by the environment's place, which moves now
    os.environ.clear()
    os.environ.update(request["environment"])
    _set_mark(os.environ.get(MARK, ""))
    os.chdir(request["folder"])
    sys.path[:1] = [request["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    random.seed()
    if request["program"] == VLLM_SERVER:
        return _serve_vllm(request["arguments"])
    if request["program"] == FORK_SERVER:
        forkserver.main(*files, [])
    from learner.run import main

    code: int = main(request["arguments"])
    return code


def _serve_vllm(arguments: list[str]) -> int:
    """As `python -W ignore -m vllm.entrypoints.openai.api_server`, but that its engine is forked of a process that imported it."""
    import runpy
    import warnings

    from mocked_server.vllm.engine import start_fork_server
    from mocked_server.vllm.process.fork_server import engines_of_ours

    warnings.simplefilter("ignore")
    sys.argv[1:] = arguments
    start_fork_server()
    with engines_of_ours():
        runpy.run_module(VLLM_SERVER, run_name="__main__", alter_sys=True)
    return 0


def _set_mark(value: str) -> None:
    """Write it over the one that `/proc` tells of this process, and of all that it forks: that is the memory which its program
    was started with, whatever `os.environ` says."""
    told = Path("/proc/self/environ").read_bytes()
    at = told.find(f"{MARK}=".encode())
    if at < 0 or len(value) != 32:
        return
    first = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])  # `env_start`
    ctypes.memmove(first + at + len(MARK) + 1, value.encode(), 32)


if __name__ == "__main__":
    serve(sys.argv[1])
