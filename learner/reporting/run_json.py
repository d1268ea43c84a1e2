"""JSON of a run's folder, which another person may have sent: read without waiting and within bounds, errors in one line.

Used by all that shows a run: `learner.page`, `learner.diagnosis`, `learner.reporting.compare`. Numbers that no float holds, NaN
and Infinity are None. It writes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from buffers.errors import UnderstudyError

MOST_BYTES = 1 << 30
"""The largest file of lines: a million steps."""
MOST_OBJECT_BYTES = 1 << 24
LARGEST = 1e100
"""A figure may be so large, so that its square is a number too."""
_DIGITS = 18


class DamagedFile(UnderstudyError):
    """A file of a run's folder does not hold what a run writes."""


def open_file(path: Path) -> BinaryIO:
    """The file. Raises OSError, also for a pipe or a device, which might never answer."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file")
    return path.open("rb")


def parsed(text: bytes) -> Any:
    """The value that a text is. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=lambda _: None, parse_int=_whole, parse_float=_number)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_object(path: Path) -> dict[str, Any]:
    """A file that is one object. Raises DamagedFile, and OSError."""
    with open_file(path) as source:
        data = source.read(MOST_OBJECT_BYTES + 1)
    try:
        if len(data) > MOST_OBJECT_BYTES:
            raise ValueError(f"it has more than {MOST_OBJECT_BYTES} bytes")
        found = parsed(data)
        if not isinstance(found, dict):
            raise ValueError("it is something else")
    except ValueError as error:
        raise DamagedFile(f"{path} must hold one JSON object, got one that cannot be read: {error}") from None
    return found


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
            found = parsed(text)
            if not isinstance(found, dict):
                raise ValueError("it is something else")
        except ValueError as error:
            raise DamagedFile(f"{path} must hold a JSON object on each line, got line {number}: {error}") from None
        if isinstance(found.get("step"), int):
            lines.append(figures(found))
    return lines


def figures(line: Mapping[str, Any]) -> dict[str, float]:
    """What is a number in a line."""
    return {name: value for name, value in line.items() if isinstance(value, int | float) and abs(value) < LARGEST}


def _whole(digits: str) -> int | None:
    return int(digits) if len(digits) <= _DIGITS else None


def _number(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None
