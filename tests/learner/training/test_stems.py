"""Rules of stems: what rows begin with is computed once in models of any kind, and every number is that of the rows alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.families import make_family
from learner.model.load import load_policy
from learner.model.policy import Policy
from learner.training.layout import Layout
from learner.training.packing import PaddedSequences, Sequences
from learner.training.stems import StemSequences
from learner.training.tree_packing import GATHERED, PrefixTree
from tests.support.learner_parts import branching_batch, make_trainer
from tests.support.weights.published_weights import published

CPU = torch.device("cpu")
BESIDE = Layout(packs=False, shares=True, attention="sdpa", why="")
ALWAYS = ("falcon_h1", "gpt_oss", "lfm2", "mamba2", "qwen3_5_vl")
"""One of each kind; the others are played with the long tests."""
FAMILIES = (
    *ALWAYS, "bloom", "deepseek_v3", "gemma2", "granitemoehybrid", "kimi_linear", "llama4", "nemotron_h", "nemotron_h_dense",
    "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "stablelm",
)  # fmt: skip
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "groups": ("lfm2", {"advantage": "grpo", "critic": "none", "minibatches": 2, "token_budget": 150}),
    "critic": ("falcon_h1", {"critic": "separate", "kl": {"coef": 0.05}, "gradient_checkpointing": True, "minibatches": 1}),
    "adapter": ("qwen3_5", {"lora": {"rank": 4, "alpha": 8.0}, "entropy_coef": 0.01, "gradient_checkpointing": True}),
    "hints": ("gpt_oss", {"advantage": "grpo", "critic": "none", "hints": {"coef": 0.5}, "loss": "gspo", "minibatches": 1}),
}  # fmt: skip


def of_groups(*groups: tuple[int, list[int]], seed: int = 0) -> Sequences:
    """For each group its stem's length, and those of its rests; all but the first tokens are trained, in stems too."""
    rng = np.random.default_rng(seed)
    ids = []
    for stem, rests in groups:
        start = rng.integers(3, 500, stem)
        ids += [np.concatenate([start, rng.integers(3, 500, rest)]).astype(np.int32) for rest in rests]
    return Sequences(ids, masks=[np.array([0, *[1] * (len(row) - 1)], dtype=np.uint8) for row in ids])


def as_stems(rows: Sequences) -> StemSequences:
    return StemSequences(rows, tree=PrefixTree(rows.ids), groups=np.zeros(len(rows.ids), dtype=np.int64))


def passes(policy: Policy, sequences: Sequences, *, token_budget: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[M] log-probabilities, and all gradients of a weighted sum of them."""
    policy.zero_grad()
    found = torch.full((sequences.num_trained,), torch.nan)
    weights = torch.linspace(0.0, 9.0, sequences.num_trained).cos()
    for piles in sequences.plan(range(len(sequences.ids)), num_ranks=1, token_budget=token_budget):
        micro = sequences.micro_batch(piles[0], device=CPU)
        logprobs = policy(micro, temperature=1.0).logprobs
        (logprobs * weights[micro.index]).sum().backward()
        found[micro.index] = logprobs.detach().float()
    return found, torch.cat([each.grad.flatten().float() for each in policy.parameters() if each.grad is not None])


def test_a_micro_batch_has_stems_and_the_rest_of_each_row() -> None:
    """Rows part one token before they differ, so that each place predicts one token; what is filled up is nothing to anybody."""
    start = np.arange(10, 20)
    ids = [np.concatenate([start, rest]).astype(np.int32) for rest in ([1, 2, 3], [4])]
    masks = [np.isin(np.arange(len(row)), (5, 10, 12)).astype(np.uint8) for row in ids]
    micro = as_stems(Sequences(ids, masks=masks)).micro_batch([1, 0], device=CPU)
    assert micro.stems is not None and micro.segments is None and micro.shared is not None
    assert (micro.stems.ids.tolist(), micro.stems.of_rows.tolist()) == ([list(range(10, 19))], [0, 0])
    assert micro.ids.tolist() == [[19, 1, 2, 3], [19, 4, 0, 0]]
    assert micro.before.tolist() == [4, 9, 11, 13] and micro.tokens.tolist() == [15, 1, 3, 4]
    assert micro.shared.tolist() == [0, 1, 2, 0, 3] and micro.index.tolist() == [0, 1, 2, 3, 4]


def test_no_rows_are_stems_too() -> None:
    """A rank without rows enters as many passes as the others."""
    micro = as_stems(of_groups((9, [3, 4]))).micro_batch([], device=CPU)
    assert micro.stems is not None and micro.stems.ids.shape == (1, 1) and micro.ids.shape == (1, 2)
    assert len(micro.before) == len(micro.index) == 0 and micro.stems.of_rows.tolist() == [0]


@pytest.mark.seconds
@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(0, 60), st.lists(st.integers(1, 40), min_size=1, max_size=8)), min_size=1, max_size=6
    ),
    budget=st.integers(40, 400),
    ranks=st.integers(1, 3),
)
def test_each_row_is_computed_once_within_the_budget(
    groups: list[tuple[int, list[int]]], budget: int, ranks: int
) -> None:
    sequences = as_stems(of_groups(*groups))
    steps = sequences.plan(range(len(sequences.ids)), num_ranks=ranks, token_budget=budget)
    assert all(len(step) == ranks for step in steps)
    piles = [pile for step in steps for pile in step if pile]
    assert sorted(row for pile in piles for row in pile) == list(range(len(sequences.ids)))
    for pile in piles:
        micro = sequences.micro_batch(pile, device=CPU)
        assert micro.stems is not None and micro.ids.shape[1] >= 2
        places = micro.stems.ids.numel() + micro.ids.numel()
        seen = micro.ids.numel() + len(micro.ids) * micro.stems.ids.shape[1]
        assert len(pile) == 1 or (places <= budget and seen <= GATHERED * budget)
        texts = torch.cat([micro.stems.ids[micro.stems.of_rows], micro.ids], dim=1).tolist()
        rows = [sequences.ids[row].tolist() for row in pile]
        assert all(any(text[: len(row)] == row for text in texts) for row in rows)
        assert sorted(micro.index.tolist()) == sorted(sequences.places(pile).tolist())


def test_rows_of_a_stem_stay_together_and_small_groups_of_like_stems_join() -> None:
    sequences = as_stems(of_groups((100, [20, 20, 20]), (101, [20, 20]), (40, [20, 20])))
    assert [sorted(pile) for ((pile),) in sequences.plan(range(7), num_ranks=1, token_budget=1000)] == [
        [0, 1, 2, 3, 4],
        [5, 6],
    ]
    sequences.measure(num_ranks=1, token_budget=1000)
    assert sequences.computed[0] == 2 * 99 + 39 + 5 * 21 + 2 * 21 + 2
    pieces = [pile for ((pile),) in sequences.plan(range(7), num_ranks=1, token_budget=150)]
    assert pieces == [[2], [4, 3], [0, 1], [5, 6]], "rests that do not fit compute their stem once more"


def test_keys_that_rows_gather_are_limited() -> None:
    """A hundred keys for each row, and six for each place of the budget."""
    plan = as_stems(of_groups((99, [2] * 30))).plan(range(30), num_ranks=1, token_budget=200)
    assert [len(pile) for (pile,) in plan] == [11, 11, 8]


def test_a_long_rest_is_not_beside_short_ones_if_filling_them_up_costs_more_than_their_stem() -> None:
    sequences = as_stems(of_groups((30, [100, 10, 12])))
    assert sequences.plan(range(3), num_ranks=1, token_budget=1000) == [[[0]], [[2, 1]]]


def test_rows_that_share_little_lie_beside_one_another() -> None:
    found = BESIDE.lay_out(of_groups((9, [100, 100])), groups=np.zeros(2), num_ranks=1, token_budget=1000)
    assert type(found) is PaddedSequences
    found = BESIDE.lay_out(of_groups((90, [10, 10])), groups=np.zeros(2), num_ranks=1, token_budget=1000)
    assert type(found) is StemSequences and found.raw_over_unique == 200 / (89 + 22)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in ALWAYS else pytest.mark.long) for each in FAMILIES]
)
def test_log_probabilities_and_gradients_are_those_of_rows_alone(name: str, tmp_path: Path) -> None:
    """Rests of one token; stems longer than windows and chunks, of two groups at once; layers that are computed again too."""
    rows = of_groups((45, [24, 13, 1, 1]), (44, [20, 24]), (3, [7]), (150, [2, 30]))
    policy = load_policy(make_family(name, tmp_path / name), device=CPU)
    policy.attention = "eager" if name in ("bloom", "gemma2", "gpt_oss", "mamba2") else "sdpa"
    alone, expected = passes(policy, PaddedSequences(rows), token_budget=1)
    for again in (False, True):
        if again:
            policy.checkpoint_layers()
        for budget in (80, 1000):
            found, gradients = passes(policy, as_stems(rows), token_budget=budget)
            assert float((found - alone).abs().mean()) < 1e-5 and float((found - alone).abs().max()) < 1e-4
            assert float((gradients - expected).norm() / expected.norm()) < 2e-5


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_5"])
def test_half_precision_is_as_near_as_rows_alone(name: str, tmp_path: Path) -> None:
    rows = of_groups((45, [24, 13, 1]), (70, [20, 24]))
    policy = load_policy(make_family(name, tmp_path / name), device=CPU)
    exact, expected = passes(policy, PaddedSequences(rows), token_budget=1)
    policy = policy.to(torch.bfloat16)
    errors = []
    for sequences, budget in ((PaddedSequences(rows), 1), (as_stems(rows), 1000)):
        found, gradients = passes(policy, sequences, token_budget=budget)
        errors.append((float((found - exact).abs().mean()), float((gradients - expected).norm() / expected.norm())))
    assert errors[1][0] < 1.2 * errors[0][0] and errors[1][1] < 1.2 * errors[0][1]


@pytest.mark.seconds
@pytest.mark.parametrize("way", WAYS)
def test_steps_on_stems_are_those_on_rows_beside_one_another(tmp_path: Path, way: str) -> None:
    """Two steps: in the second the tokens are of an older version, and of the reference's."""
    name, knobs = WAYS[way]
    model = make_family(name, tmp_path / name)
    found = []
    for prefix_tree in (True, False):
        learner = make_trainer(model, lr=1e-3, lr_warmup_steps=0, prefix_tree=prefix_tree, **knobs)
        assert (learner.layout.packs, learner.layout.shares) == (False, prefix_tree)
        assert ("what they begin with computed once; packed," in learner.layout_line()) == prefix_tree
        steps = [learner.train_step(branching_batch(seed=seed), version=seed) for seed in range(2)]
        found.append((steps, published(learner)))
        learner.close()
    (stems, stem_weights), (padded, padded_weights) = found
    for one, other in zip(stems, padded, strict=True):
        assert one["learner/raw_over_unique"] > 1.2 > other["learner/raw_over_unique"] == 1.0
        for key in other.keys() - {"learner/raw_over_unique", "learner/mfu", "time/prepare_s", "time/train_s"}:
            assert one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5), key
        assert one["policy/grad_norm"] > 0.01
    assert stem_weights.keys() == padded_weights.keys()
    for key, weight in stem_weights.items():
        assert float((weight - padded_weights[key]).abs().mean()) < 1e-6, key
