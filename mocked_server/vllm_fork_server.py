"""A process of which engines are forked: what an engine imports, which takes seconds, is there already.

Python's own fork server (`multiprocessing.forkserver`), but forked of this process, which has imported the engine, instead of
started anew to import it once more. Called by `mocked_server.vllm_engine`.
Invariant: an engine that is forked has the environment that this process has when it starts the engine, as a new process would.
Without `start`, and where there is a GPU (CUDA may not be forked), vLLM starts engines as it does by itself.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

_owner: int | None = None
"""The process that started it."""


def start() -> None:
    """Fork it of this process, which must be the main thread's and has imported all that engines need.

    Does nothing where it cannot be done: then an engine takes longer to start."""
    global _owner
    if sys.platform != "linux" or sys.version_info >= (3, 14):  # its `main` takes other arguments there
        return
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive_r, alive_w = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(alive_w)
            _serve(listener.detach(), alive_r)
        os.close(alive_r)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_w, pid
    _owner = os.getpid()


def _serve(listener: int, alive: int) -> None:
    """For ever in the forked process, and until those that hold the other end of `alive` have ended."""
    code = 1
    try:
        forkserver.main(listener, alive, [])
    except SystemExit:
        code = 0
    finally:
        if code != 0:
            traceback.print_exc()
        os._exit(code)


@contextmanager
def forked_engines() -> Iterator[None]:
    """vLLM's engines that are started inside are forked, if `start` was called."""
    if _owner != os.getpid():
        yield
        return
    from vllm.v1.engine import utils

    before = utils.get_mp_context
    utils.get_mp_context = _context
    try:
        yield
    finally:
        utils.get_mp_context = before


class _Process(ForkServerProcess):
    """It has this process's environment, not that of the fork server."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        with suppress(ImportError):  # finds where the title is by the environment's place, which moves now
            import setproctitle

            setproctitle.getproctitle()
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


def _context() -> Any:
    context: Any = ForkServerContext()
    context.Process = _Process
    return context
