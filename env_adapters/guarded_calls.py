"""The border to code of others: what it raises becomes data, it is not waited for beyond its deadline, and what blocks runs in a
thread.

Used around every call of an environment (`env_adapters.adapter`) and of a tool (`agents.tools.toolbox`), and for scorers and plain
functions. Invariant: nothing but a cancellation of the caller leaves `call_with_deadline`, and Ctrl-C, which only the main thread
is sent. A coroutine is cancelled at its deadline; a thread cannot be, so one that hangs is left behind, as a daemon. A coroutine
that blocks the event loop cannot be helped.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from buffers.debugger import stop_at
from buffers.errors import UnderstudyError

T = TypeVar("T")

CLEAN_UP_S = 1.0
"""Seconds for a coroutine's `finally` after it was cancelled."""
THREADS = 64
"""Calls of one sync function at once."""


class CaughtException:
    """`with CaughtException() as caught:` keeps what the block raises in `caught.error`, of any class. Ctrl-C passes, and so does
    cancellation, unless `in_thread`: a thread cannot be cancelled, so there it is the function's own."""

    def __init__(self, *, in_thread: bool = False) -> None:
        self.error: BaseException | None = None
        self._in_thread = in_thread

    def __enter__(self) -> CaughtException:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self._passes(error):
            self.error = error
        if self.error is not None and not isinstance(self.error, UnderstudyError):
            stop_at(self.error)
        return self.error is not None

    def _passes(self, error: BaseException | None) -> bool:
        if isinstance(error, asyncio.CancelledError):
            return not self._in_thread
        return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult(Generic[T]):
    """End of a guarded call: `value`, or `error`, or neither when its deadline passed."""

    value: T | None = None
    error: BaseException | None = None
    late: bool = False


async def call_with_deadline(
    work: Callable[[], Awaitable[T] | T], *, name: str, deadline_s: float, left_behind: set[asyncio.Task[Any]]
) -> CallResult[T]:
    """Await `work()` for at most `deadline_s`. What does not even end when cancelled is put into `left_behind`."""
    task = asyncio.create_task(_caught(work), name=name)
    try:
        await asyncio.wait({task}, timeout=deadline_s)
        if task.done() and not task.cancelled():
            return task.result()
        cancelled_itself = task.done()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CLEAN_UP_S)
        if not task.done():
            left_behind.add(task)
            task.add_done_callback(left_behind.discard)
    if cancelled_itself:
        return CallResult(error=RuntimeError("it cancelled its own call"))
    return CallResult(late=True)


async def _caught(work: Callable[[], Awaitable[T] | T]) -> CallResult[T]:
    with CaughtException() as caught:
        value = work()  # may raise at once: a signature that does not fit
        return CallResult(value=await value if isinstance(value, Awaitable) else value)
    return CallResult(error=caught.error)


class WorkerThread:
    """A thread for one library object: all its calls run there, in order. Dies with the process, also while it hangs."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True if the thread has not ended yet."""
        return self._thread.is_alive()

    async def call(self, function: Callable[[], T]) -> T:
        """`function()` in the thread. Cancelling does not interrupt a call that runs; one that waits is dropped."""
        return await asyncio.wrap_future(self.submit(function))

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Begin a call without waiting for it."""
        future: Future[T] = Future()
        self._last = future
        self._calls.put((future, partial(contextvars.copy_context().run, function)))
        return future

    def finish(self) -> None:
        """The thread ends after the calls that it has."""
        self._calls.put(None)

    async def end(self, last: Callable[[], object]) -> None:
        """`last()`, and then the thread ends. Not waited for when an earlier call hangs, which is interrupted if it runs Python:
        else it would take its share of the interpreter's time for ever."""
        hangs = self._last is not None and not self._last.done()
        if hangs and self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), ctypes.py_object(SystemExit))
        call = self.submit(last)
        self.finish()
        if not hangs:
            await asyncio.wrap_future(call)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                with CaughtException(in_thread=True) as caught:
                    future.set_result(function())
                if caught.error is not None:
                    future.set_exception(_awaitable(caught.error))


def _awaitable(error: BaseException) -> Exception:
    """The error as one that can be awaited: what is no Exception (a library that calls sys.exit) would end the event loop, and a
    StopIteration never arrives."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(repr(error))


class Threads:
    """Runs blocking functions, each in a daemon thread of its own: one that hangs stops neither others nor the program's end.

    At most `limit` at once; the next one waits, and one that hangs keeps its slot.
    """

    def __init__(self, limit: int = THREADS, *, name: str = "understudy tool") -> None:
        self._limit = limit
        self._name = name
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def run(self, function: Callable[[], T]) -> T:
        """The function's result, or what it raised."""
        loop = asyncio.get_running_loop()
        slots = self._slots.setdefault(loop, asyncio.Semaphore(self._limit))
        await slots.acquire()
        try:
            thread = WorkerThread(self._name)
        except RuntimeError:  # no more threads
            slots.release()
            raise
        call = thread.submit(function)
        call.add_done_callback(
            partial(_release, slots, loop)
        )  # not before it has ended, also where nothing waits for it
        thread.finish()
        return await asyncio.wrap_future(call)


def _release(slots: asyncio.Semaphore, loop: asyncio.AbstractEventLoop, _: Future[Any]) -> None:
    with suppress(RuntimeError):  # the loop was closed before a hanging function ended
        loop.call_soon_threadsafe(slots.release)
