"""The process that owns a ledger for others: its file, its endpoint for rows, and what `remote_ledger` asks of it.

Plain, on one event loop; `ray_actor` makes a Ray actor of it. Invariants: operations are applied in the order in which
`apply` gets them; a call that comes again is answered again; a caller that misses events learns that. Rounds come by
the endpoint.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from buffers.errors import UnderstudyError
from buffers.ledger.group_commit import Rules
from buffers.ledger.idempotency import forget, idempotent
from buffers.ledger.ledger import Ledger, LedgerEvent
from buffers.remote.round_socket import RoundServer

OPEN_S = 30.0
"""Seconds for a process that has the file open to end."""
_MAX_EVENTS = 1024


class LedgerGone(UnderstudyError):
    """The ledger's actor has ended and is not started again."""


class AnswerLost(UnderstudyError):
    """The actor's process died before it answered; Ray starts it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One operation, as `Ledger.run` takes it."""

    operation: Callable[..., Any]
    rules: Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAddress:
    """The ledger's present process and addresses."""

    node_id: str
    address: tuple[str, int]
    """Host and port of the round socket."""
    pid: int
    cursor: tuple[str, int]
    """Position in the events: (id of the process's start, number of events so far)."""
    state: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """Events after a cursor, and the cursor after them. `lost`: earlier ones are no longer kept."""

    events: list[LedgerEvent]
    cursor: tuple[str, int]
    lost: bool
    state: dict[str, Any]


class LedgerHost:
    """See the module. `host`: where its endpoint listens. `is_new`: there must be no file yet. `again`: the process before died,
    those who use the ledger live."""

    def __init__(
        self,
        path: Path,
        *,
        secret: bytes,
        host: str,
        drop_zero_variance: bool = False,
        resume_episodes: bool = False,
        is_new: bool = False,
        node_id: str = "",
        again: bool = False,
    ) -> None:
        self._path = path
        self._node_id = node_id
        self._secret = secret
        self._host = host
        self._drop_equal = drop_zero_variance
        self._ledger: Ledger | None = None
        self._life = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._events: deque[LedgerEvent] = deque(maxlen=_MAX_EVENTS)
        self._num_events = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._asked_at = time.monotonic()
        self._closed = False
        if again:
            self._open(resume_episodes=True, keep_leases=True)
        else:
            self._settings = {"resume_episodes": resume_episodes, "is_new": is_new}

    async def open(self) -> None:
        """Open the file, once this is made: what is wrong with it is raised here. Idempotent."""
        if self._ledger is not None:
            return
        if self._settings["is_new"] and self._path.exists():
            raise UnderstudyError(
                f"ledger {self._path} must be a new file, got one of an earlier run; resume with --resume auto, or set another "
                f"run.name"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._open(resume_episodes=self._settings["resume_episodes"], keep_leases=False)

    def _open(self, *, resume_episodes: bool, keep_leases: bool) -> None:
        until = time.monotonic() + OPEN_S
        while self._ledger is None:
            try:
                self._ledger = Ledger(
                    self._path,
                    drop_zero_variance=self._drop_equal,
                    resume_episodes=resume_episodes,
                    keep_leases=keep_leases,
                )
            except UnderstudyError:
                # Opening waits a second for a process that has it open, which usually is one that is dying.
                if time.monotonic() > until or not keep_leases:
                    raise
        self._ledger.watch(self._on_event)
        if not keep_leases:
            self._ledger.run(partial(forget, caller="*"))  # those callers have ended
        self._endpoint = RoundServer(self._ledger, secret=self._secret, host=self._host, state=self._state)

    async def where(self) -> LedgerAddress:
        return LedgerAddress(
            node_id=self._node_id,
            address=self._endpoint.address,
            pid=os.getpid(),
            cursor=(self._life, self._num_events),
            state=self._state(),
        )

    async def apply(self, jobs: list[Job], *, caller: str, number: int) -> tuple[list[Any], dict[str, Any]]:
        """Run operations in their order: what each answered or raised, as (answer, None) or (None, error), and the counts then.
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
        if not job.rules.repeatable:
            operation = _Once(operation, caller=caller, number=number, place=place)
        assert self._ledger is not None
        try:
            return self._ledger.run(operation, rules=job.rules)
        except UnderstudyError as error:  # closed
            refused: Future[Any] = Future()
            refused.set_exception(error)
            return refused

    async def events(self, cursor: tuple[str, int], *, wait_s: float) -> EventPage:
        """The events after `cursor`; waits up to `wait_s` for something. Raises UnderstudyError once it is closed."""
        self._loop = asyncio.get_running_loop()
        self._asked_at = time.monotonic()
        life, number = cursor
        self._changed.clear()
        if life == self._life and number == self._num_events:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
        if self._closed:
            raise UnderstudyError(f"ledger {self._path} must be open, got a request for events after it was closed")
        with self._lock:
            end, kept = self._num_events, list(self._events)
        state = self._state()
        if life != self._life or end - number > len(kept):
            return EventPage(events=[], cursor=(self._life, end), lost=True, state=state)
        return EventPage(events=kept[len(kept) - (end - number) :], cursor=(self._life, end), lost=False, state=state)

    async def idle_s(self) -> float:
        """Seconds since the last request for events."""
        return time.monotonic() - self._asked_at

    async def forget(self, caller: str) -> None:
        """This caller has all its answers and has left."""
        if self._ledger is not None:
            with suppress(UnderstudyError):  # closed meanwhile: a few lines are left in its file
                self._ledger.run(partial(forget, caller=caller))

    async def close(self) -> None:
        """Store what was submitted and close the file."""
        self._closed = True
        self._changed.set()
        if self._ledger is not None:
            self._endpoint.close()
            await asyncio.to_thread(self._ledger.close)

    def _state(self) -> dict[str, Any]:
        """The counts, numbered: a higher number is as new or newer, across restarts on this machine too."""
        assert self._ledger is not None
        with self._lock:
            return {
                "number": time.monotonic_ns(),
                "counts": self._ledger.counts(),
                "full": self._ledger.is_full,
                "room": self._ledger.has_room(),
            }

    def _on_event(self, event: LedgerEvent) -> None:
        """Called in the thread that committed."""
        with self._lock:
            self._events.append(event)
            self._num_events += 1
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._changed.set)


class _Once:
    """See `idempotency.once`."""

    def __init__(self, operation: Callable[..., Any], **call: Any) -> None:
        self._operation = operation
        self._call = call

    def __call__(self, db: Any, **now: float) -> Any:
        return idempotent(db, operation=partial(self._operation, **now), **self._call)
