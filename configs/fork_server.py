"""How a run starts processes on its own machine: engines, server processes, the learner's ranks, workers of agent loops.

They are forks of one process that has imported what takes them seconds: Python's own fork server (`multiprocessing.forkserver`),
forked of this process, which has imported all that. Started with `set_forkserver_preload` instead, it would import it once more:
7 s of a core at each start and each restart of a run. It stands here because all folders may import this one.

Invariants: such a process ends as soon as the one that started it has ended, however it did, also while it still starts; Ctrl-C of
the terminal never reaches it. It has the environment that this process has when it starts it, as a new process would. Without
`start`, and where there is a GPU (CUDA may not be forked), processes are new interpreters.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.context import (
    ForkContext,
    ForkProcess,
    ForkServerContext,
    ForkServerProcess,
    SpawnContext,
    SpawnProcess,
)
from typing import Any

from configs.child_processes import socket_folder

SOCKET_CHARS = 60
"""Most bytes of the folder of its socket."""
_owner: int | None = None
"""The process that has a fork server."""
_starting = threading.Lock()


def start() -> None:
    """Fork it of this process, which must be the main thread's, has no others, and has imported all that is needed.

    Does nothing where it cannot be done: then a process takes longer to start."""
    global _owner
    if sys.platform != "linux" or sys.version_info >= (3, 14):  # its `main` takes other arguments there
        return
    folder, owner = tempfile.mkdtemp(prefix="understudy-fork-", dir=socket_folder(SOCKET_CHARS)), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # forks inherit what is called at the end
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener, interrupts_blocked():
        server._forkserver_address = f"{folder}/listener"
        listener.bind(server._forkserver_address)
        os.chmod(server._forkserver_address, 0o600)
        listener.listen()
        alive, server._forkserver_alive_fd = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(server._forkserver_alive_fd)
            _serve(listener, alive)
        os.close(alive)
    server._forkserver_pid, _owner = pid, owner


def _serve(listener: socket.socket, alive: int) -> None:
    """Run it, in the fork, until this process and all that it forked have ended: they hold the other end of `alive`. The fork never
    returns into the caller's program."""
    code = 1
    try:
        forkserver.main(listener.detach(), alive, [])
        code = 0
    except SystemExit:
        code = 0
    finally:
        if code != 0:
            traceback.print_exc()
        os._exit(code)


def is_there() -> bool:
    """Whether this process has a fork server."""
    return _owner == os.getpid()


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Processes started inside (by this thread) never receive Ctrl-C of the terminal: it is this process that stops them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


def own_context(environment: Mapping[str, str] | None = None) -> Any:
    """The context of multiprocessing for processes of ours, which end with this one. `environment`: variables of theirs beside
    those of this process."""
    return ending_with_us(ForkServerContext() if is_there() else SpawnContext(), [], environment=environment)


def ending_with_us(
    context: Any,
    made: list[process.BaseProcess],
    *,
    environment: Mapping[str, str] | None = None,
    prepare: Callable[[], object] | None = None,
) -> Any:
    """A context of multiprocessing as this one, whose processes end with this process, and are added to `made`. `environment`: see
    `own_context`; `prepare`: called in a process before its target."""
    kind, child = _KINDS[context.get_start_method()]

    def make(*args: Any, **options: Any) -> _Child:
        one = child(*args, **options)
        one._environment, one._prepare = dict(environment or {}), prepare
        made.append(one)
        return one

    ours = kind()
    ours.Process = make
    return ours


def end_with(pid: int) -> None:
    """End this process as soon as the process `pid` has ended, however it did."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        select.select([watched], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="end with the starter", daemon=True).start()


def _begin(kind: type[_Child], starter: int) -> _Child:
    """Called first in a new interpreter that becomes a child. What it unpickles next imports vLLM, for seconds."""
    end_with(starter)
    child = kind.__new__(kind)
    child._watches = True
    return child


class _Child(process.BaseProcess):
    """A process that ends with the one that started it. It asks the kernel for that itself: what is set before would be tied to a
    thread of the starter's (PR_SET_PDEATHSIG), and to the parent, which of a forked one is the fork server."""

    _watches = False
    _environment: dict[str, str]
    _prepare: Callable[[], object] | None

    def start(self) -> None:
        self._starter = os.getpid()
        with _starting, interrupts_blocked():  # a new process takes the environment that this one has at that moment
            before = {name: os.environ.get(name) for name in self._environment}
            os.environ.update(self._environment)
            try:
                super().start()
            finally:
                for name, value in before.items():
                    os.environ.pop(name) if value is None else os.environ.update({name: value})

    def run(self) -> None:
        if not self._watches:
            end_with(self._starter)
        faulthandler.register(signal.SIGUSR1, file=2)
        if self._prepare is not None:
            self._prepare()
        super().run()

    def __reduce__(self) -> tuple[Callable[..., _Child], tuple[type[_Child], int], dict[str, Any]]:
        return _begin, (type(self), self._starter), self.__dict__


class _CopiedChild(_Child, ForkProcess):
    """A fork of this process, which is what vLLM does by itself without CUDA."""


class _SpawnedChild(_Child, SpawnProcess):
    """A new interpreter, which is what vLLM does by itself once CUDA is there."""

    def start(self) -> None:
        resource_tracker.ensure_running()  # where Python starts it, it lets interrupts through again
        super().start()


class _ForkedChild(_Child, ForkServerProcess):
    """It has this process's environment, and computes with as many threads as that says, not as that of the fork server did."""

    def start(self) -> None:
        self._all = dict(os.environ) | self._environment
        super().start()

    def run(self) -> None:
        with suppress(ImportError):  # finds where the title is by the environment's place, which moves now
            import setproctitle

            setproctitle.getproctitle()
        os.environ.clear()
        os.environ.update(self._all)
        use_threads_of_environment()
        super().run()


_KINDS: dict[str, tuple[type[Any], type[_Child]]] = {
    "fork": (ForkContext, _CopiedChild),
    "spawn": (SpawnContext, _SpawnedChild),
    "forkserver": (ForkServerContext, _ForkedChild),
}
