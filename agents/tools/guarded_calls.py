"""The border to code of others: what a tool raises becomes data, and no tool is waited for beyond its deadline.

Used by `agents.tools.toolbox` around every call of a tool, and by `agents.tools.function_tool` for plain functions. Invariant:
nothing but a cancellation of the caller leaves `call_with_deadline`, and Ctrl-C, which only the main thread is sent. A
coroutine is cancelled at its deadline; a thread cannot be, so one that hangs is left behind, as a daemon, with its
slot. A coroutine that blocks the event loop cannot be helped.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

T = TypeVar("T")

CLEAN_UP_S = 1.0
"""What a coroutine has for its `finally` after it was cancelled."""
THREADS = 64
"""Calls of one sync function at once; a hanging one keeps its slot."""


class CaughtException:
    """`with Caught() as caught:` keeps what the block raises in `caught.error`, of any class. Ctrl-C passes, and so does
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
        return self.error is not None

    def _passes(self, error: BaseException | None) -> bool:
        if isinstance(error, asyncio.CancelledError):
            return not self._in_thread
        return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult(Generic[T]):
    """How a guarded call ended: `value`, or `error`, or neither when its deadline passed."""

    value: T | None = None
    error: BaseException | None = None
    late: bool = False


async def call_with_deadline(
    work: Callable[[], Awaitable[T] | T], *, deadline_s: float, left_behind: set[asyncio.Task[Any]]
) -> CallResult[T]:
    """Await `work()` for at most `deadline_s`. What does not even end when cancelled is put into `left_behind`."""
    task = asyncio.create_task(_caught(work))
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
        return CallResult(error=RuntimeError("the tool cancelled its own call"))
    return CallResult(late=True)


async def _caught(work: Callable[[], Awaitable[T] | T]) -> CallResult[T]:
    with CaughtException() as caught:
        value = work()  # may raise at once: a signature that does not fit
        return CallResult(value=await value if isinstance(value, Awaitable) else value)
    return CallResult(error=caught.error)


class Threads:
    """Runs blocking functions, each in a daemon thread of its own: one that hangs stops neither others nor the program's end.

    At most `limit` at once; the next one waits.
    """

    def __init__(self, limit: int = THREADS) -> None:
        self._limit = limit
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def run(self, function: Callable[[], T]) -> T:
        """The function's result, or what it raised."""
        loop = asyncio.get_running_loop()
        slots = self._slots.setdefault(loop, asyncio.Semaphore(self._limit))
        await slots.acquire()
        future: asyncio.Future[CallResult[T]] = loop.create_future()

        def settle(ended: CallResult[T]) -> None:
            slots.release()
            if not future.done():  # else its caller does not wait any more
                future.set_result(ended)

        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run, args=(_work, function, loop, settle), daemon=True, name="understudy tool"
        )
        try:
            thread.start()
        except RuntimeError:  # no more threads
            slots.release()
            raise
        ended = await future
        if ended.error is not None:
            raise ended.error
        return cast("T", ended.value)


def _work(function: Callable[[], T], loop: asyncio.AbstractEventLoop, settle: Callable[[CallResult[T]], None]) -> None:
    """The thread: runs the function, and tells the loop, if that is still there."""
    with CaughtException(in_thread=True) as caught:
        value = function()
    ended: CallResult[T] = CallResult(error=caught.error) if caught.error is not None else CallResult(value=value)
    try:
        loop.call_soon_threadsafe(settle, ended)
    except RuntimeError:  # the loop was closed before a hanging function ended
        pass
