"""Each setting of the learner reaches the weights: one or two real steps with it and without it end in other weights, or,
where the mathematics says so, in the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from buffers.records import TrainBatch
from learner.training.trainer import Trainer
from tests.support.learner_parts import assert_same_weights, make_model, make_row, make_trainer, walks

Weights = dict[str, torch.Tensor]
Learn = Callable[..., Weights]
GROUPED = ("grpo", "dr_grpo", "rloo", "opo")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def learn(model: Path, tmp_path: Path) -> Learn:
    """Weights after a step on each of these batches; `last` has the figures of the last step."""
    last: dict[str, float] = {}

    def weights_after(*batches: TrainBatch, **settings: Any) -> Weights:
        learner: Trainer = make_trainer(model, **{"lr": 1e-3, "lr_warmup_steps": 0, "minibatches": 1, **settings})
        try:
            for version, batch in enumerate(batches):
                last.clear()
                last.update(learner.train_step(batch, version=version))
            learner.save_pretrained(tmp_path / "model")
        finally:
            learner.close()
        return load_file(tmp_path / "model" / "model.safetensors")

    weights_after.last = last  # type: ignore[attr-defined]
    return weights_after


def differ(one: Weights, two: Weights) -> bool:
    """By more than rounding."""
    return any(float((weight - two[name]).abs().mean()) > 1e-6 for name, weight in one.items())


def two_rounds(**scores: Any) -> TrainBatch:
    """A pair of episodes of two rounds each, of unequal length; `scores` is for the first. The other has 0."""
    first = make_row([1, 2, 3, 4, 5, 6], mask=[0, 1, 0, 1, 1, 1], rounds=[0, 0, 0, 1, 1, 1], **scores)
    other = make_row([1, 7, 3, 9], mask=[0, 1, 0, 1], rounds=[0, 0, 0, 1], episode="0-1-0", score=0.0)
    return TrainBatch(rows=[first, other])


@pytest.mark.seconds
def test_each_loss_agg_weighs_long_and_short_rows_in_its_own_way(learn: Learn) -> None:
    modes = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    norms = {}
    for mode in modes:
        # dr_grpo without clipping: the gradient is linear in the weights of the tokens
        norm = {"loss_norm": 16.0} if mode == "seq-mean-token-sum-norm" else {}
        learn(walks(), advantage="dr_grpo", loss_agg=mode, grad_clip=1e9, **norm)
        norms[mode] = learn.last["policy/grad_norm"]  # type: ignore[attr-defined]
    for one, two in combinations(modes, 2):
        assert norms[one] != pytest.approx(norms[two], rel=1e-3), (one, two)
    assert norms["seq-mean-token-sum"] == pytest.approx(16.0 * norms["seq-mean-token-sum-norm"], rel=1e-3)


def test_each_epoch_is_an_update_of_its_own(learn: Learn) -> None:
    found = {}
    for epochs in (1, 2):
        found[epochs] = learn(walks(), advantage="grpo", epochs=epochs, minibatches=2)
        assert learn.last["learner/updates"] == 2.0 * epochs  # type: ignore[attr-defined]
    assert differ(found[1], found[2])


@pytest.mark.seconds
def test_lam_decides_how_far_a_score_reaches_back(learn: Learn) -> None:
    batch = two_rounds(score=1.0)
    losses = {}
    for lam in (0.0, 0.5, 1.0):
        learn(batch, advantage="gae", critic="shared", gamma=1.0, lam=lam)
        losses[lam] = learn.last["critic/vf_loss"]  # type: ignore[attr-defined]
    # The critic says 0: a token's target is what is left of the score after so many trained tokens.
    for lam, found in losses.items():
        targets = [lam**after for after in range(4)] + [0.0, 0.0]
        assert found == pytest.approx(0.5 * sum(target**2 for target in targets) / 6), lam


@pytest.mark.seconds
@pytest.mark.parametrize("advantage", GROUPED)
def test_scores_of_rounds_are_scores_for_estimators_that_compare_a_group(learn: Learn, advantage: str) -> None:
    of_rounds = learn(two_rounds(score=0.25, round_scores={0: 0.25, 1: 0.5}), advantage=advantage)
    whole = learn(two_rounds(score=1.0), advantage=advantage)
    assert_same_weights(of_rounds, whole)
    alone = learn(two_rounds(score=0.25), advantage=advantage, grad_clip=1e9)
    norm = learn.last["policy/grad_norm"]  # type: ignore[attr-defined]
    learn(two_rounds(score=1.0), advantage=advantage, grad_clip=1e9)
    factor = 1.0 if advantage == "grpo" else 4.0  # which divides by the deviation
    assert learn.last["policy/grad_norm"] == pytest.approx(factor * norm, rel=1e-3)  # type: ignore[attr-defined]
    assert alone.keys() == whole.keys()


@pytest.mark.seconds
@pytest.mark.parametrize("advantage", ["dr_grpo", "rloo", "opo"])
def test_gamma_discounts_the_score_of_later_rounds_for_them_too(learn: Learn, advantage: str) -> None:
    norms = {}
    for gamma in (1.0, 0.5):
        learn(two_rounds(score=1.0), advantage=advantage, gamma=gamma, grad_clip=1e9)
        norms[gamma] = learn.last["policy/grad_norm"]  # type: ignore[attr-defined]
    assert norms[0.5] == pytest.approx(0.5 * norms[1.0], rel=1e-3) and norms[1.0] > 0.0


@pytest.mark.seconds
@pytest.mark.parametrize("advantage", GROUPED)
def test_kl_in_the_reward_moves_weights_where_all_scores_are_equal(learn: Learn, advantage: str) -> None:
    kl = {"coef": 0.5, "kind": "k1", "in_reward": True}
    equal = two_rounds(score=0.0)
    learn(two_rounds(score=1.0), equal, advantage=advantage, kl=kl, lr=1e-2)
    assert learn.last["policy/grad_norm"] > 1e-4  # type: ignore[attr-defined]
    learn(two_rounds(score=1.0), equal, advantage=advantage, lr=1e-2)
    assert learn.last["policy/grad_norm"] == 0.0  # type: ignore[attr-defined]


@pytest.mark.seconds
def test_kl_in_the_reward_keeps_the_policy_near_the_reference(learn: Learn) -> None:
    found = {}
    for coef in (1e-6, 0.1):
        kl = {"coef": coef, "kind": "k1", "in_reward": True}
        learn(*[two_rounds(score=1.0)] * 4, advantage="dr_grpo", kl=kl, keep_versions=4)
        found[coef] = learn.last["policy/kl_ref"]  # type: ignore[attr-defined]
    assert 0.0 < found[0.1] < 0.6 * found[1e-6]


@pytest.mark.seconds
@pytest.mark.parametrize("advantage", ["gae", "reinforce_plus_plus", *GROUPED])
def test_rows_that_train_one_token_each_change_the_weights(learn: Learn, advantage: str) -> None:
    rows = [make_row([1, token], mask=[0, 1], episode=f"0-{token}-0", score=float(token == 5)) for token in (5, 7)]
    before, after = (learn(TrainBatch(rows=rows), advantage=advantage, lr=lr) for lr in (0.0, 1e-3))
    assert differ(before, after)
    assert learn.last["learner/trained_tokens"] == 2.0  # type: ignore[attr-defined]


def test_branches_of_equal_scores_are_compared_like_episodes_of_their_own(learn: Learn) -> None:
    other = make_row([1, 7], mask=[0, 1], episode="0-1-0", score=0.0)

    def batch(*episodes: str, **scores: float) -> TrainBatch:
        tokens = zip(([1, 2, 3], [1, 4, 5]), episodes, strict=True)
        rows = [make_row(ids, mask=[0, 1, 1], episode=name, loss_weight=0.5, **scores) for ids, name in tokens]
        return TrainBatch(rows=[*rows, other])

    branches = learn(batch("0-0-0", "0-0-0", score=0.5, branch_score=1.0), advantage="dr_grpo", grad_clip=1e9)
    norm = learn.last["policy/grad_norm"]  # type: ignore[attr-defined]
    episodes = learn(batch("0-0-0", "0-2-0", score=1.0), advantage="dr_grpo", grad_clip=1e9)
    assert_same_weights(branches, episodes)
    assert norm == pytest.approx(learn.last["policy/grad_norm"], rel=1e-4)  # type: ignore[attr-defined]


CRITIC = {"advantage": "gae", "critic": "shared"}
IN_REWARD = {"coef": 0.5, "kind": "k1", "in_reward": True}


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("base", "changes", "num_steps"),
    [
        (
            {"advantage": "grpo", "epochs": 2, "lr": 1e-4},
            [
                {"lr": 2e-4},
                {"lr_warmup_steps": 5},
                {"minibatches": 2},
                {"entropy_coef": 0.1},
                {"clip": {"low": 1e-4, "high": 1e-4}},
                {"loss": "cispo"},
                {"correction": "none"},
                {"advantage": "dr_grpo"},
                {"kl": {"coef": 0.5}},
                {"kl": {"coef": 0.5, "kind": "k1"}},
                {"temperature": 0.5},
            ],
            1,
        ),
        ({**CRITIC, "lr": 1e-2, "kl": IN_REWARD}, [{"kl": {**IN_REWARD, "kind": "k2"}}, {"kl": {"coef": 0.5}}], 2),
        (CRITIC, [{"gamma": 0.5}, {"lam": 0.5}], 1),
    ],
    ids=["losses", "KL", "critic"],
)
def test_settings_change_what_steps_make_of_the_weights(
    learn: Learn, base: dict[str, Any], changes: list[dict[str, Any]], num_steps: int
) -> None:
    batches = [_of_two_rounds(walks(group_size=2, seed=seed)) for seed in range(num_steps)]
    found = [learn(*batches, **base), *(learn(*batches, **{**base, **change}) for change in changes)]
    names = ["unchanged", *map(str, changes)]
    for (one, name), (two, other) in combinations(zip(found, names, strict=True), 2):
        assert differ(one, two), f"{name} and {other} end in the same weights"


def _of_two_rounds(batch: TrainBatch) -> TrainBatch:
    """Each row's trained tokens after the first one are another round's."""
    rows = []
    for row in batch.rows:
        rounds = row.rounds.copy()
        rounds[np.flatnonzero(row.mask)[1:]] = 1
        rows.append(replace(row, rounds=rounds))
    return replace(batch, rows=rows)


@pytest.mark.seconds
def test_a_separate_critic_learns_at_its_own_rate(learn: Learn) -> None:
    values = []
    for critic_lr in (0.0, 1e-3):
        learn(two_rounds(score=1.0), two_rounds(score=1.0), advantage="gae", critic="separate", critic_lr=critic_lr)
        values.append(learn.last["critic/value_mean"])  # type: ignore[attr-defined]
    assert values[0] == 0.0 and abs(values[1]) > 1e-3


@pytest.mark.seconds
def test_a_gradient_that_is_clipped_is_no_longer_than_the_clip(learn: Learn) -> None:
    """Adam forgets the length of a first gradient; that of a second, beside the first, it does not."""
    batches = [walks(group_size=2, seed=seed) for seed in range(2)]
    free, clipped = (learn(*batches, advantage="dr_grpo", grad_clip=clip) for clip in (1e9, 1e-4))
    assert differ(free, clipped)


@pytest.mark.seconds
def test_the_check_of_logprobs_tells_what_it_could_check(learn: Learn) -> None:
    learn(walks(group_size=2), advantage="dr_grpo")
    assert learn.last["policy/checked_share"] == 1.0  # type: ignore[attr-defined]
    learn(walks(group_size=2, version=-1), advantage="dr_grpo")  # of a version that this learner never had
    figures = learn.last  # type: ignore[attr-defined]
    names = ("policy/checked_share", "policy/max_logprob_diff", "policy/mean_logprob_diff")
    assert [figures[name] for name in names] == [0.0, 0.0, 0.0] and figures["policy/lag_mean"] == 1.0
    learn(walks(group_size=2), advantage="dr_grpo", check_logprobs=False)
    assert not set(names) & learn.last.keys()  # type: ignore[attr-defined]


def test_tokens_that_are_too_old_are_counted_and_have_no_part_in_the_lag(learn: Learn) -> None:
    """Two versions are kept: at version 0 a token of version -2 is too old by one."""
    rows = [make_row([1, 2], mask=[0, 1], version=version, episode=f"0{version}-0") for version in (0, -1, -2, -2)]
    learn(TrainBatch(rows=rows), advantage="dr_grpo")
    names = ("policy/lag_mean", "policy/lag_max", "policy/too_old_share")
    assert [learn.last[name] for name in names] == [0.5, 1.0, 0.5]  # type: ignore[attr-defined]


def test_half_of_the_rows_of_an_older_version_are_checked_where_that_is_asked(learn: Learn) -> None:
    rows = [make_row([1, 2], mask=[0, 1], episode=f"0-{sample}-0") for sample in range(4)]
    learn(*[TrainBatch(rows=rows)] * 2, advantage="dr_grpo", check_logprobs=0.5)
    assert learn.last["policy/checked_share"] == 0.5  # type: ignore[attr-defined]


def test_equal_scores_teach_nothing_beside_the_optimal_token_baseline(learn: Learn) -> None:
    """The baseline is a mean weighed by the energy of the policy's own probabilities: without them it would be 0."""
    learn(walks(group_size=2), advantage="otb")
    assert learn.last["policy/grad_norm"] > 0.0  # type: ignore[attr-defined]
    equal = [make_row([1, 2, token], mask=[0, 1, 1], episode=f"0-{token}-0", score=1.0) for token in (5, 7)]
    learn(TrainBatch(rows=equal), advantage="otb")
    assert learn.last["policy/grad_norm"] == 0.0  # type: ignore[attr-defined]


def test_what_a_hint_says_reaches_the_weights(learn: Learn) -> None:
    failed = two_rounds(score=0.0)
    hinted = [
        replace(failed, rows=[replace(row, hint=hint) for row in failed.rows]) for hint in ("<|im_end|>" * 3, "Two.")
    ]
    one, other = (learn(batch, advantage="none", critic="none", hints={"coef": 1.0}) for batch in hinted)
    assert differ(one, other)
