"""What a run leaves in its folder, which another person may have sent: read as it grows or when it is dead, within bounds.

Used by all that shows a run: `learner.page`, `learner.diagnosis`, `learner.reporting.compare`. Numbers that no float holds, NaN
and Infinity are None; errors are one line. It writes nothing, and waits for no pipe.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from buffers.disk import append, replacing
from buffers.errors import UnderstudyError

CONFIG, SUMMARY, METRICS, MACHINE, LEDGER = (
    "config.yaml", "summary.json", "metrics.jsonl", "machine.jsonl", "ledger.sqlite",
)  # fmt: skip
VERSIONS = "versions"
"""Folder of the versions that users of a live run are or were served."""
SFT_FOLDER = "sft"
"""Folder of the stage before RL, below that of its run."""
MOST_BYTES = 1 << 30
"""The largest file of lines: a million steps."""
MOST_AT_ONCE = 64 * 1024 * 1024
"""Bytes that are read of a file that grows in one go; the rest comes with the next poll."""
MOST_OBJECT_BYTES = 1 << 24
LARGEST = 1e100
"""A figure may be so large, so that its square is a number too."""
_DIGITS = 18


class DamagedFile(UnderstudyError):
    """A file of a run's folder does not hold what a run writes."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The figures of one run, live or dead."""

    folder: Path
    steps: Sequence[Mapping[str, float]]
    """Those of each step that has a reward, in order; each with `step`."""
    validations: Sequence[Mapping[str, float]]
    """Lines with figures of a validation."""
    summary: Mapping[str, Any]
    """Empty while the run is under way for the first time."""


def read_record(folder: Path, *, of_steps: Sequence[str] = ("reward/mean",)) -> RunRecord:
    """`of_steps`: figures that the line of each step has. A file that is not there is empty. Raises DamagedFile, and OSError."""
    lines = read_figures(folder / METRICS) if (folder / METRICS).is_file() else []
    return RunRecord(
        folder=folder,
        steps=[line for line in lines if all(name in line for name in of_steps)],
        validations=[line for line in lines if "val/mean" in line],
        summary=read_object(folder / SUMMARY) if (folder / SUMMARY).is_file() else {},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a poll found. `again`: the file begins anew, forget what was given before."""

    lines: list[dict[str, Any]]
    again: bool = False


class LineFile:
    """A file of JSON lines that another process appends to. Not thread-safe.

    Each whole line is given once; after the file was replaced or cut (a run that is resumed does that) all lines are given again,
    and `poll` says so. A last line without an end is left for later, and one that is no JSON object is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._offset = 0

    def poll(self) -> News:
        """The lines since the last poll; none when there is no file."""
        try:
            with open_file(self._path) as source:
                found = self._path.stat()
                file = found.st_dev, found.st_ino
                again = self._file is not None and (file != self._file or found.st_size < self._offset)
                self._file, self._offset = file, 0 if again else self._offset
                source.seek(self._offset)
                data = source.read(MOST_AT_ONCE)
        except OSError:
            return News(lines=[])
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = []
        for text in whole.split(b"\n"):
            with suppress(ValueError):
                lines.append(parsed_object(text))
        return News(lines=lines, again=again)


def open_file(path: Path) -> BinaryIO:
    """The file. Raises OSError, also for a pipe or a device, which might never answer."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file")
    return path.open("rb")


def parsed_object(text: bytes) -> dict[str, Any]:
    """The JSON object that a text is. Raises ValueError."""
    try:
        found = json.loads(text, parse_constant=lambda _: None, parse_int=_whole, parse_float=_number)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError("it is something else")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """A file that is one object. Raises DamagedFile, and OSError."""
    with open_file(path) as source:
        data = source.read(MOST_OBJECT_BYTES + 1)
    try:
        if len(data) > MOST_OBJECT_BYTES:
            raise ValueError(f"it has more than {MOST_OBJECT_BYTES} bytes")
        return parsed_object(data)
    except ValueError as error:
        raise DamagedFile(f"{path} must hold one JSON object, got one that cannot be read: {error}") from None


def read_figures(path: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, without a last one that is not complete: it is being written, or was when the run died. Raises
    DamagedFile, and OSError."""
    with open_file(path) as source:
        data = source.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise DamagedFile(f"{path} must have at most {MOST_BYTES >> 20} MiB, got more; it is damaged")
    lines = []
    for number, text in enumerate(data.split(b"\n")[:-1], 1):
        try:
            found = parsed_object(text)
        except ValueError as error:
            raise DamagedFile(f"{path} must hold a JSON object on each line, got line {number}: {error}") from None
        if isinstance(found.get("step"), int):
            lines.append(figures(found))
    return lines


def figures(line: Any) -> dict[str, float]:
    """What is a number in a line, or in an object within one; nothing where that is something else."""
    found = line.items() if isinstance(line, Mapping) else ()
    return {name: value for name, value in found if isinstance(value, int | float) and abs(value) < LARGEST}


def _whole(digits: str) -> int | None:
    return int(digits) if len(digits) <= _DIGITS else None


def _number(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


# What the machine of a run does, a line a second, in `machine.jsonl`: the last one is now, the others how it was. Written by
# `learner.pipeline`, read by `learner.page`. Invariant: the file stays below `MOST_LOG_BYTES`: when it is full every second
# line of its older part is dropped, so that it reaches back to the start, ever more coarsely. A line that cannot be written (a
# full disk) is left out; a run does not end for it.

logger = logging.getLogger(__name__)

FILE = "machine.jsonl"
MOST_LOG_BYTES = 4 * 1024 * 1024


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
            if append(self._path, line + "\n") > MOST_LOG_BYTES:
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
