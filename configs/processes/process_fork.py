"""A process forked of this one that serves a Unix socket, what it imports and computes with, and the end of a process that skips
taking Python apart.

Engines (`mocked_server.vllm.process.fork_server`) and the learner's ranks (`learner.training.forked_ranks`) are forked of such a
process, which has imported what takes them seconds. It stands here because both may import this folder. Linux only; the caller is
its process's main thread and has no other threads.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from configs.processes.temporary_folder import socket_folder


@dataclass(frozen=True, slots=True)
class ForkedServer:
    """A server that `fork_server` has started."""

    address: str
    """Path of its Unix socket; only this user may connect."""
    alive: int
    """A descriptor of this process: once all copies of it are closed, the server reads the end of its `alive`."""
    pid: int


def fork_server(serve: Callable[[socket.socket, int], None]) -> ForkedServer:
    """Fork a process that runs `serve(listener, alive)` and ends with it. `alive`: readable when this process, and all that has
    inherited its end, have ended. Whatever `serve` raises is printed: the fork never returns into the caller's program."""
    folder, owner = tempfile.mkdtemp(prefix="understudy-fork-", dir=socket_folder(60)), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # forks inherit what is called at the end
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    with socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/listener"
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive_r, alive_w = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(alive_w)
            code = 1
            try:
                serve(listener, alive_r)
                code = 0
            except SystemExit:
                code = 0
            finally:
                if code != 0:
                    traceback.print_exc()
                os._exit(code)
        os.close(alive_r)
    return ForkedServer(address, alive_w, pid)


@contextmanager
def imports_kept() -> Iterator[None]:
    """What is imported inside stays for the process's life, so Python's collector never looks through it: not while it is imported
    (a fifth of the time that importing vLLM takes), not afterwards, and not in what is forked of this process, where each time
    would take 0.4 s and copy its memory."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def use_threads_of_environment() -> None:
    """Compute with as many threads as OMP_NUM_THREADS says now: torch read it when it was imported, before the fork.

    As OpenMP does, takes the first of a list (`4,2`), and ignores what is no number."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if "torch" in sys.modules and first.isdecimal() and int(first) > 0:
        sys.modules["torch"].set_num_threads(int(first))


def leave(code: int) -> NoReturn:
    """End the process, now that all is closed: for Python to take torch and vLLM apart takes over two seconds."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
