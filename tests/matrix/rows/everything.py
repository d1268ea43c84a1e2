"""All rows of the matrix."""

from __future__ import annotations

from tests.matrix.records import Row
from tests.matrix.rows import agents, columns, engine, harbor, learner, metrics, promises, refusals, run_and_data


def all_rows() -> list[Row]:
    """In the order in which they are printed."""
    tables = (run_and_data, agents, harbor, engine, learner, columns, metrics, refusals, promises)
    return [row for table in tables for row in table.rows()]
