"""Rules of learner/algorithms/advantages.py, against numbers computed by hand."""

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
    dr_grpo,
    explained_variance,
    final_rewards,
    gae,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    remax,
    rewards_to_go,
    rloo,
    score_scale,
    unit_returns,
    whiten,
)
from tests.support.patience import PATIENCE_S

GROUPED = set(ESTIMATORS) - {"gae", "remax", "reinforce_plus_plus", "none"}


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


def test_gpg_makes_up_for_groups_without_a_gradient() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(gpg(scores, groups=groups), torch.tensor([1.0, -1.0, 0.0, 0.0]))  # alpha 4 / 2
    torch.testing.assert_close(gpg(SCORES, groups=GROUPS), dr_grpo(SCORES, groups=GROUPS))
    silent = torch.tensor([1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(gpg(silent, groups=groups), torch.tensor([1.0, -1.0, 0.0, 0.0]))


def test_passk_rewards_the_best_of_a_group_by_its_lead() -> None:
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 20 / 200**0.5, 0.0])  # two are best in group 7
    torch.testing.assert_close(grpo_passk(SCORES, groups=GROUPS), expected)


def test_gdpo_normalises_each_judge_before_the_sum() -> None:
    one, nan = 0.5**0.5, torch.nan
    judged = torch.tensor([[100.0, 0.2], [0.0, 0.1], [3.0, nan], [3.0, 0.5]])
    found = gdpo(judged, groups=torch.tensor([0, 0, 1, 1]))
    # a judge of a hundred counts as much as one of a tenth; a judge that scored one member only is silent
    torch.testing.assert_close(found, torch.tensor([2 * one, -2 * one, 0.0, 0.0]))


@pytest.mark.parametrize("size", [0.9, 90_000.0])
@pytest.mark.parametrize("rule", [grpo, dr_grpo, rloo, gpg, grpo_passk])
def test_equal_scores_up_to_rounding_are_no_evidence(rule: Any, size: float) -> None:
    scores = torch.tensor([size, size, torch.nextafter(torch.tensor(size), torch.tensor(2 * size)).item()])
    assert rule(scores, groups=torch.zeros(3, dtype=torch.long)).tolist() == [0.0, 0.0, 0.0]


def test_equal_scores_are_equal_returns_whatever_the_number_of_rows() -> None:
    for k in range(1, 21):
        for rows in range(2, 11):
            num = rows + 3
            units = torch.tensor([0] * rows + [1, 2, 3])
            evidence = _evidence(
                scores=torch.full((4,), k / 20), groups=torch.zeros(4, dtype=torch.long), units=units,
                mask=torch.ones(num, 2, dtype=torch.bool), rewards=torch.zeros(num, 2), discounts=torch.ones(num, 2),
                weights=torch.ones(num, 2), values=torch.zeros(num, 2), energy=torch.ones(num, 2),
            )  # fmt: skip
            assert len(set(unit_returns(evidence).tolist())) == 1
            for name in GROUPED:
                assert not ESTIMATORS[name].compute(evidence).advantages.any(), (name, k, rows)


def test_an_observation_does_not_discount() -> None:
    mask = torch.tensor([[True, False, True]])
    evidence = _evidence(
        scores=torch.tensor([1.0]), groups=torch.tensor([0]), units=torch.tensor([0]), mask=mask,
        rewards=torch.zeros(1, 3), discounts=torch.tensor([[0.5, 9.0, 1.0]]), weights=mask.float(), values=torch.zeros(1, 3),
    )  # fmt: skip
    assert unit_returns(evidence).tolist() == [0.5]


def test_opo_weighs_the_mean_by_length() -> None:
    lengths = torch.tensor([2.0, 1.0, 3.0, 1.0, 4.0, 2.0])
    # group 7: (2 * 1 + 2 * 1) / 8; group 3: (10 + 4 * 30) / 5
    expected = torch.tensor([0.5, 10 - 26, -0.5, -0.5, 30 - 26, 0.5])
    torch.testing.assert_close(opo(SCORES, groups=GROUPS, lengths=lengths), expected)


def test_remax_is_the_distance_from_the_greedy_score() -> None:
    assert remax(torch.tensor([1.0, 0.0]), baselines=torch.tensor([0.25, 0.25])).tolist() == [0.75, -0.25]


def test_whitening_weighs_tokens_and_leaves_the_masked_at_zero() -> None:
    values = torch.tensor([1.0, 4.0, 99.0])
    whitened = whiten(values, weights=torch.tensor([2.0, 1.0, 0.0]), size=1.0, min_deviation=0.1)
    # mean 2, variance (2 * 1 + 4) / 3 = 2
    torch.testing.assert_close(whitened, torch.tensor([-(0.5**0.5), 2**0.5, 0.0]))


def test_values_that_differ_by_little_are_calibrated_too() -> None:
    values = 1.0 + 1e-3 * torch.tensor([[-1.0], [1.0], [-2.0], [2.0], [0.0], [0.5]])
    found = calibrated(values, returns=values, weights=torch.ones(6, 1), units=torch.arange(6))
    torch.testing.assert_close(found, values, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_values_that_differ_by_the_rounding_of_the_largest_are_not_told_apart(size: float) -> None:
    values = size * torch.tensor([[1.0], [0.0], [1e-7], [0.0], [1e-7], [0.0]])
    returns = torch.tensor([[0.0], [0.0], [1.0], [0.0], [1.0], [0.0]])
    found = calibrated(values, returns=returns, weights=torch.ones(6, 1), units=torch.arange(6))
    torch.testing.assert_close(found[0], torch.tensor([0.4]))  # the mean of the five others


def test_whitening_equal_values_gives_zero() -> None:
    for value in (3.0, 0.9, 0.1):
        found = whiten(torch.full((5,), value), weights=torch.rand(5), size=1.0, min_deviation=0.0)
        assert torch.equal(found, torch.zeros(5))
    assert not whiten(torch.ones(5), weights=torch.ones(5), size=0.0, min_deviation=0.0).any()
    tiny = torch.tensor([1e-8, -1e-8])  # what is left of a difference of numbers of size 1
    assert torch.equal(whiten(tiny, weights=torch.ones(2), size=1.0, min_deviation=0.0), torch.zeros(2))


def test_whitening_does_not_scale_small_errors_up_to_evidence() -> None:
    for size in (1.0, 100.0, 0.01):
        errors = size * torch.tensor([0.01, -0.01])
        whitened = whiten(errors, weights=torch.ones(2), size=size, min_deviation=0.1)
        torch.testing.assert_close(whitened, torch.tensor([0.1, -0.1]))
        full = whiten(errors, weights=torch.ones(2), size=size, min_deviation=0.0)
        torch.testing.assert_close(full, torch.tensor([1.0, -1.0]))


def test_the_size_of_scores_is_that_of_the_largest_or_of_the_critics_values() -> None:
    assert score_scale(torch.tensor([0.5, -2.0]), values=torch.zeros(3)) == 2.0
    assert score_scale(torch.tensor([0.0, 0.01]), values=torch.full((3,), 3.0)) == 3.0
    assert score_scale(torch.zeros(2), values=torch.zeros(3)) == 1.0
    assert score_scale(torch.tensor([1e9]), values=torch.zeros(3)) == 1e6


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
        "scale": 1.0,
        "min_deviation": 0.1,
        "energy": torch.tensor([[1.0, 1.0], [2.0, 0.0], [3.0, 1.0]]),
    }
    return AdvantageInputs(**(base | changes))


def _single(scores: list[float], groups: list[int], **changes: Any) -> AdvantageInputs:
    """Units of one row of one token each."""
    num = len(scores)
    base: dict[str, Any] = {
        "scores": torch.tensor(scores), "groups": torch.tensor(groups), "units": torch.arange(num),
        "mask": torch.ones(num, 1, dtype=torch.bool), "rewards": torch.zeros(num, 1), "discounts": torch.ones(num, 1),
        "weights": torch.ones(num, 1), "values": torch.zeros(num, 1), "energy": torch.ones(num, 1),
    }  # fmt: skip
    return _evidence(**(base | changes))


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


def test_gdpo_estimator_whitens_and_takes_the_score_where_judges_are_not_told_apart() -> None:
    weights = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    alone = ESTIMATORS["gdpo"].compute(_evidence(weights=weights)).advantages
    # three tokens up, two down: mean 0.2, deviation sqrt(0.96), of +-1 / sqrt(2)
    high, low = 0.8 / 0.96**0.5, -1.2 / 0.96**0.5
    torch.testing.assert_close(alone, torch.tensor([[high, high], [high, 0.0], [low, low]]))
    against = torch.tensor([[1.0, 0.0], [0.0, 5.0]])
    assert not ESTIMATORS["gdpo"].compute(_evidence(weights=weights, judges=against)).advantages.any()


def test_gdpo_adds_rewards_beside_the_score_in_units_of_the_scores_size() -> None:
    rewards = torch.tensor([[0.0], [0.0], [2.0], [0.0]])
    evidence = _single([1.0, 0.0, 5.0, 5.0], [4, 4, 6, 6], rewards=rewards, scale=4.0)
    found = ESTIMATORS["gdpo"].compute(evidence).advantages
    # +-sqrt(0.5) of the first group, +-0.25 of the second: mean 0, variance (1 + 0.125) / 4
    one, two = (0.5 / 0.28125) ** 0.5, 0.25 / 0.28125**0.5
    torch.testing.assert_close(found, torch.tensor([[one], [-one], [two], [-two]]))


def test_gdpo_divides_by_the_least_deviation_of_normalised_scores() -> None:
    evidence = _single([5.0, 5.0], [4, 4], rewards=torch.tensor([[0.1], [0.0]]), min_deviation=0.1)
    found = ESTIMATORS["gdpo"].compute(evidence).advantages
    torch.testing.assert_close(found, torch.tensor([[0.5], [-0.5]]))  # +-0.05, divided by 0.1


def test_otb_weighs_rows_as_the_loss_does() -> None:
    evidence = _single([1.0, 0.0], [4, 4], weights=torch.tensor([[0.5], [1.0]]))
    found = ESTIMATORS["otb"].compute(evidence).advantages
    torch.testing.assert_close(found, torch.tensor([[2 / 3], [-1 / 3]]))


def test_otb_says_nothing_of_what_differs_by_rounding() -> None:
    next_one = torch.nextafter(torch.tensor(1000.0), torch.tensor(2000.0)).item()
    evidence = _single([1000.0, next_one], [4, 4], scale=1000.0)
    assert not ESTIMATORS["otb"].compute(evidence).advantages.any()


def test_otb_weighs_rows_by_what_their_gradients_may_vary() -> None:
    evidence = _evidence(weights=torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]))
    found = ESTIMATORS["otb"].compute(evidence).advantages
    # W: 1, 2; 2; 3, 4. First tokens: (1 + 2) / 6; second: 2 / 6
    torch.testing.assert_close(found, torch.tensor([[0.5, 2 / 3], [0.5, 0.0], [-0.5, -1 / 3]]))
    with pytest.raises(ValueError, match="advantage=otb needs the policy's probabilities"):
        ESTIMATORS["otb"].compute(_evidence(energy=None))


def test_otb_says_nothing_of_a_token_that_weighs_nothing() -> None:
    evidence = _evidence(weights=torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]]))
    found = ESTIMATORS["otb"].compute(evidence).advantages
    assert found[0, 1] == 0.0 and found[0, 0] != 0.0


def test_otb_counts_no_energy_of_a_token_that_is_not_trained() -> None:
    mask = torch.tensor([[True, False, True], [True, True, True]])
    evidence = _evidence(
        scores=torch.tensor([1.0, 0.0]), units=torch.arange(2), mask=mask, rewards=torch.zeros(2, 3),
        discounts=torch.ones(2, 3), weights=mask.float(), values=torch.zeros(2, 3), energy=torch.ones(2, 3),
    )  # fmt: skip
    found = ESTIMATORS["otb"].compute(evidence).advantages
    # W: 1, -, 2; 1, 2, 3. The second token is of one row only
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.0, 0.6], [-0.5, 0.0, -0.4]]))


def test_otb_is_silent_where_one_row_is_alone() -> None:
    evidence = _evidence(mask=torch.tensor([[True, True], [True, False], [True, False]]))
    assert ESTIMATORS["otb"].compute(evidence).advantages[0, 1] == 0.0


def test_remax_estimator_needs_a_greedy_score() -> None:
    found = ESTIMATORS["remax"].compute(_evidence(baselines=torch.tensor([0.25, 0.25]))).advantages
    torch.testing.assert_close(found, torch.tensor([[0.75, 0.75], [0.75, 0.0], [-0.25, -0.25]]))
    with pytest.raises(ValueError, match="advantage=remax needs a greedy episode in each group"):
        ESTIMATORS["remax"].compute(_evidence())


@pytest.mark.parametrize("name", sorted(GROUPED))
@pytest.mark.parametrize("scores", [[0.1], [0.1] * 7, [3.0, 3.0]])
def test_group_of_one_or_of_equal_scores_has_no_advantage(name: str, scores: list[float]) -> None:
    num = len(scores)
    evidence = _evidence(
        scores=torch.tensor(scores), groups=torch.zeros(num, dtype=torch.long), units=torch.arange(num),
        mask=torch.ones(num, 2, dtype=torch.bool), rewards=torch.zeros(num, 2), discounts=torch.ones(num, 2),
        weights=torch.ones(num, 2), values=torch.zeros(num, 2), energy=torch.ones(num, 2),
    )  # fmt: skip
    advantages = ESTIMATORS[name].compute(evidence).advantages
    torch.testing.assert_close(advantages, torch.zeros(num, 2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_masked_tokens_have_no_advantage_whatever_is_written_there(name: str) -> None:
    noise = {field: torch.where(_evidence().mask, 0.3, 1e6) for field in ("values", "rewards", "discounts", "energy")}
    clean = {field: torch.where(_evidence().mask, 0.3, 0.0) for field in noise}
    greedy = torch.tensor([0.5, 0.5])
    noisy, quiet = (ESTIMATORS[name].compute(_evidence(**beside, baselines=greedy)) for beside in (noise, clean))
    assert torch.equal(noisy.advantages, quiet.advantages)
    assert torch.equal(noisy.returns, quiet.returns)
    assert bool((quiet.advantages[~_evidence().mask] == 0.0).all())


def test_table_says_what_each_estimator_needs() -> None:
    assert [name for name, estimator in ESTIMATORS.items() if estimator.needs_critic] == ["gae"]
    assert [name for name, estimator in ESTIMATORS.items() if estimator.needs_energy] == ["otb"]
    in_scores = {name for name, estimator in ESTIMATORS.items() if estimator.in_scores}
    assert in_scores == {"dr_grpo", "rloo", "remax", "opo", "gpg", "otb"}
    assert set(ESTIMATORS) == set(LearnerConfig.model_fields["advantage"].annotation.__args__)  # type: ignore[union-attr]


def _fitted(values: list[float], returns: list[float], **options: Any) -> Tensor:
    """One token for each unit, and a batch of the four times over: the own unit's part is small, and exact."""
    num = len(values)
    weights = options.get("weights", torch.ones(num, 1))
    found = calibrated(
        torch.tensor(values)[:, None], returns=torch.tensor(returns)[:, None], weights=weights, units=torch.arange(num)
    )
    return found[:, 0]


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ([0.0, 1.0] * 4, [0.0, 1.0]),  # right: as it is
        ([0.5, 1.0] * 4, [0.5, 1.0]),  # they differ half as much as it says, around another mean
        ([0.9] * 8, [0.9, 0.9]),  # solved: what it says is its error
    ],
)
def test_values_are_believed_as_far_as_returns_bear_them_out(returns: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(_fitted([0.0, 1.0] * 4, returns)[:2], torch.tensor(expected))


def test_the_fit_leaves_the_own_episode_out() -> None:
    generator = torch.Generator().manual_seed(0)
    values, returns = torch.randn(6, 3, generator=generator), torch.randn(6, 3, generator=generator)
    weights, units = torch.rand(6, 3, generator=generator), torch.tensor([0, 1, 2, 2, 3, 4])
    found = calibrated(values, returns=returns, weights=weights, units=units)
    for row in range(6):
        other = (units != units[row])[:, None] & torch.ones(6, 3, dtype=torch.bool)
        w, v, r = weights[other] / weights[other].sum(), values[other], returns[other]
        apart = v - (w * v).sum()
        slope = float((w * apart * r).sum() / (w * apart**2).sum())
        expected = (w * r).sum() + min(max(slope, 0.0), 1.0) * (values[row] - (w * v).sum())
        torch.testing.assert_close(found[row], expected)
    changed = returns.clone()
    changed[0] += 100.0
    torch.testing.assert_close(calibrated(values, returns=changed, weights=weights, units=units)[0], found[0])


def test_values_that_lie_the_other_way_or_say_too_much_are_cut_back() -> None:
    returns = [1.0, 0.0] * 4
    contrary = _fitted([0.0, 1.0] * 4, returns)
    torch.testing.assert_close(contrary[:2], torch.tensor([3 / 7, 4 / 7]))  # the mean of the seven others
    small = _fitted([0.1 * each for each in returns], returns)
    torch.testing.assert_close(small[0] - small[1], torch.tensor(-1 / 7 + 0.1 + 0.1 / 7))  # never more than it says


def test_a_few_episodes_are_not_enough_for_a_fit() -> None:
    values, returns = [0.3, 0.1, 0.2, 0.4], [1.0, 0.0, 0.0, 1.0]
    assert _fitted(values, returns).tolist() == pytest.approx(values)
    assert _fitted([*values, 0.5], [*returns, 1.0]).tolist() != pytest.approx([*values, 0.5])
    untrained = torch.tensor([[1.0]] * 4 + [[0.0]])
    assert _fitted([*values, 0.5], [*returns, 1.0], weights=untrained).tolist()[:4] == pytest.approx(values)


def test_tokens_that_are_not_trained_have_no_say() -> None:
    weights = torch.tensor([[1.0]] * 6 + [[0.0]])
    found = _fitted([0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 4.0], [0.0, 0.5] * 3 + [99.0], weights=weights)
    torch.testing.assert_close(found[-1], torch.tensor(2.0))


def test_values_of_a_fresh_critic_become_the_mean_return_of_the_others() -> None:
    found = _fitted([0.0] * 5, [0.0, 0.0, 1.0, 1.0, 1.0])
    torch.testing.assert_close(found, torch.tensor([0.75, 0.75, 0.5, 0.5, 0.5]))


def test_evidence_is_calibrated_on_the_rewards_to_go() -> None:
    num = 6
    evidence = _evidence(
        scores=torch.tensor([1.0, 0.0] * 3), groups=torch.zeros(num, dtype=torch.long), units=torch.arange(num),
        mask=torch.tensor([[True, False]] * num), rewards=torch.tensor([[0.5, 0.0]] * num),
        discounts=torch.ones(num, 2), weights=torch.tensor([[1.0, 0.0]] * num),
        values=torch.tensor([[1.0, 9.0], [0.0, 9.0]] * 3),  # 9: masked
    )  # fmt: skip
    found = calibrated_evidence(evidence)
    torch.testing.assert_close(found.values, torch.tensor([[1.5, 0.0], [0.5, 0.0]] * 3))
    assert found.scores is evidence.scores


def test_explained_variance_of_perfect_blind_and_constant() -> None:
    returns = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert explained_variance(returns, returns=returns) == 1.0
    assert explained_variance(torch.zeros(4), returns=returns) == 0.0
    assert explained_variance(torch.zeros(4), returns=torch.ones(4)) == 0.0


@pytest.mark.seconds
def test_mathematics_needs_no_engine_no_cluster_and_no_model_library() -> None:
    modules = ", ".join(f"learner.algorithms.{name}" for name in ("advantages", "losses", "objectives"))
    code = f"import sys, {modules}; print(sorted({{'ray', 'transformers', 'vllm', 'tensordict'}} & set(sys.modules)))"
    root = Path(__file__).parents[3]
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert answer.stdout.strip() == "[]"


def test_roles_are_whitened_apart() -> None:
    evidence = _evidence(
        scores=torch.tensor([10.0, 1.0, 5.0, 30.0, 3.0, 5.0]),
        groups=torch.tensor([0, 1, 2, 0, 1, 2]),
        units=torch.arange(6),
        mask=torch.ones(6, 1, dtype=torch.bool),
        weights=torch.full((6, 1), 0.25),
        roles=torch.tensor([0, 1, 2, 0, 1, 2]),
        **{name: torch.zeros(6, 1) for name in ("rewards", "values")},
        discounts=torch.ones(6, 1),
    )
    told = ESTIMATORS["reinforce_plus_plus"].compute(evidence).advantages
    torch.testing.assert_close(told, torch.tensor([[-1.0], [-1.0], [0.0], [1.0], [1.0], [0.0]]))


def test_a_role_of_rows_of_different_length_is_whitened_by_its_tokens() -> None:
    weights = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    together = ESTIMATORS["reinforce_plus_plus"].compute(_evidence(weights=weights)).advantages
    apart = (
        ESTIMATORS["reinforce_plus_plus"].compute(_evidence(weights=weights, roles=torch.tensor([0, 0, 0]))).advantages
    )
    torch.testing.assert_close(apart, together)
    assert together.any()


def test_a_batch_that_fares_worse_than_its_users_did_before_says_so() -> None:
    """Whitened, it would say nothing."""
    worse = _evidence(scores=torch.tensor([0.0, 0.0]), earlier=torch.tensor([0.5, 0.5]))
    found = ESTIMATORS["reinforce_plus_plus"].compute(worse).advantages
    torch.testing.assert_close(found, torch.where(worse.mask, -1.0, 0.0))
    uneven = _evidence(scores=torch.tensor([1.0, 0.0]), earlier=torch.tensor([0.4, 0.8]))
    above, _, below = ESTIMATORS["reinforce_plus_plus"].compute(uneven).advantages[:, 0].tolist()
    assert above > 0 > below and above / below == pytest.approx(-0.6 / 0.8)
