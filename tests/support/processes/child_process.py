"""Child processes of tests: whatever happens to the test, none outlives it, and nobody waits for one without a limit."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

CHUNK_BYTES = 1 << 16


@contextmanager
def child_process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """As `Popen`, in text, with its output to be read. Leaving the block kills it: `Popen` alone would wait for it for ever."""
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def gone(pid: int, *, within_s: float = 20.0) -> bool:
    """Whether the process has ended, or does so within this time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


class Lines:
    """The lines that come out of a pipe, as they come. Nobody else reads from it."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._rest = b""
        self.ended = False

    def next(self, *, until: float) -> str | None:
        """The next line with its end; None when there is none before `until` (of `time.monotonic`), or none any more.

        What a process wrote of a line when it died is never given out.
        """
        while b"\n" not in self._rest:
            left_s = max(0.0, until - time.monotonic())
            if self.ended or not select.select([self._pipe], [], [], left_s)[0]:
                return None
            chunk = os.read(self._pipe, CHUNK_BYTES)
            self.ended = not chunk
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode() + "\n"


def end_with_thread(failure: threading.ExceptHookArgs) -> None:
    """A `threading.excepthook`. A process that says nothing more would be waited for: it ends instead, and the test sees why."""
    traceback.print_exception(failure.exc_value)
    sys.stderr.flush()
    os._exit(1)
