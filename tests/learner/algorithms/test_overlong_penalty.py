"""Rules of learner/algorithms/overlong_penalty.py for branches; the formula's are in tests/env_adapters/scoring/test_rewards.py."""

import pytest

from buffers.records import TrainBatch
from learner.algorithms.overlong_penalty import overlong_penalty, with_overlong_penalty
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


def test_no_rows_have_no_penalty() -> None:
    assert with_overlong_penalty(TrainBatch(rows=[]), max_tokens=10)[1] == 0.0


def test_each_role_of_an_episode_is_lowered_for_its_own_generations() -> None:
    long = make_row(range(12), mask=[0] * 3 + [1] * 9, role="a", score=1.0, role_score=0.75)
    short = make_row(range(12), mask=[0] * 10 + [1] * 2, rounds=1, role="b", score=1.0)
    batch, mean = with_overlong_penalty(TrainBatch(rows=[long, short]), max_tokens=10)
    assert [(row.score, row.role_score) for row in batch.rows] == [(0.5, 0.25), (1.0, None)]
    assert mean == -0.25


def test_the_soft_part_is_one_token_at_least_and_a_row_that_trains_nothing_has_no_length() -> None:
    assert [overlong_penalty(length, max_tokens=4) for length in (3, 4)] == [0.0, -1.0]
    untrained = make_row(range(2), mask=[0, 0], score=1.0)
    assert with_overlong_penalty(TrainBatch(rows=[untrained]), max_tokens=1)[1] == 0.0
