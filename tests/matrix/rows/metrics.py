"""Rows of the metrics."""

from __future__ import annotations

from tests.matrix.effects import moves
from tests.matrix.records import Row


def rows() -> list[Row]:
    """One for each metric of docs/metrics.md."""
    return [Row("metric reward/mean", "", "prompts", moves("reward/mean"))]
