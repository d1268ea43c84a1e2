"""The learner's ranks as forks of a warm process, which has imported what takes a rank seconds.

Ray starts a rank by the command that its runtime environment names (`py_executable`). Here that is this file as a program, the
launcher: it asks the warm process for a fork, hands over its arguments, environment, folder and standard streams, and stands for
the fork until that has ended. Linux and CPU only: CUDA may not be forked. Called by `learner.run` and `learner.training.ranks`.

Invariants: the warm process has not imported Ray, which reads a worker's environment while it is imported. A fork and its launcher
end together. Where no warm process answers, the launcher runs the program itself, which takes longer.
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
PID_BYTES = 8
_address: str | None = None


def start() -> None:
    """Fork it of this process, which must be the main thread's and have no others.

    Imports what a rank imports. Does nothing where it cannot be done: then a rank takes longer to start."""
    global _address
    if sys.platform != "linux" or "ray" in sys.modules:
        return
    from configs.child_processes import fork_server, imports_kept

    with imports_kept():
        import learner.training.trainer  # noqa: F401
    forked = fork_server(_serve)
    _address = forked.address
    atexit.register(_end, forked.pid, starter=os.getpid())


def _end(pid: int, *, starter: int) -> None:
    if os.getpid() == starter:
        with suppress(ChildProcessError, ProcessLookupError):  # it ended before
            os.waitpid(pid, os.WNOHANG)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def launcher() -> dict[str, str]:
    """The part of a rank's runtime environment that has it forked; empty where there is no warm process."""
    import shlex

    if _address is None:
        return {}
    return {"py_executable": shlex.join([sys.executable, "-IS", os.path.abspath(__file__), _address])}


def _serve(listener: socket.socket, alive: int) -> None:
    """Run the warm process, until `start`'s process and all that it forked, which hold the other end of `alive`, have ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for the run, which ends the ranks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    while alive not in select.select([listener.fileno(), alive], [], [])[0]:
        request, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            os.close(alive)
            _become(request)
        request.close()


def _become(launcher: socket.socket) -> NoReturn:
    """Run, in the fork, the program that the launcher was asked to run, and end."""
    import random
    import runpy
    import threading

    from configs.child_processes import leave, use_threads_of_environment

    os.setpgrp()  # Ray ends the group of a worker that has ended, which would be the run's
    code = 1
    try:
        arguments = _receive(launcher)
        launcher.sendall(os.getpid().to_bytes(PID_BYTES))
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
        random.seed()
        use_threads_of_environment()
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        leave(code)


def _receive(launcher: socket.socket) -> list[str]:
    """Take over, in the fork, streams, environment and folder of `_launch`; returns the program's arguments."""
    with launcher.makefile("rb") as lines:
        _, streams, *_ = socket.recv_fds(launcher, 1, len(STREAMS))
        line = lines.readline()
    if not line.endswith(b"\n"):  # the launcher has ended
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


def _end_with(launcher: socket.socket) -> None:
    launcher.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _launch(address: str, arguments: list[str]) -> None:
    """The program that Ray starts: has `arguments` (a Python file and its own) run by a fork, and waits for its end."""
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(address)
            socket.send_fds(server, [b"."], STREAMS)
            server.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            os.execv(sys.executable, [sys.executable, *arguments])
        if len(pid := server.recv(PID_BYTES)) == PID_BYTES:
            with suppress(ProcessLookupError):  # it has ended already
                select.select([server.fileno(), os.pidfd_open(int.from_bytes(pid))], [], [])


if __name__ == "__main__":
    _launch(sys.argv[1], sys.argv[2:])
