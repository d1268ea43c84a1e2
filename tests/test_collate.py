"""Rules of learner/collate.py."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.collate import Sequences, padding_share, plan, split_minibatches

CPU = torch.device("cpu")


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), ranks=st.integers(1, 4), budget=st.integers(20, 200)
)
def test_every_row_is_in_exactly_one_micro_batch_and_ranks_keep_step(
    lengths: list[int], ranks: int, budget: int
) -> None:
    sizes = np.array(lengths)
    steps = plan(sizes, rows=range(len(sizes)), num_ranks=ranks, token_budget=budget)
    assert sorted(row for step in steps for pile in step for row in pile) == list(range(len(sizes)))
    assert all(len(step) == ranks for step in steps)
    for pile in (pile for step in steps for pile in step if pile):
        assert len(pile) == 1 or len(pile) * sizes[pile].max() <= budget
    loads = [sum(int(sizes[step[rank]].sum()) for step in steps) for rank in range(ranks)]
    assert max(loads) - min(loads) <= sizes.max()


def test_rank_without_rows_runs_a_micro_batch_that_trains_nothing() -> None:
    steps = plan(np.array([5]), rows=[0], num_ranks=2, token_budget=100)
    assert steps == [[[0], []]]
    empty = Sequences([np.arange(5, dtype=np.int32)], masks=[np.ones(5, dtype=np.uint8)]).micro_batch([], device=CPU)
    assert empty.ids.tolist() == [[0, 0]]
    assert empty.mask.sum() == 0
    assert empty.index.tolist() == []


def test_micro_batch_pads_on_the_right_and_numbers_its_trained_tokens() -> None:
    rows = [np.array([5, 6, 7], dtype=np.int32), np.array([8, 9], dtype=np.int32)]
    masks = [np.array([0, 1, 1], dtype=np.uint8), np.array([0, 1], dtype=np.uint8)]
    micro = Sequences(rows, masks=masks).micro_batch([1, 0], device=CPU)
    assert micro.ids.tolist() == [[8, 9, 0], [5, 6, 7]]
    assert micro.mask.tolist() == [[False, True, False], [False, True, True]]
    assert micro.index.tolist() == [2, 0, 1]


def test_rows_of_unlike_length_do_not_share_a_micro_batch() -> None:
    lengths = np.array([100, 90, 20, 18])
    steps = plan(lengths, rows=range(4), num_ranks=1, token_budget=1000)
    assert steps == [[[0, 1]], [[2, 3]]]
    assert padding_share(lengths, plan=steps) == pytest.approx(1 - 228 / 240)


@given(episodes=st.lists(st.integers(0, 9), min_size=1, max_size=30), num=st.integers(1, 6), seed=st.integers(0, 3))
def test_minibatches_share_all_rows_and_split_no_episode(episodes: list[int], num: int, seed: int) -> None:
    of_row = np.array(episodes)
    parts = split_minibatches(of_row, num=num, rng=np.random.default_rng(seed))
    assert sorted(row for part in parts for row in part) == list(range(len(of_row)))
    members = [{episodes[row] for row in part} for part in parts]
    assert sum(len(part) for part in members) == len(set(episodes))
    assert len(parts) == min(num, len(set(episodes)))
    assert max(len(part) for part in members) - min(len(part) for part in members) <= 1


def test_minibatches_depend_on_the_seed_only() -> None:
    of_row = np.arange(16)
    first, same, other = (split_minibatches(of_row, num=2, rng=np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first == same
    assert first != other
