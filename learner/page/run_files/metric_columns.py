"""The figures of a run's steps as columns, and as many points of them as a screen has.

Used by `learner.page.run_view`. Lines of one step are one row; a figure that a step lacks is nan. Pure memory, no files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from learner.reporting.run_json import figures

Column = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Columns of so many points. `low` and `high` are the spread within a bucket of several steps."""

    num_steps: int
    bucket: int
    step: list[int]
    columns: dict[str, list[float | None]]
    low: dict[str, list[float | None]]
    high: dict[str, list[float | None]]


class MetricColumns:
    """Grows by `add`. Not thread-safe."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._columns: dict[str, Column] = {}

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
        column = self._columns.get(name)
        if column is None:
            return None
        known = np.flatnonzero(np.isfinite(column[: len(self._steps)]))
        return float(column[known[-1]]) if len(known) else None

    def clear(self) -> None:
        """Forget all."""
        self._steps.clear()
        self._columns.clear()

    def add(self, line: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl."""
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            return
        if not self._steps or step != self._steps[-1]:
            self._steps.append(step)
        row = len(self._steps) - 1
        for name, value in figures(line).items():
            if name != "step":
                self._room(name, row)[row] = value

    def _room(self, name: str, row: int) -> Column:
        column = self._columns.get(name)
        if column is None or row >= len(column):
            grown = np.full(max(64, 2 * row + 2), np.nan)
            if column is not None:
                grown[: len(column)] = column
            self._columns[name] = column = grown
        return column

    def points(self, names: Sequence[str] | None, *, first: int | None, last: int | None, most: int) -> Points:
        """The steps from `first` to `last`, in at most `most` points. `names`: None: all."""
        steps = np.array(self._steps, dtype=np.int64)
        keep = np.ones(len(steps), bool)
        if first is not None:
            keep &= steps >= first
        if last is not None:
            keep &= steps <= last
        rows = np.flatnonzero(keep)
        bucket = max(1, math.ceil(len(rows) / max(most, 1)))
        ends = [*range(bucket - 1, len(rows), bucket), *([len(rows) - 1] if len(rows) % bucket else [])]
        points = Points(
            num_steps=len(rows),
            bucket=bucket,
            step=steps[rows[ends]].tolist() if ends else [],
            columns={},
            low={},
            high={},
        )
        for name in self.names if names is None else names:
            if name in self._columns:
                column = self._columns[name]
                values = column[rows] if not len(rows) or rows[-1] < len(column) else _longer(column, rows)
                _reduce(points, name, values)
        return points


def _longer(column: Column, rows: npt.NDArray[np.int64]) -> Column:
    """The column's values at these rows, nan beyond its end."""
    padded = np.full(int(rows[-1]) + 1, np.nan)
    padded[: len(column)] = column
    return padded[rows]


def _reduce(points: Points, name: str, values: Column) -> None:
    if points.bucket == 1:
        points.columns[name] = plain(values)
        return
    padded = np.full(len(points.step) * points.bucket, np.nan)
    padded[: len(values)] = values
    table = padded.reshape(-1, points.bucket)
    known = np.isfinite(table)
    number = known.sum(axis=1)
    mean = np.where(number > 0, np.where(known, table, 0.0).sum(axis=1) / np.maximum(number, 1), np.nan)
    points.columns[name] = plain(mean)
    points.low[name] = plain(np.where(number > 0, np.where(known, table, np.inf).min(axis=1), np.nan))
    points.high[name] = plain(np.where(number > 0, np.where(known, table, -np.inf).max(axis=1), np.nan))


def plain(values: npt.NDArray[np.floating[Any]]) -> list[float | None]:
    """The values as JSON has numbers: six significant digits, None for what is none."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
