"""`EnvAdapter`: an environment that is played with messages; and `WithDeadlines`, which gives each of its calls a
deadline.

`agents.loops.env_agent` plays adapters; `env_adapters.catalog` makes them by name. One adapter is one episode's: it is
reset once, stepped until it says done, asked for its score, and closed. Invariants of `WithDeadlines`, whatever is
inside it: no call takes longer than its deadline; every failure is an `EnvError` with a short reason; what comes out is
checked (messages with a role and a text, a finite score). A library that blocks runs in an `WorkerThread`, one for each
adapter, so that a call that hangs delays no other. It does not generate, and it knows no tokens.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, TypeVar

from buffers.errors import EnvError
from buffers.records import Task

Message = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an action led to."""

    messages: list[Message]
    """What the environment says next, each with `role` and `content`; may be empty when it is done."""
    done: bool
    reward: float | None = None
    """The part of the episode's `score` that this step earned, where the environment has one: answers after it are not credited
    with it."""


class EnvAdapter(ABC):
    """One episode of an environment."""

    @abstractmethod
    async def reset(self, task: dict[str, Any], *, seed: int) -> list[Message]:
        """The first messages. `task`: as `Task.private()`, with the ground truth. Equal seeds give equal starts."""

    @abstractmethod
    async def step(self, action: str) -> Step:
        """What the model's text leads to. A text that is no action is answered with a message, not with an error."""

    @abstractmethod
    async def score(self) -> float:
        """The episode's score; may be asked before the end, when a limit cut the episode short."""

    async def close(self) -> None:
        """Give back what the episode holds. Called once, also after a failure."""
        return


def task_of(task: dict[str, Any]) -> Task:
    """The record of a task as an adapter gets it; keys that no column has are left out."""
    names = {field.name for field in fields(Task)}
    return Task(**{name: value for name, value in task.items() if name in names})


def user(text: str) -> Message:
    """A message of the environment, as a model sees it."""
    return {"role": "user", "content": text}


class WithDeadlines(EnvAdapter):
    """An adapter whose calls end within `deadline_s`, with a checked answer or an EnvError.

    After a call that failed or was given up, nothing but `close` is passed on: the environment's state is unknown.
    """

    def __init__(self, adapter: EnvAdapter, *, deadline_s: float) -> None:
        self._adapter = adapter
        self._deadline_s = deadline_s
        self._broken = ""
        self._given_up: set[asyncio.Task[Any]] = set()

    async def reset(self, task: dict[str, Any], *, seed: int) -> list[Message]:
        messages = await self._call("reset", self._adapter.reset(task, seed=seed))
        return self._checked(messages, name="reset", least=1)

    async def step(self, action: str) -> Step:
        step = await self._call("step", self._adapter.step(action))
        if not isinstance(step, Step):
            raise self._failure("step", f"must give a Step, got {step!r:.100}", what="wrong answer")
        self._checked(step.messages, name="step", least=0 if step.done else 1)
        return step

    async def score(self) -> float:
        score = await self._call("score", self._adapter.score())
        if isinstance(score, bool | int | float) and math.isfinite(score):
            return float(score)
        raise self._failure("score", f"must give a finite number, got {score!r:.100}", what="wrong answer")

    async def close(self) -> None:
        """See `Adapter.close`; it may follow a failure."""
        self._broken = ""
        await self._call("close", self._adapter.close())

    async def _call(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """`work` in a task of its own: whatever it raises stays there, and giving it up does not wait for it."""
        if self._broken:
            work.close()
            raise EnvError(f"{name} must not follow a failure ({self._broken}); close it", reason=self._broken)
        task = asyncio.create_task(work, name=f"environment {name}")
        try:
            await asyncio.wait({task}, timeout=self._deadline_s)
        finally:
            if not task.done():
                self._broken = f"environment {name}: deadline"
                self._give_up(task)
        if not task.done():
            raise self._failure(name, f"must answer within {self._deadline_s:g} s, it did not", what="deadline")
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return task.result()
        if isinstance(error, EnvError):
            self._broken = error.reason
            raise error
        what = type(error).__name__
        words = " ".join(str(error).split())  # an error is one line
        raise self._failure(name, f"must not raise, got {what}: {words:.300}", what=what) from error

    def _give_up(self, task: asyncio.Task[Any]) -> None:
        self._given_up.add(task)  # asyncio itself holds tasks weakly
        task.add_done_callback(self._forget)
        task.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._given_up.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen: nothing waits for it

    def _failure(self, name: str, complaint: str, *, what: str) -> EnvError:
        kind = type(self._adapter).__name__
        self._broken = f"environment {name}: {what}"
        return EnvError(f"{name} of {kind} {complaint}; the episode ends", reason=self._broken)

    def _checked(self, messages: object, *, name: str, least: int) -> list[Message]:
        good = isinstance(messages, list) and len(messages) >= least and all(_is_message(one) for one in messages)
        if not good:
            rule = f"must give {'' if least == 0 else 'at least one of '}messages with a role and a text"
            raise self._failure(name, f"{rule}, got {messages!r:.100}", what="wrong answer")
        assert isinstance(messages, list)
        return messages


def _is_message(one: object) -> bool:
    return isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)


def with_deadlines(adapter: EnvAdapter, *, deadline_s: float) -> WithDeadlines:
    """The adapter with a deadline for each call."""
    return WithDeadlines(adapter, deadline_s=deadline_s)


class WorkerThread:
    """A thread for one library object: all its calls run there, in order. Dies with the process, also while it hangs."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread has not ended yet."""
        return self._thread.is_alive()

    async def call(self, function: Callable[[], T]) -> T:
        """`function()` in the thread. Cancelling does not interrupt a call that runs; one that waits is dropped."""
        future: Future[T] = Future()
        self._last = future
        self._calls.put((future, function))
        return await asyncio.wrap_future(future)

    async def end(self, last: Callable[[], object]) -> None:
        """`last()`, and then the thread ends. Not waited for when an earlier call hangs."""
        hangs = self._last is not None and not self._last.done()
        call: Future[object] = Future()
        self._calls.put((call, last))
        self._calls.put(None)
        if not hangs:
            await asyncio.wrap_future(call)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                with _Outcome(future):
                    future.set_result(function())


class _Outcome:
    """What is raised inside goes to the future, where it is awaited: the border at which a library's failure becomes data."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if error is None:
            return False
        # What is no Exception (a library that calls sys.exit) would end the event loop that awaits it.
        self._future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        return True
