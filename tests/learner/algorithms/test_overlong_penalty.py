"""Rules of learner/algorithms/overlong_penalty.py for branches; the formula's are in tests/env_adapters/scoring/test_rewards.py."""

import pytest

from buffers.records import TrainBatch
from learner.algorithms.overlong_penalty import with_overlong_penalty
from tests.support.learner_parts import make_row


def test_a_branch_with_a_score_of_its_own_is_lowered_for_its_own_length() -> None:
    ids = range(12)
    long = make_row(ids, mask=[0] * 3 + [1] * 9, episode="a", score=1.0)
    short_branch = make_row(ids, mask=[0] * 10 + [1] * 2, rounds=1, episode="a", score=1.0, branch_score=0.5)
    long_branch = make_row(ids, mask=[0] * 2 + [1] * 10, rounds=2, episode="b", score=1.0, branch_score=0.5)
    batch, mean = with_overlong_penalty(TrainBatch(rows=[long, short_branch, long_branch]), max_tokens=10)
    assert [row.branch_score for row in batch.rows] == [None, 0.5, pytest.approx(-0.5)]
    assert [row.score for row in batch.rows] == pytest.approx([0.5, 0.5, 0.0])
    assert mean == pytest.approx(-0.75)
