"""How the processes of engines and servers are started: as forks of a process that has imported vLLM, which takes seconds.

That process is Python's own fork server (`multiprocessing.forkserver`), forked of this process, which has imported the engine.
Started with `set_forkserver_preload` instead, it would import vLLM once more: 7 s of a core at each start and each restart of a
run. Called by `mocked_server.vllm.engine` and `mocked_server.processes`. Invariants: such a process ends as soon as the one that
started it has ended, however it did, also while it still starts. One that is forked has the environment that this process has when
it starts it, as a new process would. Without `start`, and where there is a GPU (CUDA may not be forked), engines are started as
vLLM does it by itself, and servers as new interpreters.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, process
from multiprocessing.context import (
    ForkContext,
    ForkProcess,
    ForkServerContext,
    ForkServerProcess,
    SpawnContext,
    SpawnProcess,
)
from typing import Any
from uuid import uuid4

from configs.child_processes import fork_server, use_threads_of_environment
from mocked_server.vllm.engine_arguments import has_gpu
from mocked_server.vllm.process.engine_health import ending_of

_owner: int | None = None
"""The process that started it."""


def start() -> None:
    """Fork it of this process, which must be the main thread's and has imported all that engines need.

    Does nothing where it cannot be done: then an engine takes longer to start."""
    global _owner
    if sys.platform != "linux" or sys.version_info >= (3, 14):  # its `main` takes other arguments there
        return
    forked = fork_server(_serve)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd = forked.address, forked.alive
    server._forkserver_pid = forked.pid
    _owner = os.getpid()


def _serve(listener: socket.socket, alive: int) -> None:
    forkserver.main(listener.detach(), alive, [])


@contextmanager
def engines_of_ours(folder: str = "") -> Iterator[list[process.BaseProcess]]:
    """vLLM's engines that this thread starts inside end with this process. They are forked, if `start` was called. Yields a list to
    which each one is added before it starts. `folder`: where its processes meet, by sockets and a file that stay when it is killed;
    by itself vLLM takes the folder for temporary files."""
    from vllm.v1 import utils as addresses
    from vllm.v1.engine import utils

    with _patching:
        if getattr(utils.get_mp_context, "__name__", "") != "context_of_ours":
            _replace_context(utils)
            utils.get_open_zmq_ipc_path = addresses.get_open_zmq_ipc_path = _socket_of_ours(utils.get_open_zmq_ipc_path)
    _booting.started = started = list[process.BaseProcess]()
    _booting.folder = folder
    try:
        yield started
    finally:
        _booting.started, _booting.folder = None, ""


def server_context() -> Any:
    """The context of multiprocessing for processes that serve: they end with this one, and are forked if `start` was called."""
    return ending_with_us(ForkServerContext() if _owner == os.getpid() else SpawnContext(), [])


_patching = threading.Lock()
_booting = threading.local()
"""What each thread starts now, if it starts an engine."""


def _replace_context(utils: Any) -> None:
    before = utils.get_mp_context

    def context_of_ours() -> Any:
        started = getattr(_booting, "started", None)
        if started is None:
            return before()
        return ending_with_us(ForkServerContext() if _owner == os.getpid() else before(), started)

    utils.get_mp_context = context_of_ours


def _socket_of_ours(before: Callable[[], str]) -> Callable[[], str]:
    def socket_of_ours() -> str:
        folder = getattr(_booting, "folder", "")
        return f"ipc://{folder}/{uuid4()}" if folder else before()

    return socket_of_ours


def _meet_in(folder: str) -> None:
    """This process becomes an engine, whose workers meet there."""
    from vllm import envs
    from vllm.v1.executor import uniproc_executor

    envs.VLLM_RPC_BASE_PATH = folder
    uniproc_executor.get_file_store_init_method = lambda: f"file://{folder}/vllm_dist_{uuid4().hex}"
    if has_gpu():
        end_as_workers_do()


def end_as_workers_do() -> None:
    """This process is an engine whose workers are processes of their own: where something outside ends one of them, it ends in that
    way too. By itself it would call that an error of its own."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    shutdown = MultiprocExecutor.shutdown

    def shutdown_of_ours(self: Any) -> None:
        if getattr(self, "is_failed", False) and not getattr(
            self, "shutting_down", False
        ):  # later it has ended them itself
            codes = [worker.proc.exitcode for worker in self.workers]
            if any(code is not None and not ending_of([code]).by_itself for code in codes):
                os.kill(os.getpid(), signal.SIGKILL)
        shutdown(self)

    MultiprocExecutor.shutdown = shutdown_of_ours


_boot = threading.local()
"""`devices`: the cards that engines see which this thread starts now."""
_starting = threading.Lock()


@contextmanager
def engines_see(devices: Sequence[str]) -> Iterator[None]:
    """Engines that this thread starts inside see these cards only, as CUDA calls them; none: all that this process sees."""
    _boot.devices = devices
    try:
        yield
    finally:
        _boot.devices = ()


def _cards() -> dict[str, str]:
    devices = getattr(_boot, "devices", ())
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}


def end_with(pid: int) -> None:
    """End this process as soon as the process `pid` has ended, however it did."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        select.select([watched], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="end with the server", daemon=True).start()


def _begin(kind: type[_Engine], server: int) -> _Engine:
    """Called first in a new interpreter that becomes an engine. What it unpickles next imports vLLM, for seconds."""
    end_with(server)
    engine = kind.__new__(kind)
    engine._watches = True
    return engine


class _Engine(process.BaseProcess):
    """A process that ends with the one that started it. It asks the kernel for that itself: what is set before would be tied to a
    thread of the server's (PR_SET_PDEATHSIG), and to the parent, which of a forked engine is the fork server."""

    _watches = False

    def start(self) -> None:
        self._server = os.getpid()
        self._folder = getattr(_booting, "folder", "")
        with _starting:  # a new process takes the environment that this one has at that moment
            before = {name: os.environ.get(name) for name in _cards()}
            os.environ.update(_cards())
            try:
                super().start()
            finally:
                for name, value in before.items():
                    os.environ.pop(name) if value is None else os.environ.update({name: value})

    def run(self) -> None:
        if not self._watches:
            end_with(self._server)
        if self._folder:
            _meet_in(self._folder)
        super().run()

    def __reduce__(self) -> tuple[Callable[..., _Engine], tuple[type[_Engine], int], dict[str, Any]]:
        return _begin, (type(self), self._server), self.__dict__


class _CopiedEngine(_Engine, ForkProcess):
    """A fork of this process, which is what vLLM does by itself without CUDA."""


class _SpawnedEngine(_Engine, SpawnProcess):
    """A new interpreter, which is what vLLM does by itself once CUDA is there."""


class _ForkedEngine(_Engine, ForkServerProcess):
    """It has this process's environment, and computes with as many threads as that says, not as that of the fork server did."""

    def start(self) -> None:
        self._environment = dict(os.environ) | _cards()
        super().start()

    def run(self) -> None:
        with suppress(ImportError):  # finds where the title is by the environment's place, which moves now
            import setproctitle

            setproctitle.getproctitle()
        os.environ.clear()
        os.environ.update(self._environment)
        use_threads_of_environment()
        super().run()


_KINDS: dict[str, tuple[type[Any], type[_Engine]]] = {
    "fork": (ForkContext, _CopiedEngine),
    "spawn": (SpawnContext, _SpawnedEngine),
    "forkserver": (ForkServerContext, _ForkedEngine),
}


def ending_with_us(context: Any, made: list[process.BaseProcess]) -> Any:
    """A context of multiprocessing as this one, whose processes end with this process, and are added to `made`."""
    kind, engine = _KINDS[context.get_start_method()]

    def make(*args: Any, **options: Any) -> _Engine:
        one = engine(*args, **options)
        made.append(one)
        return one

    ours = kind()
    ours.Process = make
    return ours
