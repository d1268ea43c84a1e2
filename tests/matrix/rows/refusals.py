"""Rows of what a run refuses: each in one line, before anything starts."""

from __future__ import annotations

from tests.matrix.effects import refused
from tests.matrix.records import Row
from tests.matrix.scenarios.refusals import REFUSALS


def rows() -> list[Row]:
    """One for each."""
    return [Row("refused", name, name.replace(" ", "-"), refused(*words)) for name, (_, words) in REFUSALS.items()]
