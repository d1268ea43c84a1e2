"""What the machine of a run does, a line a second, in `machine.jsonl`: the last one is now, the others how it was.

Written by `learner.pipeline`, read by `learner.page`. Invariant: the file stays below `MOST_BYTES`: when it is full every second
line of its older part is dropped, so that it reaches back to the start, ever more coarsely. A line that cannot be written (a full
disk) is left out; a run does not end for it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from buffers.disk import append, replacing

logger = logging.getLogger(__name__)

FILE = "machine.jsonl"
MOST_BYTES = 4 * 1024 * 1024


def began_s(pid: int) -> float:
    """Seconds from the machine's start to that of this process: with its id it names one, however clocks are set. Raises
    psutil.Error."""
    return float(psutil.Process(pid).create_time() - psutil.boot_time())


class MachineLog:
    """Appends to the file of a run's folder. `clock`: seconds since 1970, for people; `timer`: seconds that no clock changes."""

    def __init__(
        self, folder: Path, *, clock: Callable[[], float] = time.time, timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = folder / FILE
        self._clock, self._timer, self._made_at = clock, timer, timer()
        self._who = {"pid": os.getpid(), "host": socket.gethostname(), "began": began_s(os.getpid())}
        self._is_failing = False

    def earlier_s(self) -> float:
        """Seconds that earlier processes of the run have taken, each until its last line."""
        ends: dict[tuple[object, object], float] = {}
        for text in self._path.read_bytes().splitlines() if self._path.is_file() else ():
            with suppress(ValueError, KeyError, TypeError):  # a line that a kill or a full disk has cut
                line = json.loads(text)
                ends[line["pid"], line["began"]] = float(line["took_s"])
        ends.pop((self._who["pid"], self._who["began"]), None)
        return sum(ends.values())

    def write(self, state: Mapping[str, Any]) -> None:
        """Add a line with the time, the process, and for how long that runs."""
        times = {"at": round(self._clock(), 3), "took_s": round(self._timer() - self._made_at, 3)}
        line = json.dumps({**times, **self._who, **state}, separators=(",", ":"))
        try:
            if append(self._path, line + "\n") > MOST_BYTES:
                self._thin()
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                logger.warning("%s cannot be written: %s; the page shows no machine meanwhile", self._path, error)
            self._is_failing = True

    def _thin(self) -> None:
        lines = self._path.read_bytes().splitlines(keepends=True)
        older = 3 * len(lines) // 4
        lines = lines[:older:2] + lines[older:]
        with replacing(self._path) as scratch:
            scratch.write_bytes(b"".join(lines))
