"""docs/algorithms.md names every value of every enumeration of the learner, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from configs.recipes import RECIPES
from learner.algorithms.advantages import ESTIMATORS
from learner.algorithms.importance_weights import CORRECTIONS, REJECTIONS
from learner.algorithms.kl import KINDS
from learner.algorithms.losses import AGGREGATIONS
from learner.algorithms.objectives import LOSSES

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
TABLES = {
    "learner.recipe": set(RECIPES),
    "Advantages": set(ESTIMATORS),
    "Losses": set(LOSSES),
    "Aggregation": set(AGGREGATIONS),
    "learner.correction": {*CORRECTIONS, "naive"},
    "learner.rejection.kind": set(REJECTIONS),
    "KL to the reference": set(KINDS),
}
"""What stands before a table -> what its first column holds."""


@pytest.mark.parametrize("place", TABLES)
def test_every_value_has_a_line_and_every_line_a_value(place: str) -> None:
    start = PAGE.index(f"`{place}`" if "." in place else f"## {place}")
    (table,) = re.findall(r"\|---.*?\n((?:\|.*\n)+)", PAGE[start:])[:1]
    named = {name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.split("|")[1])}
    assert named == TABLES[place]


@pytest.mark.parametrize("name", LOSSES)
def test_the_bounds_of_a_loss_are_those_of_the_code(name: str) -> None:
    loss = LOSSES[name]
    start = PAGE.index("## Losses")
    (line,) = re.findall(rf"^\| `{name}` \|.*$", PAGE[start : PAGE.index("## Aggregation")], flags=re.M)
    said = [float(each) for each in re.findall(r"[\d.]+(?:e-\d+)?", line.split("|")[3])] if loss.clip else []
    assert said == [*(loss.clip or ()), *([loss.ratio_max] if loss.ratio_max else [])]


@pytest.mark.parametrize("name", [*CORRECTIONS, *REJECTIONS])
def test_the_bounds_of_a_correction_are_those_of_the_code(name: str) -> None:
    if name == "none":
        return
    own = (CORRECTIONS.get(name) or REJECTIONS[name]).bounds
    start = PAGE.index("## Corrections")
    (line,) = re.findall(rf"^\| `{name}` \|.*$", PAGE[start:], flags=re.M)
    said = [float(each) for each in re.findall(r"[\d.]+", line.split("|")[3])]
    assert said == [bound for bound in own if bound > 0.0]
