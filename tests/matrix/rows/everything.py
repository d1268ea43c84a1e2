"""All rows of the matrix."""

from __future__ import annotations

from tests.matrix.records import Row
from tests.matrix.rows import learner, metrics


def all_rows() -> list[Row]:
    """In the order in which they are printed."""
    return [*learner.rows(), *metrics.rows()]
