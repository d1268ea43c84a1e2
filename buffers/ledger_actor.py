"""The ledger in a process of its own: a detached Ray actor on the node that has the disk, and the handle to it.

Started by `learner.ledger_place`, used through `remote_ledger`. The actor owns the file and a `RowEndpoint`. Invariants: it never
leaves its node; when its process dies Ray starts it again there, and what was acknowledged is in the file: running episodes and
leases go on. Rounds come by the endpoint; what Ray carries (operations and their answers, between the cluster's own processes)
is in the file too, or its caller sends it again: Ray's object store is never the only place where something is.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from buffers.endpoint import STILL_S, RowEndpoint
from buffers.errors import UnderstudyError
from buffers.ledger import Ledger, News
from buffers.ledger_once import forget, once

NAMESPACE = "understudy"
OPEN_S = 30.0
"""For a process that has the file open to end."""
START_S = 120.0
IN_USE_S = 5.0
"""A ledger that nobody asked for news for so long has no user."""
_MAX_NEWS = 1024


class LedgerGone(UnderstudyError):
    """The ledger's actor has ended and is not started again."""


class AnswerLost(UnderstudyError):
    """The actor's process died before it answered; Ray starts it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One operation, as `Ledger.submit` takes it."""

    operation: Callable[..., Any]
    refusable: bool
    passing: bool
    timed: bool
    repeatable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where the ledger is now."""

    node_id: str
    address: tuple[str, int]
    """Of its endpoint."""
    pid: int
    life: str
    """Differs each time that its process was started."""
    state: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewsPage:
    """News after a place, and the place after them. `lost`: there were others, which nobody has any more."""

    news: list[News]
    place: tuple[str, int]
    lost: bool
    state: dict[str, Any]


class LedgerActor:
    """See the module. Methods run on one event loop; the ledger's writer has a thread of its own."""

    def __init__(
        self, path: Path, *, secret: bytes, host: str, drop_equal: bool, keep_running: bool, is_new: bool
    ) -> None:
        self._path = path
        self._secret = secret
        self._host = host
        self._drop_equal = drop_equal
        self._ledger: Ledger | None = None
        self._life = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._news: deque[News] = deque(maxlen=_MAX_NEWS)
        self._num_news = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._asked = time.monotonic()
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._open(keep_running=True, keep_leases=True)
        else:
            self._settings = {"keep_running": keep_running, "is_new": is_new}

    async def open(self) -> None:
        """Open the file, after the actor was made: what is wrong with it is raised here. Idempotent."""
        if self._ledger is not None:
            return
        if self._settings["is_new"] and self._path.exists():
            raise UnderstudyError(
                f"ledger {self._path} must be a new file, got one of an earlier run; go on with --resume auto, or set another "
                f"run.name"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._open(keep_running=self._settings["keep_running"], keep_leases=False)

    def _open(self, *, keep_running: bool, keep_leases: bool) -> None:
        until = time.monotonic() + OPEN_S
        while self._ledger is None:
            try:
                self._ledger = Ledger(
                    self._path, drop_equal=self._drop_equal, keep_running=keep_running, keep_leases=keep_leases
                )
            except UnderstudyError:
                # Opening waits a second for a process that has it open: one that is dying, if nobody made a mistake.
                if time.monotonic() > until or not keep_leases:
                    raise
        self._ledger.watch(self._on_news)
        self._endpoint = RowEndpoint(self._ledger, secret=self._secret, host=self._host, state=self._state)

    async def where(self) -> Where:
        return Where(
            node_id=ray.get_runtime_context().get_node_id(),
            address=self._endpoint.address,
            pid=os.getpid(),
            life=self._life,
            state=self._state(),
        )

    async def apply(self, jobs: list[Job], *, caller: str, number: int) -> tuple[list[Any], dict[str, Any]]:
        """Run operations in their order: what each answered or raised, as (answer, None) or (None, error), and the books then.
        The same number again is the same call."""
        futures = [
            asyncio.wrap_future(self._submit(job, caller=caller, number=number, place=place))
            for place, job in enumerate(jobs)
        ]
        await asyncio.wait(futures)
        outcomes = [(None, error) if (error := future.exception()) else (future.result(), None) for future in futures]
        return outcomes, self._state()

    def _submit(self, job: Job, *, caller: str, number: int, place: int) -> Future[Any]:
        operation = job.operation
        if not job.repeatable:
            operation = _Once(operation, caller=caller, number=number, place=place)
        assert self._ledger is not None
        try:
            return self._ledger.submit(operation, refusable=job.refusable, passing=job.passing, timed=job.timed)
        except UnderstudyError as error:  # closed
            refused: Future[Any] = Future()
            refused.set_exception(error)
            return refused

    async def news(self, place: tuple[str, int], *, wait_s: float) -> NewsPage:
        """What changed after `place`; waits up to `wait_s` for something."""
        self._loop = asyncio.get_running_loop()
        self._asked = time.monotonic()
        life, number = place
        self._changed.clear()
        if life == self._life and number == self._num_news:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
        with self._lock:
            end, kept = self._num_news, list(self._news)
        state = self._state()
        if life != self._life or end - number > len(kept):
            return NewsPage(news=[], place=(self._life, end), lost=True, state=state)
        return NewsPage(news=kept[len(kept) - (end - number) :], place=(self._life, end), lost=False, state=state)

    async def idle_s(self) -> float:
        """How long nobody has asked for news."""
        return time.monotonic() - self._asked

    async def forget(self, caller: str) -> None:
        """This caller has all its answers and has left."""
        if self._ledger is not None:
            with suppress(UnderstudyError):  # closed meanwhile: a few lines are left in its file
                self._ledger.submit(partial(forget, caller=caller))

    async def close(self) -> None:
        """Store what was submitted and close the file."""
        if self._ledger is not None:
            self._endpoint.close()
            await asyncio.to_thread(self._ledger.close)

    def _state(self) -> dict[str, Any]:
        """The books, numbered: a higher number is as new or newer, across restarts on this machine too."""
        assert self._ledger is not None
        with self._lock:
            return {
                "number": time.monotonic_ns(),
                "counts": self._ledger.counts(),
                "full": self._ledger.is_full,
                "room": self._ledger.has_room(),
            }

    def _on_news(self, news: News) -> None:
        """In the writer's thread."""
        with self._lock:
            self._news.append(news)
            self._num_news += 1
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._changed.set)


class _Once:
    """See `ledger_once.once`."""

    def __init__(self, operation: Callable[..., Any], **call: Any) -> None:
        self._operation = operation
        self._call = call

    def __call__(self, db: Any, **now: float) -> Any:
        return once(db, operation=partial(self._operation, **now), **self._call)


class ActorHandle:
    """The actor from another process. Raises LedgerGone when it has ended for good."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def where(self) -> Where:
        """Waits while it is being started again. Raises LedgerGone when that takes more than `START_S`, or has no end."""
        # Asking twice is asking once: Ray may repeat it, and holds it until the actor is there.
        try:
            where: Where = ray.get(self._actor.where.options(max_task_retries=-1).remote(), timeout=START_S)
        except (RayActorError, GetTimeoutError) as error:
            raise LedgerGone(
                f"the ledger's process must run, but ended for good: {error}; go on with --resume auto"
            ) from error
        return where

    def apply(
        self, jobs: list[Job], *, caller: str, number: int, while_waiting: Callable[[], None]
    ) -> tuple[list[Any], dict[str, Any]]:
        """See `LedgerActor.apply`. Raises AnswerLost: send the same again. `while_waiting` is called every second."""
        answer = self._actor.apply.remote(jobs, caller=caller, number=number)
        while True:
            try:
                outcomes: tuple[list[Any], dict[str, Any]] = self._get(answer, timeout_s=STILL_S)
                return outcomes
            except GetTimeoutError:
                while_waiting()

    def news(self, place: tuple[str, int], *, wait_s: float) -> NewsPage:
        """See `LedgerActor.news`. Raises AnswerLost."""
        page: NewsPage = self._get(self._actor.news.remote(place, wait_s=wait_s), timeout_s=None)
        return page

    def forget(self, caller: str) -> None:
        self._actor.forget.remote(caller)

    def idle_s(self) -> float:
        idle_s: float = self._get(self._actor.idle_s.options(max_task_retries=-1).remote(), timeout_s=START_S)
        return idle_s

    def open(self) -> None:
        """Raises what opening the file raises."""
        self._get(self._actor.open.options(max_task_retries=-1).remote(), timeout_s=START_S)

    def end(self) -> None:
        """Close the file and end the actor for good. Idempotent."""
        # Dead already, or so busy that its process is ended as it is: nothing acknowledged is lost.
        with suppress(UnderstudyError, GetTimeoutError):
            self._get(self._actor.close.remote(), timeout_s=OPEN_S)
        ray.kill(self._actor)
        with suppress(LedgerGone):
            self.where()  # until Ray knows that it is dead, and its name is free

    def _get(self, answer: Any, *, timeout_s: float | None) -> Any:
        try:
            return ray.get(answer, timeout=timeout_s)
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, UnderstudyError) else error) from None
        except RayActorError as error:
            raise AnswerLost(f"the ledger's process died before it answered: {error}; send the same again") from error


def start_actor(
    path: Path,
    *,
    node_id: str,
    host: str,
    secret: bytes,
    environment: Mapping[str, str],
    drop_equal: bool = False,
    keep_running: bool = False,
    is_new: bool = False,
) -> ActorHandle:
    """Start the actor of the ledger at `path` on this node; one that an earlier process left behind is ended first.

    `host`: where its endpoint listens. `environment`: of its process. `is_new`: there must be no file yet.
    Raises UnderstudyError when the ledger is in use, or cannot be opened.
    """
    _end_earlier(path, node_id=node_id)
    affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor = ray.remote(LedgerActor).options(
        name=_name(path, node_id=node_id), namespace=NAMESPACE, lifetime="detached", num_cpus=0, max_restarts=-1,
        scheduling_strategy=affinity, runtime_env={"env_vars": dict(environment)},
    ).remote(path, secret=secret, host=host, drop_equal=drop_equal, keep_running=keep_running, is_new=is_new)  # fmt: skip
    handle = ActorHandle(actor)
    try:
        handle.open()
    except UnderstudyError:
        handle.end()
        raise
    return handle


def find_actor(path: Path, *, node_id: str) -> ActorHandle:
    """The actor of the ledger at `path` on this node, for a process elsewhere in the cluster. Raises LedgerGone."""
    try:
        return ActorHandle(ray.get_actor(_name(path, node_id=node_id), namespace=NAMESPACE))
    except ValueError as error:
        raise LedgerGone(
            f"ledger {path} must have an actor on node {node_id}, got none; start its run first"
        ) from error


def _name(path: Path, *, node_id: str) -> str:
    return f"ledger {node_id} {path}"


def _end_earlier(path: Path, *, node_id: str) -> None:
    try:
        earlier = find_actor(path, node_id=node_id)
    except LedgerGone:
        return
    until = time.monotonic() + 2 * IN_USE_S
    while (idle_s := earlier.idle_s()) < IN_USE_S:
        if time.monotonic() > until:
            raise UnderstudyError(
                f"ledger {path} must have one user, got another run that has it open; end that run first"
            )
        time.sleep(IN_USE_S - idle_s)
    earlier.end()
