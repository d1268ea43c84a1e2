"""What becomes of a write that its disk does not take: the one rule, for everything that a run writes.

A disk takes nothing for now when it is full, has no inodes left, is over a quota, was mounted read-only, or fails. What a run
needs waits for it (`until_written`; the ledger by itself, `buffers.ledger.group_commit`), says so once and continues by itself.
What is only for people to look at is left out and counted (`learner.reporting.tracker.Tracker.attempt`). A file is replaced whole
(`replacing`), a line is appended whole (`append`): what did not fit leaves nothing behind. A run that starts on such a disk is
refused (`check_takes`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from buffers.errors import StorageFull

T = TypeVar("T")
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
PROBE_BYTES = 1 << 18
"""Written to find out whether a disk takes something, and the least that has to have become free for another try."""
LOOK_S = 1.0
PATIENCE = 3
"""A write that failed is tried again after so many times as long as it took, where nobody sees that space came free (a quota)."""
_IN_RUST = re.compile(r"\(os error (\d+)\)")


def why_refused(error: BaseException | None) -> str:
    """What the disk says, where an error comes of one that takes nothing for now; empty: it is another error."""
    while error is not None:
        if isinstance(error, StorageFull):
            return str(error)
        code = error.errno if isinstance(error, OSError) else None
        if code is None and (told := _IN_RUST.search(str(error))):  # safetensors
            code = int(told[1])
        if code in REFUSALS:
            return os.strerror(code)
        error = error.__cause__ or error.__context__
    return ""


def end_of(file: Path, *, chars: int) -> str:
    """The last characters of a text, at most so many, however long it is; empty where there is no such file."""
    try:
        with file.open("rb") as source:
            source.seek(max(0, source.seek(0, os.SEEK_END) - 4 * chars))
            return source.read(4 * chars).decode(errors="replace")[-chars:].strip()
    except OSError:
        return ""


def check_takes(folder: Path) -> None:
    """Writes something into `folder` and removes it. Raises OSError where the disk does not take it."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
        written = probe.write(bytes(PROBE_BYTES))
        if written is not None and written < PROBE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(probe.fileno())


async def until_taken(folder: Path, *, what: str, say: Callable[[str], object]) -> bool:
    """Waits until `folder` takes files, for `what`; makes it if it is not there. Whether that took a wait: a program that its disk
    refused may have ended of what it printed."""
    tries = 0

    def take() -> None:
        nonlocal tries
        tries += 1
        folder.mkdir(parents=True, exist_ok=True)
        check_takes(folder)

    disk = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    await until_written(partial(asyncio.to_thread, take), what=what, folder=disk, say=say)
    return tries > 1


async def until_written(
    write: Callable[[], Awaitable[T]],
    *,
    what: str,
    folder: Path,
    say: Callable[[str], object],
    gives_up: Callable[[], bool] = bool,
) -> T:
    """What `write` returns. While the disk of `folder` refuses, it is called again as soon as that takes something; it removes what
    it began. `say` gets a line at the beginning of the wait and one at its end. `gives_up`: the refusal is raised after all."""
    waits = False
    while True:
        began, before = time.monotonic(), _free(folder)
        try:
            answer = await write()
        except (OSError, StorageFull) as error:
            why = why_refused(error)
            if not why or gives_up():
                raise
            if not waits:
                say(f"{what} waits for its disk: {why}; once {folder} takes files again, it is written")
            waits = True
            refusal = error
        else:
            if waits:
                say(f"{what} is written")
            return answer
        until, refused = time.monotonic() + PATIENCE * (time.monotonic() - began), False
        while True:
            await asyncio.sleep(LOOK_S)
            if gives_up():
                raise refusal
            try:
                await asyncio.to_thread(check_takes, folder)
            except OSError:
                refused = True
                continue
            if refused or _free(folder) >= before + PROBE_BYTES or time.monotonic() > until:
                break


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place at the end of the block; of one that was not written nothing stays.

    Each process has a name of its own for it: two may write the same file at once, and the later one stays.
    """
    scratch = path.with_name(f".{path.name}.tmp.{os.getpid()}")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def append(path: Path, text: str) -> int:
    """Appends `text` as a whole or not at all; the file's bytes then. Raises OSError."""
    with path.open("ab", buffering=0) as sink:
        start = sink.seek(0, os.SEEK_END)
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[sink.write(rest) or 0 :]
        except OSError:
            with suppress(OSError):
                sink.truncate(start)
            raise
        return sink.tell()


def _free(folder: Path) -> int:
    """Bytes; 0 where nobody can tell."""
    try:
        there = os.statvfs(folder)
    except OSError:
        return 0
    return there.f_bavail * there.f_frsize
