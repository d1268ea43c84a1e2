"""`LedgerReader`: a ledger's file for those who only read, in another process than its owner and from several threads.

Used by `learner.page`, by `buffers.ledger.cli` and by diagnosis. Invariants: nothing of the ledger's file changes (`mode=ro`); no
read lasts longer than its block, so that the owner can move what it wrote into the file. A ledger that cannot be read raises
`LedgerUnreadable`.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from buffers.errors import UnderstudyError
from buffers.ledger.schema import UNREADABLE, bounded, read_database

Connection = sqlite3.Connection


_NOTES = """
PRAGMA mmap_size = 0;
PRAGMA temp_store = MEMORY;
CREATE TEMP TABLE agent(task INTEGER PRIMARY KEY, task_id TEXT NOT NULL UNIQUE, name TEXT);
CREATE TEMP TABLE looked(seq INTEGER PRIMARY KEY, num_rounds INTEGER, is_final INTEGER, causes INTEGER, cut INTEGER);
"""
"""What `episode_views` finds out beside the ledger is in memory, and of this connection only."""


class LedgerUnreadable(UnderstudyError):
    """There is no ledger here, or it cannot be read."""


class LedgerReader:
    """One connection; `read` gives it to one thread at a time. `leave_no_trace`: as in `read_database`."""

    def __init__(self, path: Path, *, leave_no_trace: bool = False) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file = _identity(path)
        try:
            self._db = read_database(path, any_thread=True, leave_no_trace=leave_no_trace)
        except UnderstudyError as error:
            raise LedgerUnreadable(str(error)) from error
        self._db.executescript(_NOTES)

    @property
    def is_replaced(self) -> bool:
        """Another file lies at the path now: that of a new run of the same name."""
        try:
            return _identity(self.path) != self._file
        except LedgerUnreadable:
            return True

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """The connection, for a block that sees one commit of the owner. Raises LedgerUnreadable."""
        with self._lock:
            try:
                with bounded(self._db, path=self.path):
                    self._db.execute("BEGIN")
                    try:
                        yield self._db
                    finally:
                        self._db.execute("COMMIT")
            except UNREADABLE as error:
                raise LedgerUnreadable(
                    f"ledger {self.path} must be readable, got: {error}; look at it with `understudy ledger doctor`"
                ) from error

    def data_version(self) -> int:
        """A number that changes when the owner has committed something."""
        with self._lock:
            try:
                (version,) = self._db.execute("PRAGMA data_version").fetchone()
            except sqlite3.Error as error:
                raise LedgerUnreadable(f"ledger {self.path} must be readable, got: {error}; try again") from error
            return int(version)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._db.close()


def _identity(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise LedgerUnreadable(f"ledger {path} must be a file that can be read: {error.strerror}") from error
    return found.st_dev, found.st_ino


def counts(db: sqlite3.Connection) -> dict[str, int]:
    """Number of groups and episodes in each state, of failures and evictions by reason, of rounds and tokens."""
    return dict(db.execute("SELECT name, n FROM counter").fetchall())


def trained_steps(db: sqlite3.Connection) -> tuple[int, int]:
    """Steps trained in the lineage that counts, and the number of lineages."""
    (version,) = db.execute(
        "SELECT coalesce((SELECT max(step) FROM step WHERE lineage = (SELECT max(lineage) FROM lineage)), "
        "(SELECT max(step) FROM lineage WHERE lineage = (SELECT max(lineage) FROM lineage)))"
    ).fetchone()
    (lineages,) = db.execute("SELECT count(*) FROM lineage").fetchone()
    return int(version), int(lineages)
