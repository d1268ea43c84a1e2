"""Why SQLite does not store, in words, and which program holds the file where that is the reason.

Used by the ledger's writer (`buffers.ledger.group_commit`) and where a file is opened. Holders are found among the locks that Linux
lists; of a program in another container, or on another machine of a network file system, nothing is known. It only looks.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path

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
