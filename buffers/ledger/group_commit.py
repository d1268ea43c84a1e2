"""Commits all operations that wait for a SQLite connection as one transaction (group commit).

A thread of its own does it. The caller of an operation that is `inline` does it itself if nothing is being committed just then:
handing over to another thread and back takes as long as a small transaction. The main thread never does: a signal's handler may
raise in the midst of it.
Called by `Ledger`. Invariants: one transaction at a time; operations run in the order of `submit`; a future is done only after
the transaction that holds its operation is on disk; an operation that is refused leaves nothing behind and does not disturb its
neighbours. While the disk takes nothing, or another program holds the file, operations wait, in order, and a new try is made every
second; those that are sent again by their callers are refused with StorageFull instead. It does not know what the operations mean.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from buffers.errors import StorageFull, UnderstudyError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Operation = Callable[[sqlite3.Connection], T | UnderstudyError]
"""Runs in whichever thread commits. Raising undoes it; *returning* an error keeps what it wrote and raises in the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How an operation may be stored; declared with `@operation` where the operation is defined."""

    refusable: bool = False
    """It fails with StorageFull while the disk is full, instead of waiting: its caller sends it again."""
    transient: bool = False
    """What it writes means nothing after a crash: its future does not wait for the disk. What is stored later makes it durable."""
    repeatable: bool = False
    """It may run again when its answer was lost on the way from another process (`buffers.remote`)."""
    inline: bool = False
    """Its callers wait for it: what is queued is committed before `submit` returns, if the calling thread may."""


DEFAULT_RULES = Rules()


def operation(
    *, refusable: bool = False, transient: bool = False, repeatable: bool = False, inline: bool = False
) -> Callable[[F], F]:
    """Declare the rules of a function over the ledger's connection. Without this it has none of them."""

    def declare(function: F) -> F:
        function.rules = Rules(  # type: ignore[attr-defined]
            refusable=refusable, transient=transient, repeatable=repeatable, inline=inline
        )
        return function

    return declare


def rules_of(function: Callable[..., Any]) -> Rules:
    """What `operation` declared for this function."""
    rules: Rules = getattr(function, "rules", DEFAULT_RULES)
    return rules


# What a bad argument can raise; the caller gets it, other operations are stored. Anything else is a bug and stops the writer.
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


_MAX_WAITING = 4096
_MAX_OPERATIONS = 1024
_MAX_KEPT = 4096
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Job:
    operation: Operation[Any]
    future: Future[Any]
    rules: Rules


class GroupCommit:
    """`read_event` runs at the end of each transaction and `publish` gets its answer once the transaction is on disk, and
    whether storing works again after a full disk (`recovered`).
    `probe` opens each transaction while the disk is full: it stores enough to prove that the disk has room again."""

    def __init__(
        self,
        db: sqlite3.Connection,
        *,
        name: str,
        read_event: Callable[[sqlite3.Connection], Any],
        keep_event: Callable[[Any], None],
        publish: Callable[..., None],
        probe: Operation[Any],
    ) -> None:
        self._db = db
        self._name = name
        self._read_event = read_event
        self._keep_event = keep_event
        self._publish = publish
        self._probe = probe
        self._durable = True
        self._kept: list[_Job] = []
        self.waits_for = ""
        """Why the last transaction could not be stored, and the remedy; empty: it was stored."""
        self._current: list[_Job] = []
        self._turn = threading.Lock()
        """Held by the thread that commits; the connection is used under it."""
        self._lock = threading.Lock()
        """Guards the fields below; held for a moment only."""
        self._stirred = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._waiting: deque[_Job] = deque()
        self._is_stirred = False
        self._closed = False
        self._draining = False
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name=f"ledger-writer:{name}", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation[T], *, rules: Rules = DEFAULT_RULES) -> Future[T]:
        """Queue `operation`; blocks while the queue is full. Raises UnderstudyError after `close`."""
        job = _Job(operation, Future(), rules)
        with self._lock:
            while len(self._waiting) >= _MAX_WAITING and not self._closed:
                self._room.wait()
            if self._closed:
                raise UnderstudyError(f"ledger {self._name} must be open, got an operation after it was closed")
            self._waiting.append(job)
            if not rules.inline:
                self._stir()
        if rules.inline:
            self._commit_inline()
            if not job.future.done():
                with self._lock:
                    self._stir()
        return job.future

    def apart(self, work: Callable[[], T]) -> T:
        """Run `work` in this thread while no transaction is under way, and none begins: what SQLite does in none."""
        with self._turn:
            return work()

    def _commit_inline(self) -> None:
        """Commit what waits, if no other thread does and this one may."""
        if (
            self.waits_for
            or threading.current_thread() is threading.main_thread()
            or not self._turn.acquire(blocking=False)
        ):
            return
        self._is_broken = True
        try:
            if jobs := self._collect():
                self._commit(jobs)
            self._is_broken = False
        finally:  # a defect is the caller's to tell, and ends the thread
            with self._lock:
                if self._is_broken:
                    self._stir()
            self._turn.release()

    def close(self) -> None:
        """Commit what was submitted, then end the thread and close the connection. Idempotent."""
        with self._lock:
            self._closed = True
            self._stir()
        self._thread.join()

    def _stir(self) -> None:
        """Wake the thread, which looks for work after the present commit."""
        self._is_stirred = True
        self._stirred.notify()

    def _run(self) -> None:
        try:
            while not self._draining:
                self._wait()
                with self._turn:
                    if self._is_broken:
                        return
                    if jobs := self._collect():
                        self._commit(jobs)
        finally:
            with self._turn:
                with self._lock:  # a submitter that was inside has left; the next ones see `_closed`
                    self._closed = True
                    self._refuse_waiting()
                    self._room.notify_all()
                self._db.close()

    def _wait(self) -> None:
        """Wait until there may be something to do: an operation, or another try on a full disk."""
        with self._lock:
            self._stirred.wait_for(lambda: self._is_stirred, timeout=_RETRY_S if self.waits_for else None)
            self._is_stirred = False

    def _collect(self) -> list[_Job]:
        """All that has piled up, up to a limit."""
        jobs, self._kept = self._kept, []
        with self._lock:
            while self._waiting and len(jobs) < _MAX_OPERATIONS:
                jobs.append(self._waiting.popleft())
            self._room.notify_all()
            if self._waiting:
                self._stir()
            else:
                self._draining = self._closed
        self._current = jobs
        return jobs

    def _commit(self, jobs: list[_Job]) -> None:
        jobs = [job for job in jobs if job.future.running() or job.future.set_running_or_notify_cancel()]
        try:
            if (durable := not all(job.rules.transient for job in jobs)) != self._durable:
                self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._durable = durable
            self._db.execute("BEGIN IMMEDIATE")
            if self.waits_for:
                self._probe(self._db)
            outcomes = [self._apply(job) for job in jobs]
            event = self._read_event(self._db)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            # A full or failing disk: nothing of this transaction is stored.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._refuse(jobs, error=error)
            return
        waited, self.waits_for = bool(self.waits_for), ""
        self._keep_event(event)
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, Exception):
                job.future.set_exception(outcome)
            else:
                job.future.set_result(outcome)
        self._publish(event, recovered=waited)

    def _refuse(self, jobs: list[_Job], *, error: sqlite3.Error) -> None:
        self.waits_for = why_not_stored(error, name=self._name)
        refusal = StorageFull(
            f"ledger {self._name} could not store: {self.waits_for}, storing resumes by itself; send again later"
        )
        for job in jobs:
            if job.rules.refusable or self._draining or len(self._kept) >= _MAX_KEPT:
                job.future.set_exception(refusal)
            else:
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
        waiting = [*self._current, *self._kept, *self._waiting]
        self._waiting.clear()
        for job in waiting:
            if not job.future.done():
                job.future.set_exception(
                    UnderstudyError(f"ledger {self._name}: its writer stopped before this was stored")
                )


# Why SQLite does not store, in words, and which program holds the file where that is the reason. Holders are found among the locks
# that Linux lists; of a program in another container, or on another machine of a network file system, nothing is known.

_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_NOT_WRITABLE = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)


def is_passing(error: sqlite3.Error) -> bool:
    """Whether the same may succeed later: it is the disk's refusal, or a lock of another program."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (*_LOCKED, *_NOT_WRITABLE, sqlite3.SQLITE_FULL)


def why_not_stored(error: sqlite3.Error, *, name: str) -> str:
    """The reason, and the remedy. `name`: of the ledger's file."""
    kind = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_FULL) & 0xFF
    if kind not in _LOCKED:
        return f"{error}; free space on its disk{', or make it writable' if kind in _NOT_WRITABLE else ''}"
    found = " and ".join(f"{program} (process {pid})" for pid, program in holders(Path(name)).items())
    return f"{error}, by {found or 'a program that this system does not show'}; end its transaction there"


def holders(path: Path) -> dict[int, str]:
    """Process id -> program, of the other processes that have a lock for writing on a database."""
    inodes = set()
    for file in (path, path.with_name(f"{path.name}-shm")):
        with suppress(OSError):
            inodes.add(file.stat().st_ino)
    pids = set()
    with suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
            # 12: POSIX  ADVISORY  WRITE 4711 fd:00:1234 120 120
            words = line.split()
            if "WRITE" in words and "->" not in words and int(words[-3].rpartition(":")[2]) in inodes:
                pids.add(int(words[-4]))
    return {pid: _program(pid) for pid in sorted(pids - {os.getpid(), 0, -1})}


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return "a program"
