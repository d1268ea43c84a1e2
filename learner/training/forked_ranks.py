"""A process of which the learner's ranks are forked: what they import, which takes seconds, is there already.

Ray starts a rank by the command that its runtime environment names (`py_executable`). Here that is this file as a program: it
asks the zygote for a fork, hands over its arguments, environment, folder and standard streams, and stands for what was forked until
that has ended. Linux and CPU only: CUDA may not be forked. Called by `learner.run` and `learner.training.ranks`.

Invariants: the zygote has not imported Ray, which reads a worker's environment while it is imported. What was forked and the
program that asked for it end together. Where no zygote answers, the program becomes what it was to ask for, which takes longer.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

STREAMS = (0, 1, 2)
_address: str | None = None


def start() -> None:
    """Fork it of this process, which must be the main thread's and have no others.

    Imports what a rank imports. Does nothing where it cannot be done: then a rank takes longer to start."""
    global _address
    if sys.platform != "linux" or "ray" in sys.modules:
        return
    from multiprocessing import connection

    import learner.training.trainer  # noqa: F401

    with socket.socket(socket.AF_UNIX) as listener:
        _address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(_address)
        os.chmod(_address, 0o600)
        listener.listen()
        alive_r, alive_w = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(alive_w)
            _serve(listener, alive_r)
        os.close(alive_r)
    atexit.register(_end, pid, starter=os.getpid())


def _end(pid: int, *, starter: int) -> None:
    if os.getpid() == starter:
        with suppress(ChildProcessError, ProcessLookupError):  # it ended before
            os.waitpid(pid, os.WNOHANG)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def launcher() -> dict[str, str]:
    """The part of a rank's runtime environment that has it forked; empty where there is no zygote."""
    import shlex

    if _address is None:
        return {}
    return {"py_executable": shlex.join([sys.executable, "-IS", os.path.abspath(__file__), _address])}


def _serve(listener: socket.socket, alive: int) -> NoReturn:
    """In the zygote: for ever, and until nobody holds the other end of `alive`: `start`'s process, and what it forked."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for the run, which ends the ranks
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked
        while alive not in select.select([listener.fileno(), alive], [], [])[0]:
            asking, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                os.close(alive)
                _become(asking)
            asking.close()
    finally:  # whatever happens (no memory for a fork), it does not go on as a second run
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(0)


def _become(asking: socket.socket) -> NoReturn:
    """In a process that was forked of it: what `asking` was started as."""
    import random
    import runpy
    import threading

    import torch

    os.setpgrp()  # Ray ends the group of a worker that has ended, which would be the run's
    code = 1
    try:
        arguments = _receive(asking)
        threading.Thread(target=_end_with, args=(asking,), daemon=True).start()
        random.seed()
        if threads := os.environ.get("OMP_NUM_THREADS"):  # torch read it when it was imported
            torch.set_num_threads(int(threads))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _receive(asking: socket.socket) -> list[str]:
    """In the fork: take over what `_launch` sent; its arguments."""
    with asking.makefile("rb") as lines:
        _, streams, *_ = socket.recv_fds(asking, 1, len(STREAMS))
        line = lines.readline()
    if not line.endswith(b"\n"):  # who asked has ended
        os._exit(1)
    request = json.loads(line)
    for stream, descriptor in zip(STREAMS, streams, strict=True):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    arguments: list[str] = request["arguments"]
    return arguments


def _end_with(asking: socket.socket) -> None:
    asking.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _launch(address: str, arguments: list[str]) -> None:
    """As the program: has `arguments` (a Python file and its own) run by a fork, and waits for its end."""
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as zygote:
        try:
            zygote.connect(address)
            socket.send_fds(zygote, [b"."], STREAMS)
            zygote.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            os.execv(sys.executable, [sys.executable, *arguments])
        zygote.recv(1)


if __name__ == "__main__":
    _launch(sys.argv[1], sys.argv[2:])
