"""Rules of the rows on which the prefix tree is measured."""

import numpy as np
import pytest

from benchmarks.learner_sides import Rows, agent_rows, apart_rows, group_rows
from learner.training.tree_packing import PrefixTree


def _ratio(rows: Rows) -> float:
    ids = [row.ids for row in rows.batch().rows]
    return float(rows.lengths.sum()) / PrefixTree(ids).tokens(range(len(ids)))


def test_agents_rows_are_nine_for_each_of_eight_episodes_and_share_most() -> None:
    """At full size a row has 30,300 tokens in the mean; shorter ones share as much, but for rounding."""
    rows = agent_rows(scale=96.0)
    assert len(rows.lengths) == 72
    assert rows.lengths.mean() * 96 == pytest.approx(30_300, rel=0.05)
    assert _ratio(rows) > 5.0
    assert _ratio(agent_rows(scale=8.0)) == pytest.approx(9.5, rel=0.1)


def test_group_shares_its_prompt_and_rows_apart_nothing() -> None:
    assert _ratio(group_rows(prompt=2048, answer=256)) == pytest.approx(8 * 2304 / (2047 + 8 * 257))
    apart = apart_rows(num=16)
    assert _ratio(apart) == 1.0 and len(np.unique(apart.groups)) == 2
