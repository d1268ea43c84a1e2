"""A file of JSON lines that another process appends to, read as it grows.

Used by `learner.page.run_view` for metrics.jsonl and machine.jsonl. Invariant: each whole line is given once; after the file was
replaced or cut (a run that is resumed does that) all lines are given again, and `poll` says so. A last line without an end is left
for later, and one that is no JSON object is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.reporting.run_json import open_file, parsed

MOST_AT_ONCE = 64 * 1024 * 1024
"""Bytes that are read in one go; the rest comes with the next poll."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a poll found. `again`: the file begins anew, forget what was given before."""

    lines: list[dict[str, Any]]
    again: bool = False


class LineFile:
    """Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._offset = 0

    def poll(self) -> News:
        """The lines since the last poll; none when there is no file."""
        try:
            with open_file(self._path) as source:
                found = self._path.stat()
                again = self._file is not None and (
                    (found.st_dev, found.st_ino) != self._file or found.st_size < self._offset
                )
                if again:
                    self._offset = 0
                self._file = (found.st_dev, found.st_ino)
                source.seek(self._offset)
                data = source.read(MOST_AT_ONCE)
        except OSError:
            return News(lines=[])
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return News(lines=[line for text in whole.split(b"\n") if (line := _object(text)) is not None], again=again)


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        line = parsed(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
