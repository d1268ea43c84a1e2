"""Rules of the prefix tree: what rows share is computed once, and every number is that of the rows packed one by one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from learner.model.policy import Policy
from learner.training.layout import Layout
from learner.training.packing import Sequences, plan
from learner.training.tree_packing import GATHERED, PrefixTree, TreeSequences, kept_together
from tests.support.learner_parts import VOCABULARY, random_lm

CPU = torch.device("cpu")
PACKED = Layout(packs=True, shares=True, attention="sdpa", why="")


def branching(*, seed: int, num: int = 12, longest: int = 60) -> Sequences:
    """Rows that leave one another at random depths, several levels deep: among them equal rows, and starts of others."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, VOCABULARY, 90)]
    while len(ids) < num:
        other = ids[rng.integers(len(ids))]
        start = other[: rng.integers(len(other) // 3, len(other) + 1)]
        ids.append(np.concatenate([start, rng.integers(0, VOCABULARY, rng.integers(0, longest))]))
    ids = [ids[place].astype(np.int32) for place in rng.permutation(num)]
    masks = [((rng.random(len(row)) < 0.5) & (np.arange(len(row)) > 0)).astype(np.uint8) for row in ids]
    return Sequences(ids, masks=masks)


def as_tree(sequences: Sequences, *, groups: list[int] | None = None) -> TreeSequences:
    owners = np.zeros(len(sequences.ids), dtype=np.int64) if groups is None else np.array(groups)
    return TreeSequences(sequences, tree=PrefixTree(sequences.ids), groups=owners)


def apart(*lengths: int, groups: list[int]) -> TreeSequences:
    """Rows of these lengths that share nothing."""
    rows = [np.arange(1000 * row, 1000 * row + length, dtype=np.int32) for row, length in enumerate(lengths)]
    return as_tree(Sequences(rows, masks=[np.zeros(len(row), dtype=np.uint8) for row in rows]), groups=groups)


def _windowed() -> Any:
    """Each token sees 24 tokens: windows that end within a segment, and in one before it."""
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, intermediate_size=128, initializer_range=0.1, sliding_window=24,
        )
    )  # fmt: skip


def _passes(policy: Policy, sequences: Sequences, *, token_budget: int) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """[3, M] log-probabilities, entropies and values, the gradients of a weighted sum of them, and the tokens computed."""
    policy.zero_grad()
    weights = torch.randn(3, sequences.num_trained, generator=torch.Generator().manual_seed(3))
    found = torch.full((3, sequences.num_trained), torch.nan)
    computed = 0
    for piles in sequences.plan(range(len(sequences.ids)), num_ranks=1, token_budget=token_budget):
        micro = sequences.micro_batch(piles[0], device=CPU)
        out = policy(micro, temperature=0.9)
        stacked = torch.stack([out.logprobs, out.entropy, out.values])
        (stacked * weights[:, micro.index]).sum().backward()
        found[:, micro.index] = stacked.detach()
        computed += micro.ids.numel()
    return found, [each.grad.clone() for each in policy.parameters() if each.grad is not None], computed


@pytest.mark.seconds
@pytest.mark.parametrize("token_budget", [10_000, 200])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("make", [random_lm, _windowed])
def test_tree_has_the_outputs_and_gradients_of_packed_rows(
    make: Callable[[], Any], dtype: torch.dtype, token_budget: int
) -> None:
    """Trees of several levels, whole and in pieces. Gradients differ by at most 1e-6 of their size."""
    torch.manual_seed(0)
    policy = Policy(make().eval(), value_head=True).to(dtype)
    torch.nn.init.normal_(policy.value_head.weight)
    for seed in range(3):
        rows = branching(seed=seed)
        found, gradients, computed = _passes(policy, as_tree(rows), token_budget=token_budget)
        expected, others, raw = _passes(policy, rows, token_budget=token_budget)
        assert raw == rows.lengths.sum() > 1.15 * computed
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
        one, other = (torch.cat([each.flatten().double() for each in part]) for part in (gradients, others))
        assert float((one - other).norm() / other.norm()) <= 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_layout_holds_every_row_once_and_each_place_predicts_one_token(seed: int) -> None:
    rows = branching(seed=seed, num=15).ids
    tree = PrefixTree(rows)
    chosen = np.random.default_rng(seed).choice(15, 1 + seed % 15, replace=False).tolist()
    layout = tree.layout(chosen)
    ids = np.full(len(layout.positions), -1)
    after: dict[int, int] = {}
    for row, nodes in zip(layout.rows, layout.nodes, strict=True):
        assert layout.positions[nodes].tolist() == list(range(len(rows[row])))
        assert set(ids[nodes].tolist()) <= {-1, *rows[row].tolist()}
        ids[nodes] = rows[row]
        for place, token in zip(nodes[:-1].tolist(), rows[row][1:].tolist()):
            assert after.setdefault(place, token) == token
    for row, nodes in zip(layout.rows, layout.nodes, strict=True):
        assert ids[nodes].tolist() == rows[row].tolist()
    assert sorted(layout.rows) == sorted(chosen) and -1 not in ids
    for start, end, path in zip(layout.starts[:-1], layout.starts[1:], layout.paths, strict=True):
        assert path[start - end :].tolist() == list(range(start, end))
        assert any(path.tolist() == nodes[: len(path)].tolist() for nodes in layout.nodes)
    assert tree.size(chosen) == (len(ids), sum(map(len, layout.paths)))


def test_rows_part_one_token_before_they_differ() -> None:
    """Rows of 40 that differ from the 31st on share 29 places: the 30th predicts another token in each."""
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 9, 30)
    rows = [np.concatenate([stem, np.full(10, own)]).astype(np.int32) for own in (10, 11)]
    assert PrefixTree(rows).size([0, 1]) == (29 + 2 * 11, 29 + 2 * 40)
    assert PrefixTree([rows[0], rows[0]]).size([0, 1]) == (40, 40)
    assert PrefixTree([rows[0], rows[0][:20]]).size([0, 1]) == (40, 40)


def test_runs_fill_both_limits_to_the_last_place() -> None:
    """Two rows of 40 that share 29 places."""
    stem = np.arange(30)
    rows = [np.concatenate([stem, np.full(10, own)]).astype(np.int32) for own in (50, 51)]
    tree = PrefixTree(rows)
    tokens, gathered = tree.size([0, 1])
    assert tree.runs([0, 1], tokens=tokens, gathered=gathered) == [[0, 1]]
    assert tree.runs([0, 1], tokens=tokens - 1, gathered=gathered) == [[0], [1]]
    assert tree.runs([0, 1], tokens=tokens, gathered=gathered - 1) == [[0], [1]]


def test_row_that_goes_on_by_one_token_lengthens_the_path() -> None:
    stem = np.arange(40, dtype=np.int32)
    layout = PrefixTree([stem, np.append(stem, 50).astype(np.int32)]).layout([0, 1])
    assert layout.starts.tolist() == [0, 41]
    assert [path.tolist() for path in layout.paths] == [list(range(41))]


def test_micro_batch_has_what_rows_share_once() -> None:
    """Two rows of 40 that share 29 places and train their last 12 tokens: the first of these is the same in both."""
    stem = np.arange(30)
    ids = [np.concatenate([stem, np.arange(own, own + 10)]).astype(np.int32) for own in (50, 70)]
    micro = as_tree(Sequences(ids, masks=[(np.arange(40) >= 28).astype(np.uint8)] * 2)).micro_batch([1, 0], device=CPU)
    segments = micro.segments
    assert segments is not None and segments.paths is not None
    assert micro.ids.tolist() == [[*range(30), *range(50, 60), 29, *range(70, 80)]]
    assert segments.positions.tolist() == [[*range(40), *range(29, 40)]]
    assert (segments.starts.tolist(), segments.longest) == ([0, 29, 40, 51], 29)
    assert micro.before.tolist() == [*range(27, 39), *range(40, 50)]
    assert micro.tokens.tolist() == [28, 29, *range(50, 60), *range(70, 80)]
    assert micro.shared is not None and micro.shared.tolist() == [*range(12), 0, 1, *range(12, 22)]
    assert micro.index.tolist() == list(range(24))
    assert segments.paths.places.tolist() == [*range(29), *range(40), *range(29), *range(40, 51)]
    assert (segments.paths.starts.tolist(), segments.paths.longest) == ([0, 29, 69, 109], 40)


def test_rows_that_share_nothing_have_no_paths() -> None:
    segments = apart(20, 30, groups=[0, 0]).micro_batch([0, 1], device=CPU).segments
    assert segments is not None and segments.paths is None


def test_no_rows_make_a_micro_batch_that_trains_nothing_on_each_rank() -> None:
    tree = apart(20, groups=[0])
    assert tree.plan([], num_ranks=2, token_budget=100) == [[[], []]]
    empty = tree.micro_batch([], device=CPU)
    assert empty.ids.tolist() == [[0, 0]] and len(empty.before) == len(empty.index) == 0


def test_tree_that_was_not_measured_computes_its_rows_one_by_one() -> None:
    rows = branching(seed=0)
    assert as_tree(rows).computed == rows.computed


def test_fork_close_behind_another_is_made_there() -> None:
    stem = np.arange(40)
    late = [np.concatenate([stem, [7] * 3, np.full(9, own)]).astype(np.int32) for own in (50, 51)]
    early = np.concatenate([stem, np.full(9, 52)]).astype(np.int32)
    layout = PrefixTree([*late, early]).layout([0, 1, 2])
    assert layout.starts.tolist() == [0, 39, 39 + 13, 39 + 26, 39 + 26 + 10]


@pytest.mark.parametrize(
    ("base", "depth", "starts"),
    [
        (0, 7, [0, 17, 34, 43]),
        (0, 8, [0, 8, 18, 28, 37]),
        (39, 46, [0, 39, 56, 73, 83]),
        (39, 47, [0, 39, 47, 57, 67, 77]),
    ],
)
def test_fork_eight_tokens_behind_another_is_its_own(base: int, depth: int, starts: list[int]) -> None:
    """Two rows share `depth` places, and a third shares `base` with them."""
    stem = np.arange(depth + 1)
    late = [np.concatenate([stem, np.full(9, own)]).astype(np.int32) for own in (90, 91)]
    early = np.concatenate([stem[: base + 1 if base else 0], np.full(9, 92)]).astype(np.int32)
    assert PrefixTree([*late, early]).layout([0, 1, 2]).starts.tolist() == starts


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_plan_has_each_row_once_within_both_budgets(num_ranks: int) -> None:
    rows = branching(seed=1, num=40)
    tree = as_tree(rows, groups=[row // 5 for row in range(40)])
    budget = 150
    steps = tree.plan(range(40), num_ranks=num_ranks, token_budget=budget)
    assert sorted(row for piles in steps for pile in piles for row in pile) == list(range(40))
    assert all(len(piles) == num_ranks for piles in steps)
    for pile in (pile for piles in steps for pile in piles if len(pile) > 1):
        micro = tree.micro_batch(pile, device=CPU)
        assert micro.ids.numel() <= budget and micro.segments is not None
        assert micro.segments.paths is None or len(micro.segments.paths.places) <= GATHERED * budget


def test_pile_takes_what_fills_its_budget_to_the_last_token() -> None:
    tree = apart(60, 70, 40, groups=[0, 1, 2])
    steps = tree.plan(range(3), num_ranks=1, token_budget=100)
    assert sorted(sorted(pile) for (pile,) in steps) == [[0, 2], [1]]


def test_piles_begin_with_the_largest_runs() -> None:
    """Into as few as there can be: in the order of the rows there would be four, with 45 and 50 in one."""
    steps = apart(45, 60, 50, 55, 50, groups=[0] * 5).plan(range(5), num_ranks=1, token_budget=100)
    assert sorted(sorted(pile) for (pile,) in steps) == [[0, 3], [1], [2, 4]]


def test_a_group_that_fits_its_budget_is_computed_at_once() -> None:
    """Eight answers of 256 tokens to a prompt of 2,048: 4,096 tokens, which gather five times as many keys."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCABULARY, 2048)
    ids = [np.concatenate([prompt, np.full(256, answer)]).astype(np.int32) for answer in range(8)]
    tree = as_tree(Sequences(ids, masks=[np.zeros(2304, dtype=np.uint8)] * 8))
    ((pile,),) = tree.plan(range(8), num_ranks=1, token_budget=4200)
    assert sorted(pile) == list(range(8))


def test_chain_of_short_branches_is_split_by_what_it_gathers() -> None:
    """A stem of 1,000 tokens with a branch of two at every twentieth: few tokens, and each branch gathers half a stem."""
    stem = np.arange(1000, dtype=np.int32)
    rows = [stem, *(np.append(stem[:end], [5, 5]).astype(np.int32) for end in range(20, 1000, 20))]
    tree = as_tree(Sequences(rows, masks=[np.zeros(len(row), dtype=np.uint8) for row in rows]))
    steps = tree.plan(range(len(rows)), num_ranks=1, token_budget=2000)
    assert PrefixTree(rows).tokens(range(len(rows))) < 1200
    assert len(steps) > 2
    assert 5 * 2000 < max(PrefixTree(rows).size(pile)[1] for (pile,) in steps) <= 6 * 2000


def test_a_pass_computes_the_places_of_all_micro_batches_and_what_each_sees() -> None:
    rows = branching(seed=2, num=30)
    tree = as_tree(rows)
    tree.measure(num_ranks=2, token_budget=150)
    steps = tree.plan(range(30), num_ranks=2, token_budget=150)
    segments = [tree.micro_batch(pile, device=CPU).segments for piles in steps for pile in piles if pile]
    positions = [each.positions[0] for each in segments if each is not None]
    assert len(positions) > 2
    assert tree.computed == (sum(map(len, positions)), sum(int((2 * own + 1).sum()) for own in positions))


@pytest.mark.parametrize("seed", range(6))
def test_size_of_a_tree_is_that_of_its_layout(seed: int) -> None:
    rows = branching(seed=seed, num=20)
    tree = PrefixTree(rows.ids)
    for chosen in (range(20), range(0, 20, 3), [7]):
        layout = tree.layout(list(chosen))
        assert tree.size(chosen) == (len(layout.positions), sum(len(path) for path in layout.paths))


def test_group_is_divided_only_where_that_takes_a_tenth_off_the_longest_work() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, 64) for _ in range(3)]
    ids = [np.concatenate([prompts[row // 4], rng.integers(0, VOCABULARY, 2)]).astype(np.int32) for row in range(12)]
    tree = as_tree(Sequences(ids, masks=[np.zeros(66, dtype=np.uint8)] * 12), groups=[row // 4 for row in range(12)])
    steps = tree.plan(range(12), num_ranks=2, token_budget=10_000)
    groups = [sorted({row // 4 for piles in steps for row in piles[rank]}) for rank in range(2)]
    assert not set(groups[0]) & set(groups[1]), "its prompt would be computed on both ranks"


def test_group_stays_on_one_rank_unless_another_would_be_idle() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, 64) for _ in range(4)]
    ids = [np.concatenate([prompts[row % 4], rng.integers(0, VOCABULARY, 20)]).astype(np.int32) for row in range(32)]
    rows = Sequences(ids, masks=[np.zeros(84, dtype=np.uint8)] * 32)
    tree = as_tree(rows, groups=[row % 4 for row in range(32)])
    steps = tree.plan(range(32), num_ranks=2, token_budget=10_000)
    groups = [{row % 4 for piles in steps for row in piles[rank]} for rank in range(2)]
    assert not groups[0] & groups[1] and len(groups[0]) == 2
    alone = tree.plan(range(0, 32, 4), num_ranks=2, token_budget=10_000)
    assert [len(pile) for piles in alone for pile in piles] == [4, 4]


def test_the_heaviest_group_is_divided_though_it_has_two_rows() -> None:
    tree = apart(60, 60, 10, groups=[0, 0, 1])
    assert tree.plan(range(3), num_ranks=2, token_budget=1000) == [[[0, 2], [1]]]


def test_group_is_divided_where_that_takes_exactly_a_tenth_off() -> None:
    assert apart(90, 10, groups=[0, 0]).plan([0, 1], num_ranks=2, token_budget=1000) == [[[0], [1]]]
    assert apart(91, 10, groups=[0, 0]).plan([0, 1], num_ranks=2, token_budget=1000) == [[[0, 1], []]]


def test_the_largest_groups_are_dealt_first() -> None:
    tree = apart(30, 30, 60, groups=[0, 1, 2])
    ((one, other),) = tree.plan(range(3), num_ranks=2, token_budget=1000)
    assert (one, sorted(other)) == ([2], [0, 1])


def test_groups_of_one_size_are_dealt_by_their_rows_whatever_their_numbers() -> None:
    for groups in ([0, 1], [1, 0]):
        assert apart(30, 30, groups=groups).plan([0, 1], num_ranks=2, token_budget=1000) == [[[0], [1]]]


def test_rows_that_share_too_little_are_packed_one_by_one() -> None:
    """27 of 300 tokens are shared: 9 %. And the plan is the one without a tree."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, VOCABULARY, 100).astype(np.int32) for _ in range(3)]
    ids[1][:28] = ids[0][:28]
    rows = Sequences(ids, masks=[np.zeros(100, dtype=np.uint8)] * 3)
    groups = np.zeros(3, dtype=np.int64)
    found = PACKED.lay_out(rows, groups=groups, num_ranks=1, token_budget=1000)
    assert type(found) is Sequences and found.raw_over_unique == 1.0
    assert found.plan([0, 1, 2], num_ranks=1, token_budget=1000) == plan(
        rows.lengths, rows=[0, 1, 2], num_ranks=1, token_budget=1000
    )
    ids[2][:28] = ids[0][:28]
    found = PACKED.lay_out(rows, groups=groups, num_ranks=1, token_budget=1000)
    assert isinstance(found, TreeSequences)
    assert found.raw_over_unique == 300 / (300 - 2 * 27)


def test_rows_that_share_a_tenth_of_what_they_compute_are_a_tree() -> None:
    """Two rows of 88 tokens: 16 of 176 are shared, so that 160 are computed."""
    ids = [np.concatenate([np.arange(17), np.full(71, own)]).astype(np.int32) for own in (50, 51)]
    rows = Sequences(ids, masks=[np.zeros(88, dtype=np.uint8)] * 2)
    groups = np.zeros(2, dtype=np.int64)
    found = PACKED.lay_out(rows, groups=groups, num_ranks=1, token_budget=1000)
    assert isinstance(found, TreeSequences) and found.computed[0] == 160
    assert kept_together(rows, groups=groups, episodes=np.arange(2), num=1).tolist() == [0, 0]


def test_mini_batch_takes_groups_whole_where_they_share_and_there_are_enough() -> None:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, VOCABULARY, 100).astype(np.int32) for _ in range(4)]
    groups, episodes, masks = np.array([0, 0, 1, 1]), np.arange(4), [np.zeros(100, dtype=np.uint8)] * 4
    apart = kept_together(Sequences(ids, masks=masks), groups=groups, episodes=episodes, num=2)
    for row in (1, 3):
        ids[row][:60] = ids[row - 1][:60]
    rows = Sequences(ids, masks=masks)
    few = kept_together(rows, groups=groups, episodes=episodes, num=3)
    assert apart.tolist() == few.tolist() == [0, 1, 2, 3]
    assert kept_together(rows, groups=groups, episodes=episodes, num=2).tolist() == [0, 0, 1, 1]
