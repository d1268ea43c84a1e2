"""The figures of a run's steps as columns, as many points of them as a screen has, and what each figure is.

Used by `learner.page.run_view`. Lines of one step are one row; a figure that a step lacks is nan.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from learner.reporting.run_record import figures

METRICS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
_NAME = re.compile(r"`([\w/.-]+/[\w/.<>-]+)`")
_CELLS = 4
"""The cells of a row: names, unit, meaning, what is healthy."""
Column = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Columns of so many points. `low` and `high` are the spread within a bucket of several steps."""

    num_steps: int
    bucket: int
    step: list[int]
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    low: dict[str, list[float | None]] = field(default_factory=dict)
    high: dict[str, list[float | None]] = field(default_factory=dict)


class MetricColumns:
    """Grows by `add`. Not thread-safe."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        """Each as long as its last value needs."""

    @property
    def names(self) -> list[str]:
        """All figures in order of the alphabet."""
        return sorted(self._columns)

    @property
    def last_step(self) -> int:
        """0 before the first."""
        return self._steps[-1] if self._steps else 0

    def last(self, name: str) -> float | None:
        """The last value of a figure of a step."""
        return next((value for value in reversed(self._columns.get(name, ())) if math.isfinite(value)), None)

    def add(self, line: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl."""
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            return
        if not self._steps or step != self._steps[-1]:
            self._steps.append(step)
        for name, value in figures(line).items():
            if name != "step":
                column = self._columns.setdefault(name, array("d"))
                column.extend(repeat(math.nan, len(self._steps) - len(column)))
                column[-1] = value

    def points(self, names: Sequence[str] | None, *, first: int | None, last: int | None, most: int) -> Points:
        """The steps from `first` to `last`, in at most `most` points. `names`: None: all."""
        steps = np.array(self._steps, dtype=np.int64)
        keep = np.ones(len(steps), bool)
        if first is not None:
            keep &= steps >= first
        if last is not None:
            keep &= steps <= last
        steps = steps[keep]
        bucket = max(1, math.ceil(len(steps) / max(most, 1)))
        shown = steps[bucket - 1 :: bucket].tolist() + (steps[-1:].tolist() if len(steps) % bucket else [])
        points = Points(num_steps=len(steps), bucket=bucket, step=shown)
        for name in self.names if names is None else names:
            if name in self._columns:
                column = np.full(len(keep), np.nan)
                column[: len(self._columns[name])] = self._columns[name]
                _reduce(points, name, column[keep])
        return points


def _reduce(points: Points, name: str, values: Column) -> None:
    if points.bucket == 1:
        points.columns[name] = plain(values)
        return
    padded = np.full(len(points.step) * points.bucket, np.nan)
    padded[: len(values)] = values
    table = padded.reshape(-1, points.bucket)
    known = np.isfinite(table)
    number = known.sum(axis=1)
    for columns, found in (
        (points.columns, np.where(known, table, 0.0).sum(axis=1) / np.maximum(number, 1)),
        (points.low, np.where(known, table, np.inf).min(axis=1)),
        (points.high, np.where(known, table, -np.inf).max(axis=1)),
    ):
        columns[name] = plain(np.where(number > 0, found, np.nan))


def plain(values: npt.NDArray[np.floating[Any]]) -> list[float | None]:
    """The values as JSON has numbers: six significant digits, None for what is none."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def meanings(file: Path = METRICS_PAGE) -> dict[str, str]:
    """Figure -> sentence, of the tables of docs/metrics.md; an installed package has no documents, where nothing is said."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) >= _CELLS - 1:
            unit, meaning, healthy = [*cells[1:], ""][:3]
            said = f"{meaning} ({unit})" + (f"; healthy: {healthy.strip(' |')}" if healthy.strip(" |") else "")
            for name in _NAME.findall(cells[0]):
                found.setdefault(name, said.replace("`", ""))
    return found
