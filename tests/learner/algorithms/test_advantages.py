"""Rules of learner/algorithms/advantages.py, against numbers computed by hand."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    calibrated,
    calibrated_evidence,
    difficulty,
    dr_grpo,
    explained_variance,
    final_rewards,
    gae,
    grpo,
    opo,
    remax,
    rewards_to_go,
    rloo,
    unit_returns,
    whiten,
)

GROUPED = {"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "cpo"}


def _gae(rewards: Tensor, *, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    return gae(rewards, values=values, mask=mask, discounts=torch.full_like(values, gamma), lam=lam)


def test_gae_steps_over_an_observation_without_discount_or_value() -> None:
    values = torch.tensor([[0.5, 9.0, 0.2, -0.1]])
    mask = torch.tensor([[True, False, True, True]])
    rewards = final_rewards(torch.tensor([1.0]), mask=mask)
    advantages, returns = _gae(rewards, values=values, mask=mask, gamma=0.9, lam=0.8)
    # A3 = 1 + 0.1; A2 = 0.9 * -0.1 - 0.2 + 0.72 * A3; A0 = 0.9 * 0.2 - 0.5 + 0.72 * A2
    torch.testing.assert_close(advantages, torch.tensor([[0.04144, 0.0, 0.502, 1.1]]))
    torch.testing.assert_close(returns, torch.tensor([[0.54144, 0.0, 0.702, 1.0]]))


def test_gae_with_observations_equals_gae_without_them() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(1, 20, generator=generator) < 0.4
    values = torch.randn(1, 20, generator=generator)
    rewards = final_rewards(torch.tensor([0.7]), mask=mask)
    spaced, _ = _gae(rewards, values=values, mask=mask, gamma=0.95, lam=0.9)
    dense, _ = _gae(
        rewards[mask][None], values=values[mask][None], mask=torch.ones_like(values[mask][None], dtype=torch.bool),
        gamma=0.95, lam=0.9,
    )  # fmt: skip
    torch.testing.assert_close(spaced[mask], dense[0])
    assert torch.all(spaced[~mask] == 0.0)


def test_gae_with_gamma_and_lambda_one_returns_the_score_everywhere() -> None:
    mask = torch.tensor([[True, True, False, True], [True, False, False, False]])
    rewards = final_rewards(torch.tensor([2.0, -1.0]), mask=mask)
    _, returns = _gae(rewards, values=torch.randn(2, 4), mask=mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[2.0, 2.0, 0.0, 2.0], [-1.0, 0.0, 0.0, 0.0]]))


def test_discount_applies_where_a_round_ends() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    rewards = torch.tensor([[0.0, 1.0, 0.0, 4.0]])  # rounds of two tokens, each with a score at its end
    discounts = torch.tensor([[1.0, 0.5, 1.0, 1.0]])
    torch.testing.assert_close(
        rewards_to_go(rewards, mask=mask, discounts=discounts), torch.tensor([[3.0, 3.0, 4.0, 4.0]])
    )
    values = torch.tensor([[0.0, 0.0, 2.0, 0.0]])
    advantages, _ = gae(rewards, values=values, mask=mask, discounts=discounts, lam=1.0)
    torch.testing.assert_close(advantages, torch.tensor([[3.0, 3.0, 2.0, 4.0]]))


def test_score_lands_on_the_last_trained_token_only() -> None:
    mask = torch.tensor([[True, False, True, False], [False, False, False, False]])
    expected = torch.tensor([[0.0, 0.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert torch.equal(final_rewards(torch.tensor([3.0, 5.0]), mask=mask), expected)


SCORES = torch.tensor([1.0, 10.0, 0.0, 0.0, 30.0, 1.0])
GROUPS = torch.tensor([7, 3, 7, 7, 3, 7])
"""Group 7: mean 0.5, std sqrt(1/3); group 3: mean 20, std sqrt(200)."""


def test_grpo_is_the_distance_from_the_group_mean_in_sample_deviations() -> None:
    expected = torch.tensor([0.8660254, -0.7071068, -0.8660254, -0.8660254, 0.7071068, 0.8660254])
    torch.testing.assert_close(grpo(SCORES, groups=GROUPS), expected)


def test_dr_grpo_is_the_distance_from_the_group_mean() -> None:
    expected = torch.tensor([0.5, -10.0, -0.5, -0.5, 10.0, 0.5])
    torch.testing.assert_close(dr_grpo(SCORES, groups=GROUPS), expected)


def test_rloo_is_the_distance_from_the_mean_of_the_others() -> None:
    expected = torch.tensor([1 - 1 / 3, 10 - 30, -2 / 3, -2 / 3, 30 - 10, 1 - 1 / 3])
    torch.testing.assert_close(rloo(SCORES, groups=GROUPS), expected)


def test_opo_weighs_the_mean_by_length() -> None:
    lengths = torch.tensor([2.0, 1.0, 3.0, 1.0, 4.0, 2.0])
    # group 7: (2 * 1 + 2 * 1) / 8; group 3: (10 + 4 * 30) / 5
    expected = torch.tensor([0.5, 10 - 26, -0.5, -0.5, 30 - 26, 0.5])
    torch.testing.assert_close(opo(SCORES, groups=GROUPS, lengths=lengths), expected)


def test_remax_is_the_distance_from_the_greedy_score() -> None:
    assert remax(torch.tensor([1.0, 0.0]), baselines=torch.tensor([0.25, 0.25])).tolist() == [0.75, -0.25]


def test_difficulty_tells_groups_where_nobody_or_everybody_succeeded() -> None:
    scores = torch.tensor([0.0, -1.0, 1.0, 0.5, 0.0, 1.0, 0.0])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 5])
    assert difficulty(scores, groups=groups).tolist() == [-1, -1, 1, 1, 0, 0, -1]


def test_whitening_weighs_tokens_and_leaves_the_masked_at_zero() -> None:
    values = torch.tensor([1.0, 4.0, 99.0])
    whitened = whiten(values, weights=torch.tensor([2.0, 1.0, 0.0]))
    # mean 2, variance (2 * 1 + 4) / 3 = 2
    torch.testing.assert_close(whitened, torch.tensor([-(0.5**0.5), 2**0.5, 0.0]))


def test_whitening_equal_values_gives_zero() -> None:
    assert torch.equal(whiten(torch.full((5,), 3.0), weights=torch.ones(5)), torch.zeros(5))


def test_whitening_does_not_scale_small_errors_up_to_evidence() -> None:
    whitened = whiten(torch.tensor([0.01, -0.01]), weights=torch.ones(2))
    torch.testing.assert_close(whitened, torch.tensor([0.1, -0.1]))


def _evidence(**changes: Any) -> AdvantageInputs:
    """Group 4: a unit of two rows (2 tokens, 1 token) with score 1, a unit of one row with score 0."""
    base: dict[str, Any] = {
        "scores": torch.tensor([1.0, 0.0]),
        "groups": torch.tensor([4, 4]),
        "units": torch.tensor([0, 0, 1]),
        "mask": torch.tensor([[True, True], [True, False], [True, True]]),
        "rewards": torch.zeros(3, 2),
        "discounts": torch.ones(3, 2),
        "weights": torch.tensor([[0.5, 0.5], [0.5, 0.0], [1.0, 1.0]]),
        "values": torch.zeros(3, 2),
        "lam": 1.0,
    }
    return AdvantageInputs(**(base | changes))


def test_unit_of_two_rows_counts_once_in_its_group() -> None:
    estimate = ESTIMATORS["grpo"].compute(_evidence())
    half = 0.7071068  # mean 0.5 and not 2/3: two units, not three rows
    torch.testing.assert_close(estimate.advantages, torch.tensor([[half, half], [half, 0.0], [-half, -half]]))
    assert torch.equal(estimate.returns, torch.zeros(3, 2))


def test_return_of_a_unit_adds_its_rounds_and_counts_its_score_once() -> None:
    rewards = torch.tensor([[0.25, 0.0], [0.5, 7.0], [-1.0, 0.0]])  # 7 is no token
    assert unit_returns(_evidence(rewards=rewards)).tolist() == [1.75, -1.0]


def test_return_of_a_unit_discounts_round_by_round() -> None:
    discounts = torch.tensor([[0.5, 0.9], [0.9, 0.9], [0.5, 1.0]])
    rewards = torch.tensor([[0.0, 0.4], [0.0, 0.0], [0.0, 3.0]])
    # first unit: the score is half at the end of one row and whole at that of the other; 0.4 comes after a discount
    assert unit_returns(_evidence(discounts=discounts, rewards=rewards)).tolist() == pytest.approx([0.75 + 0.2, 1.5])


def test_gae_estimator_whitens_advantages_but_not_the_critics_targets() -> None:
    estimate = ESTIMATORS["gae"].compute(_evidence())
    assert torch.equal(estimate.returns, torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]))
    # weighted mean 1.5 / 3.5, variance mean * (1 - mean)
    mean = 1.5 / 3.5
    deviation = (mean * (1 - mean)) ** 0.5
    high, low = (1 - mean) / deviation, -mean / deviation
    torch.testing.assert_close(estimate.advantages, torch.tensor([[high, high], [high, 0.0], [low, low]]))


def test_gae_estimator_sees_round_scores_and_discounts() -> None:
    evidence = _evidence(
        rewards=torch.tensor([[0.2, 0.0], [0.0, 0.0], [0.0, 0.0]]),
        discounts=torch.tensor([[0.5, 1.0], [1.0, 1.0], [0.5, 1.0]]),
    )
    returns = ESTIMATORS["gae"].compute(evidence).returns
    torch.testing.assert_close(returns, torch.tensor([[0.7, 1.0], [1.0, 0.0], [0.0, 0.0]]))


def test_reinforce_plus_plus_whitens_the_rewards_to_go_of_the_batch() -> None:
    evidence = _evidence(weights=torch.ones(3, 2) * torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]))
    evidence.rewards[0, 0] = 0.5
    found = ESTIMATORS["reinforce_plus_plus"].compute(evidence).advantages
    raw = torch.tensor([1.5, 1.0, 1.0, 0.0, 0.0])
    white = (raw - 0.7) / raw.std(unbiased=False)
    torch.testing.assert_close(found[evidence.mask], white)
    assert float(found[1, 1]) == 0.0


def test_reinforce_plus_plus_baseline_takes_the_group_mean_off_before_whitening() -> None:
    evidence = _evidence(
        scores=torch.tensor([1.0, 0.0, 5.0, 5.0]), groups=torch.tensor([4, 4, 6, 6]), units=torch.arange(4),
        mask=torch.ones(4, 1, dtype=torch.bool), rewards=torch.zeros(4, 1), discounts=torch.ones(4, 1),
        weights=torch.ones(4, 1), values=torch.zeros(4, 1),
    )  # fmt: skip
    found = ESTIMATORS["reinforce_plus_plus_baseline"].compute(evidence).advantages
    torch.testing.assert_close(found, torch.tensor([[2.0**0.5], [-(2.0**0.5)], [0.0], [0.0]]))


def test_opo_estimator_counts_the_trained_tokens_of_a_unit() -> None:
    found = ESTIMATORS["opo"].compute(_evidence()).advantages
    # 3 tokens with score 1, 2 with score 0: baseline 0.6
    torch.testing.assert_close(found, torch.tensor([[0.4, 0.4], [0.4, 0.0], [-0.6, -0.6]]))


def test_remax_estimator_needs_a_greedy_score() -> None:
    found = ESTIMATORS["remax"].compute(_evidence(baselines=torch.tensor([0.25, 0.25]))).advantages
    torch.testing.assert_close(found, torch.tensor([[0.75, 0.75], [0.75, 0.0], [-0.25, -0.25]]))
    with pytest.raises(ValueError, match="advantage=remax needs a greedy episode in each group"):
        ESTIMATORS["remax"].compute(_evidence())


def test_cpo_follows_the_hint_only_where_all_failed() -> None:
    hinted = torch.tensor([[0.3, -0.1], [9.0, 9.0], [-9.0, 0.2]])
    mixed = ESTIMATORS["cpo"].compute(_evidence(hinted=hinted)).advantages
    torch.testing.assert_close(mixed, ESTIMATORS["grpo"].compute(_evidence()).advantages)
    failed = ESTIMATORS["cpo"].compute(_evidence(hinted=hinted, scores=torch.zeros(2))).advantages
    limit = math.log(2.0)
    torch.testing.assert_close(failed, torch.tensor([[0.3, -0.1], [limit, 0.0], [-limit, 0.2]]))
    with pytest.raises(ValueError, match="advantage=cpo needs hints"):
        ESTIMATORS["cpo"].compute(_evidence())


@pytest.mark.parametrize("name", sorted(GROUPED))
@pytest.mark.parametrize("scores", [[0.1], [0.1] * 7, [3.0, 3.0]])
def test_group_of_one_or_of_equal_scores_has_no_advantage(name: str, scores: list[float]) -> None:
    num = len(scores)
    evidence = _evidence(
        scores=torch.tensor(scores), groups=torch.zeros(num, dtype=torch.long), units=torch.arange(num),
        mask=torch.ones(num, 2, dtype=torch.bool), rewards=torch.zeros(num, 2), discounts=torch.ones(num, 2),
        weights=torch.ones(num, 2), values=torch.zeros(num, 2), hinted=torch.ones(num, 2),
    )  # fmt: skip
    advantages = ESTIMATORS[name].compute(evidence).advantages
    torch.testing.assert_close(advantages, torch.zeros(num, 2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_masked_tokens_have_no_advantage_whatever_is_written_there(name: str) -> None:
    noise = {field: torch.where(_evidence().mask, 0.3, 1e6) for field in ("values", "rewards", "hinted", "discounts")}
    clean = {field: torch.where(_evidence().mask, 0.3, 0.0) for field in noise}
    greedy = torch.tensor([0.5, 0.5])
    noisy, quiet = (ESTIMATORS[name].compute(_evidence(**beside, baselines=greedy)) for beside in (noise, clean))
    assert torch.equal(noisy.advantages, quiet.advantages)
    assert torch.equal(noisy.returns, quiet.returns)
    assert bool((quiet.advantages[~_evidence().mask] == 0.0).all())


def test_table_says_what_each_estimator_needs() -> None:
    assert [name for name, estimator in ESTIMATORS.items() if estimator.needs_critic] == ["gae"]
    assert [name for name, estimator in ESTIMATORS.items() if estimator.needs_hints] == ["cpo"]
    assert set(ESTIMATORS) == set(LearnerConfig.model_fields["advantage"].annotation.__args__)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ([0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0]),  # right: as it is
        ([0.5, 1.0, 0.5, 1.0], [0.5, 1.0, 0.5, 1.0]),  # they differ half as much as it says, around another mean
        ([0.0, 2.0, 0.0, 2.0], [0.5, 1.5, 0.5, 1.5]),  # never more than it says
        ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]),  # solved: what it says is its error
        ([1.0, 0.0, 1.0, 0.0], [0.5, 0.5, 0.5, 0.5]),  # the contrary: not believed
    ],
)
def test_values_are_believed_as_far_as_returns_bear_them_out(returns: list[float], expected: list[float]) -> None:
    values, found = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor(returns)
    torch.testing.assert_close(calibrated(values, returns=found, weights=torch.ones(4)), torch.tensor(expected))


def test_tokens_that_are_not_trained_have_no_say_and_take_part() -> None:
    values, returns = torch.tensor([0.0, 1.0, 4.0]), torch.tensor([0.0, 0.5, 99.0])
    found = calibrated(values, returns=returns, weights=torch.tensor([2.0, 2.0, 0.0]))
    torch.testing.assert_close(found, torch.tensor([0.0, 0.5, 2.0]))


def test_values_of_a_fresh_critic_become_the_mean_return() -> None:
    found = calibrated(torch.zeros(3), returns=torch.tensor([0.0, 1.0, 1.0]), weights=torch.tensor([0.5, 0.25, 0.25]))
    torch.testing.assert_close(found, torch.full((3,), 0.5))


def test_evidence_is_calibrated_on_the_rewards_to_go() -> None:
    evidence = _evidence(
        rewards=torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.0, 0.0]]),
        values=torch.tensor([[1.0, 1.0], [1.0, 9.0], [-1.0, -1.0]]),  # 9: masked
    )
    # returns 1.5, 1; 1; 0, 0 of mean 0.5; values of mean -1/7; cov = 2 / 3.5, var = 24/7 / 3.5
    found = calibrated_evidence(evidence)
    expected = torch.tensor([7 / 6, 7 / 6, 7 / 6, 0.0, 0.0])
    torch.testing.assert_close(found.values[evidence.mask], expected, atol=1e-6, rtol=0)
    assert found.scores is evidence.scores


def test_explained_variance_of_perfect_blind_and_constant() -> None:
    returns = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert explained_variance(returns, returns=returns) == 1.0
    assert explained_variance(torch.zeros(4), returns=returns) == 0.0
    assert explained_variance(torch.zeros(4), returns=torch.ones(4)) == 0.0


def test_mathematics_needs_no_engine_no_cluster_and_no_model_library() -> None:
    modules = ", ".join(f"learner.algorithms.{name}" for name in ("advantages", "losses", "importance_weights", "kl"))
    code = f"import sys, {modules}; print(sorted({{'ray', 'transformers', 'vllm', 'tensordict'}} & set(sys.modules)))"
    root = Path(__file__).parents[3]
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.strip() == "[]"
