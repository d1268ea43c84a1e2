"""One thread that owns a SQLite connection and commits whatever has piled up as one transaction (group commit).

Called by `Ledger`. Invariants: operations run in the order of `submit`; a future is done only after the transaction
that holds its operation is on disk; an operation that is refused leaves nothing behind and does not disturb its
neighbours. While the disk is full operations wait, in order, and a new try is made every second; those that somebody will
send again are refused with StorageFull instead. It does not know what the operations mean.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from buffers.errors import StorageFull, UnderstudyError

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], T | UnderstudyError]
"""Runs in the writer's thread. Raising undoes it; *returning* an error keeps what it wrote and raises in the caller."""

# What a bad argument can raise; the caller gets it, the neighbours go on. Anything else is a bug and stops the writer.
_REFUSALS = (
    UnderstudyError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
)


class Publish(Protocol):
    def __call__(self, news: Any, *, again: bool) -> None:
        """`again`: storing works again, after a full disk."""
        ...


_MAX_WAITING = 4096
_MAX_OPERATIONS = 1024
_MAX_KEPT = 4096
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Job:
    operation: Operation[Any]
    future: Future[Any]
    refusable: bool = False
    passing: bool = False


class Writer:
    """`read_news` runs at the end of each transaction and `publish` gets its answer once the transaction is on disk.
    `when_idle` runs by itself once the time that `idle_s` gives is over (None: never), if nothing else came. `probe` opens
    each transaction while the disk is full: it stores enough to show that there is room again."""

    def __init__(
        self,
        db: sqlite3.Connection,
        *,
        name: str,
        read_news: Callable[[sqlite3.Connection], Any],
        keep_news: Callable[[Any], None],
        publish: Publish,
        idle_s: Callable[[], float | None],
        when_idle: Operation[Any],
        probe: Operation[Any],
    ) -> None:
        self._db = db
        self._name = name
        self._read_news = read_news
        self._keep_news = keep_news
        self._publish = publish
        self._idle_s = idle_s
        self._when_idle = when_idle
        self._probe = probe
        self._durable = True
        self._kept: list[_Job] = []
        self.full = False
        """The last transaction could not be stored."""
        self._queue: queue.Queue[_Job | None] = queue.Queue(_MAX_WAITING)
        self._current: list[_Job] = []
        self._lock = threading.Lock()
        self._closed = False
        self._draining = False
        self._thread = threading.Thread(target=self._run, name=f"ledger-writer:{name}", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation[T], *, refusable: bool = False, passing: bool = False) -> Future[T]:
        """Queue `operation`; blocks while the queue is full. Raises UnderstudyError after `close`. `refusable`: it fails with
        StorageFull while the disk is full, instead of waiting. `passing`: what it writes means nothing after a crash, so its
        future need not wait for the disk (what is stored later makes it durable, too)."""
        job = _Job(operation, Future(), refusable, passing)
        with self._lock:
            if self._closed:
                raise UnderstudyError(f"ledger {self._name} must be open, got an operation after it was closed")
            self._queue.put(job)
        return job.future

    def close(self) -> None:
        """Commit what was submitted, then end the thread and close the connection. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while jobs := self._collect():
                self._current = jobs
                self._commit(jobs)
        finally:
            self._closed = True
            self._refuse_waiting()
            with self._lock:  # a submitter that was inside has left; the next ones see `_closed`
                self._refuse_waiting()
            self._db.close()

    def _collect(self) -> list[_Job]:
        """All that has piled up, at least one; nothing when closed and drained."""
        jobs, self._kept = self._kept, []
        if self._draining:
            return jobs
        job = self._next()
        while job is not None:
            jobs.append(job)
            if len(jobs) >= _MAX_OPERATIONS:
                return jobs
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                return jobs
        self._draining = True
        return jobs

    def _next(self) -> _Job | None:
        """The next job, or the idle one when its time has come first."""
        idle_s = self._idle_s()
        if self.full:
            idle_s = _RETRY_S
        try:
            return self._queue.get(timeout=None if idle_s is None else max(idle_s, 0.0))
        except queue.Empty:
            return _Job(self._when_idle, Future())

    def _commit(self, jobs: list[_Job]) -> None:
        jobs = [job for job in jobs if job.future.running() or job.future.set_running_or_notify_cancel()]
        try:
            self._set_durable(not all(job.passing for job in jobs))
            self._db.execute("BEGIN IMMEDIATE")
            if self.full:
                self._probe(self._db)
            outcomes = [self._apply(job) for job in jobs]
            news = self._read_news(self._db)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            # A full or failing disk: nothing of this transaction is stored.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._refuse(jobs, error=error)
            return
        was_full, self.full = self.full, False
        self._keep_news(news)
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, Exception):
                job.future.set_exception(outcome)
            else:
                job.future.set_result(outcome)
        self._publish(news, again=was_full)

    def _set_durable(self, durable: bool) -> None:
        if durable != self._durable:
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._durable = durable

    def _refuse(self, jobs: list[_Job], *, error: sqlite3.Error) -> None:
        self.full = True
        refusal = StorageFull(
            f"ledger {self._name} could not store: {error}; free space on its disk, it goes on by itself; send again later"
        )
        for job in jobs:
            if job.refusable or self._draining or len(self._kept) >= _MAX_KEPT:
                job.future.set_exception(refusal)
            elif job.operation is not self._when_idle:
                self._kept.append(job)

    def _apply(self, job: _Job) -> Any:
        self._db.execute("SAVEPOINT operation")
        try:
            outcome = job.operation(self._db)
        except _REFUSALS as error:
            self._db.execute("ROLLBACK TO operation")
            outcome = error
        self._db.execute("RELEASE operation")
        return outcome

    def _refuse_waiting(self) -> None:
        waiting = [*self._current, *self._kept]
        while True:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                waiting.append(job)
        for job in waiting:
            if not job.future.done():
                job.future.set_exception(
                    UnderstudyError(f"ledger {self._name}: its writer stopped before this was stored")
                )
