"""An object in a process of its own, whose methods are called from here: a rank of the learner, a worker of agent loops.

`ChildActor` is on this machine; `buffers.remote.ray_actor` has the one that Ray places on a node of a cluster. Used on an event
loop by `learner.training.ranks` and `agents.workers.manager`. Invariants: calls are begun in the order of their making; one whose
process dies fails with ActorDied; the process ends with this one. What goes through its pipe are pickles, which nobody else can
write: its other end is in no file system and on no network.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future as Sent
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing import Pipe, process
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import setproctitle

from buffers.debugger import stop_at
from buffers.errors import UnderstudyError

logger = logging.getLogger(__name__)

REFUSALS = ("TypeError", "ValueError", "KeyError", "AttributeError", "ImportError", "NotImplementedError")
"""What libraries raise of a configuration, beside the errors of this project."""
OOM_SCORE = "500"
"""The kernel ends such a process before the run's own where the memory of the machine is used up: another one is started."""
_MAKE = 0
"""The number of the call that makes the object."""


class ActorDied(UnderstudyError):
    """The actor's process died, or its object could not be made for a reason that another start may mend."""


class ActorRefused(UnderstudyError):
    """The object refused what it was made of, as another start would too."""


class CallFailed(UnderstudyError):
    """A method raised what is none of this project's errors."""


class Actor(ABC):
    """An object elsewhere. Its methods may be coroutines; others are called one after the other."""

    @abstractmethod
    def call(self, method: str, *arguments: Any, **options: Any) -> asyncio.Future[Any]:
        """What the method gives. Raises the UnderstudyError that it raises, CallFailed, ActorDied,
        ActorRefused. Cancelling the future of a coroutine cancels it."""

    @abstractmethod
    def ready(self) -> asyncio.Future[Any]:
        """Done once the object is made. Fails as `call` does, and once its process has died."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once."""


class ChildActor(Actor):
    """`make(*arguments, **options)` in a child of this process. `context`: of multiprocessing, which starts it
    (`configs.fork_server.own_context`), or `HERE`; `title`: of the process."""

    def __init__(self, context: Any, title: str, make: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self._title = title
        self._loop = asyncio.get_running_loop()
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._death: UnderstudyError | None = None
        self._connection, theirs = context.Pipe()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"to {title}")
        with theirs:
            self._process = context.Process(target=_main, args=(theirs, title), name=title, daemon=True)
            self._process.start()
        self.pid: int = self._process.pid
        self._made = self.call("", make, arguments, options)
        threading.Thread(target=self._read, name=f"from {title}", daemon=True).start()

    def call(self, method: str, *arguments: Any, **options: Any) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        future.add_done_callback(lambda _: future.cancelled() or future.exception())  # nobody may ask for it
        if self._death is not None:
            future.set_exception(self._death)
            return future
        number = next(self._numbers)
        self._calls[number] = future
        future.add_done_callback(partial(self._give_up, number))
        self._send(number, method, arguments, options)
        return future

    def ready(self) -> asyncio.Future[Any]:
        if self._death is None:
            return asyncio.shield(self._made)
        return self.call("")

    def kill(self) -> None:
        self._end(ActorDied(f"{self._title} was ended"))
        self._process.kill()

    async def stop(self) -> None:
        """`kill`, and wait until the process has ended."""
        self.kill()
        await asyncio.to_thread(self._process.join)

    def _send(self, *message: Any) -> None:
        """Send it, in a thread: what is large takes a while."""
        self._sender.submit(self._connection.send, message).add_done_callback(partial(self._see_sent, message[0]))

    def _see_sent(self, number: int, sent: Sent[None]) -> None:
        if not sent.cancelled() and (error := sent.exception()) is not None and not isinstance(error, OSError):
            self._tell(
                self._settle, number, None, error
            )  # arguments that cannot be sent; a broken pipe is seen by its reader

    def _give_up(self, number: int, future: asyncio.Future[Any]) -> None:
        if future.cancelled() and self._calls.pop(number, None) is not None:
            self._send(number, None, (), {})

    def _read(self) -> None:
        """Takes answers, until the process has ended."""
        try:
            with suppress(EOFError, OSError), self._connection:
                while True:
                    self._tell(self._settle, *self._connection.recv())
        finally:  # also after an answer that cannot be read, of which nothing more would come
            self._tell(self._see_end)

    def _tell(self, method: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop was closed before
            self._loop.call_soon_threadsafe(method, *arguments)

    def _settle(self, number: int, value: Any, error: BaseException | None) -> None:
        if number == _MAKE and isinstance(error, UnderstudyError):
            self._end(error)
        future = self._calls.pop(number, None)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def _see_end(self) -> None:
        self._process.kill()  # one that has ended keeps its exit code
        self._process.join()
        code = self._process.exitcode or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self._end(ActorDied(f"{self._title} ended {how}; what it said is in the run's log"))

    def _end(self, death: UnderstudyError) -> None:
        """All calls fail. The first reason is kept."""
        self._death = self._death or death
        self._sender.shutdown(wait=False)
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(self._death)


class _Task:
    """The substitute of a child: its program is a task of this process's event loop."""

    exitcode = 0

    def __init__(self, *, args: tuple[Connection, str], **_: Any) -> None:
        self._connection = Connection(os.dup(args[0].fileno()))
        self.pid = os.getpid()

    def start(self) -> None:
        self._running = asyncio.create_task(_Host(self._connection).run())
        self._running.add_done_callback(lambda _: self._connection.close())

    def kill(self) -> None:
        self._running.get_loop().call_soon_threadsafe(self._running.cancel)

    def join(self) -> None:
        """Nothing outlives it."""


HERE = SimpleNamespace(Pipe=Pipe, Process=_Task)
"""A context whose processes are tasks of this one: a debugger that stops in one has all others before it, too."""


def _main(connection: Connection, title: str) -> None:
    """The child's program: does what it is asked until the pipe ends."""
    setproctitle.setproctitle(title)
    os.setsid()  # a signal for the run's process group, or the end of its terminal, is the run's to answer
    process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children of its own
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    asyncio.run(_Host(connection).run())


class _Host:
    """The object, on the child's event loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._object: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection.fileno(), self._take)
        try:
            await self._ended.wait()
        finally:
            loop.remove_reader(self._connection.fileno())

    def _take(self) -> None:
        message = None
        try:
            with suppress(EOFError):
                message = self._connection.recv()
        finally:
            if message is None:  # also one that cannot be read: its call would never be answered
                self._ended.set()
        if message is None:
            return
        number, method, arguments, options = message
        if method is not None:
            task = self._tasks[number] = asyncio.create_task(self._answer(number, method, arguments, options))
            task.add_done_callback(lambda _: self._tasks.pop(number))
        elif (given_up := self._tasks.get(number)) is not None:
            given_up.cancel()

    async def _answer(self, number: int, method: str, arguments: Any, options: dict[str, Any]) -> None:
        """The border around one call: what it raises goes to its caller, and ends nothing else."""
        try:
            if number == _MAKE:
                make, given, named = arguments
                self._object = make(*given, **named)
                value = None
            else:
                value = getattr(self._object, method)(*arguments, **options)
                if inspect.isawaitable(value):
                    value = await value
            self._connection.send((number, value, None))
        except (SystemExit, KeyboardInterrupt):
            raise
        except asyncio.CancelledError:
            self._connection.send(
                (number, None, CallFailed("it cancelled its own call"))
            )  # read where its caller did not
        except BaseException as error:  # torch's CheckpointException is no Exception
            if not isinstance(error, UnderstudyError):
                logger.exception("%s failed", method or "the start")
                stop_at(error)
            self._connection.send((number, None, _failure(error, in_start=number == _MAKE)))
            if number == _MAKE:
                self._ended.set()


def _failure(error: BaseException, *, in_start: bool) -> UnderstudyError:
    """The error for the caller: classes of libraries may not be there, or need more than their text to be made again."""
    is_ours, name = isinstance(error, UnderstudyError), type(error).__name__
    if not in_start:
        return error if isinstance(error, UnderstudyError) else CallFailed(f"{name}: {error}")
    text = str(error) if is_ours else f"{name}: {error}"
    return (ActorRefused if is_ours or name in REFUSALS else ActorDied)(text)
