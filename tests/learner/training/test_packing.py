"""Rules of learner/training/packing.py."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.training.packing import ALIKE, PaddedSequences, Sequences, plan, split_minibatches

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
        assert len(pile) == 1 or sizes[pile].sum() <= budget
    loads = [sum(int(sizes[step[rank]].sum()) for step in steps) for rank in range(ranks)]
    assert max(loads) - min(loads) <= sizes.max()


def test_rank_without_rows_runs_a_micro_batch_that_trains_nothing() -> None:
    steps = plan(np.array([5]), rows=[0], num_ranks=2, token_budget=100)
    assert steps == [[[0], []]]
    assert plan(np.array([5]), rows=[], num_ranks=2, token_budget=100) == [[[], []]]
    empty = Sequences([np.arange(5, dtype=np.int32)], masks=[np.zeros(5, dtype=np.uint8)]).micro_batch([], device=CPU)
    assert empty.ids.tolist() == [[0, 0]]
    assert empty.segments is not None and empty.segments.starts.tolist() == [0, 2]
    assert len(empty.before) == len(empty.tokens) == 0
    assert empty.index.tolist() == []
    assert {empty.ids.dtype, empty.before.dtype, empty.tokens.dtype, empty.index.dtype} == {torch.int64}


def test_micro_batch_packs_rows_and_numbers_its_trained_tokens() -> None:
    rows = [np.array([5, 6, 7], dtype=np.int32), np.array([8, 9], dtype=np.int32)]
    masks = [np.array([0, 1, 1], dtype=np.uint8), np.array([0, 1], dtype=np.uint8)]
    micro = Sequences(rows, masks=masks).micro_batch([1, 0], device=CPU)
    assert micro.ids.tolist() == [[8, 9, 5, 6, 7]]
    assert micro.segments is not None and micro.segments.positions.tolist() == [[0, 1, 0, 1, 2]]
    assert micro.before.tolist() == [0, 2, 3]
    assert micro.tokens.tolist() == [9, 6, 7]
    assert micro.segments.starts.tolist() == [0, 2, 5]
    assert micro.segments.longest == 3
    assert micro.index.tolist() == [2, 0, 1]
    assert {micro.ids.dtype, micro.before.dtype, micro.tokens.dtype, micro.index.dtype} == {torch.int64}


def test_rows_side_by_side_are_filled_up_and_number_their_trained_tokens() -> None:
    rows = [np.array([5, 6, 7], dtype=np.int32), np.array([8, 9], dtype=np.int32)]
    masks = [np.array([0, 1, 1], dtype=np.uint8), np.array([0, 1], dtype=np.uint8)]
    padded = PaddedSequences(Sequences(rows, masks=masks))
    micro = padded.micro_batch([1, 0], device=CPU)
    assert micro.ids.tolist() == [[8, 9, 9], [5, 6, 7]] and micro.segments is None
    assert micro.before.tolist() == [0, 3, 4]
    assert micro.tokens.tolist() == [9, 6, 7]
    assert micro.index.tolist() == [2, 0, 1]
    empty = padded.micro_batch([], device=CPU)
    assert empty.ids.tolist() == [[0, 0]] and len(empty.before) == len(empty.index) == 0
    assert {empty.ids.dtype, micro.before.dtype, micro.tokens.dtype, micro.index.dtype} == {torch.int64}


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), budget=st.integers(20, 200), ranks=st.integers(1, 3)
)
def test_rectangles_have_each_row_once_within_the_budget_and_little_to_fill_up(
    lengths: list[int], budget: int, ranks: int
) -> None:
    padded = PaddedSequences(
        Sequences(
            [np.zeros(each, dtype=np.int32) for each in lengths],
            masks=[np.zeros(each, dtype=np.uint8) for each in lengths],
        )
    )
    steps = padded.plan(range(len(lengths)), num_ranks=ranks, token_budget=budget)
    piles = [pile for step in steps for pile in step if pile]
    assert sorted(row for pile in piles for row in pile) == list(range(len(lengths)))
    assert all(len(step) == ranks for step in steps)
    for pile in piles:
        own = [lengths[row] for row in pile]
        assert len(own) == 1 or len(own) * max(own) <= budget
        assert min(own) >= ALIKE * max(own)


def test_row_that_trains_its_first_token_is_refused() -> None:
    rows = [np.array([5, 6], dtype=np.int32)] * 2
    masks = [np.array([0, 1], dtype=np.uint8), np.array([1, 1], dtype=np.uint8)]
    with pytest.raises(ValueError, match=r"mask\[0\] of row 1 must be 0, got 1"):
        Sequences(rows, masks=masks)


def test_packs_are_filled_before_new_ones_are_opened() -> None:
    lengths = np.array([100, 90, 20, 18, 70])
    steps = plan(lengths, rows=range(5), num_ranks=1, token_budget=120)
    assert steps == [[[0, 2]], [[1, 3]], [[4]]]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), budget=st.integers(50, 200))
def test_packs_are_more_than_half_full_but_for_one(lengths: list[int], budget: int) -> None:
    sizes = np.array(lengths)
    steps = plan(sizes, rows=range(len(sizes)), num_ranks=1, token_budget=budget)
    fills = [int(sizes[pile].sum()) for (pile,) in steps]
    assert sum(fill <= budget / 2 for fill in fills) <= 1


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


def test_packed_rows_compute_each_of_their_tokens_and_what_it_sees() -> None:
    rows = Sequences(
        [np.zeros(length, dtype=np.int32) for length in (3, 5)],
        masks=[np.zeros(length, dtype=np.uint8) for length in (3, 5)],
    )
    assert rows.computed == (8, 9 + 25) and rows.raw_over_unique == 1.0
    budgets = {"num_ranks": 1, "token_budget": 6}
    assert rows.plan([0, 1], **budgets) == plan(rows.lengths, rows=[0, 1], **budgets) == [[[1]], [[0]]]
