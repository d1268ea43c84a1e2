"""Rules of learner/advantages.py, against numbers computed by hand."""

import pytest
import torch

from learner.advantages import ESTIMATORS, Evidence, explained_variance, final_rewards, gae, grpo, whiten


def test_gae_steps_over_an_observation_without_discount_or_value() -> None:
    values = torch.tensor([[0.5, 9.0, 0.2, -0.1]])
    mask = torch.tensor([[True, False, True, True]])
    rewards = final_rewards(torch.tensor([1.0]), mask=mask)
    advantages, returns = gae(rewards, values=values, mask=mask, gamma=0.9, lam=0.8)
    # A3 = 1 + 0.1; A2 = 0.9 * -0.1 - 0.2 + 0.72 * A3; A0 = 0.9 * 0.2 - 0.5 + 0.72 * A2
    torch.testing.assert_close(advantages, torch.tensor([[0.04144, 0.0, 0.502, 1.1]]))
    torch.testing.assert_close(returns, torch.tensor([[0.54144, 0.0, 0.702, 1.0]]))


def test_gae_with_observations_equals_gae_without_them() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(1, 20, generator=generator) < 0.4
    values = torch.randn(1, 20, generator=generator)
    rewards = final_rewards(torch.tensor([0.7]), mask=mask)
    spaced, _ = gae(rewards, values=values, mask=mask, gamma=0.95, lam=0.9)
    dense, _ = gae(
        rewards[mask][None], values=values[mask][None], mask=torch.ones_like(values[mask][None], dtype=torch.bool),
        gamma=0.95, lam=0.9,
    )  # fmt: skip
    torch.testing.assert_close(spaced[mask], dense[0])
    assert torch.all(spaced[~mask] == 0.0)


def test_gae_with_gamma_and_lambda_one_returns_the_score_everywhere() -> None:
    mask = torch.tensor([[True, True, False, True], [True, False, False, False]])
    rewards = final_rewards(torch.tensor([2.0, -1.0]), mask=mask)
    _, returns = gae(rewards, values=torch.randn(2, 4), mask=mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[2.0, 2.0, 0.0, 2.0], [-1.0, 0.0, 0.0, 0.0]]))


def test_score_lands_on_the_last_trained_token_only() -> None:
    mask = torch.tensor([[True, False, True, False], [False, False, False, False]])
    expected = torch.tensor([[0.0, 0.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert torch.equal(final_rewards(torch.tensor([3.0, 5.0]), mask=mask), expected)


def test_grpo_is_the_distance_from_the_group_mean_in_sample_deviations() -> None:
    scores = torch.tensor([1.0, 10.0, 0.0, 0.0, 30.0, 1.0])
    groups = torch.tensor([7, 3, 7, 7, 3, 7])
    # group 7: mean 0.5, std sqrt(1/3); group 3: mean 20, std sqrt(200)
    expected = torch.tensor([0.8660254, -0.7071068, -0.8660254, -0.8660254, 0.7071068, 0.8660254])
    torch.testing.assert_close(grpo(scores, groups=groups), expected)


@pytest.mark.parametrize("scores", [[0.1], [0.1] * 7, [0.0, 0.0]])
def test_group_of_one_or_of_equal_scores_has_no_advantage(scores: list[float]) -> None:
    advantages = grpo(torch.tensor(scores), groups=torch.zeros(len(scores), dtype=torch.long))
    assert torch.equal(advantages, torch.zeros(len(scores)))


def test_whitening_weighs_tokens_and_leaves_the_masked_at_zero() -> None:
    values = torch.tensor([1.0, 4.0, 99.0])
    whitened = whiten(values, weights=torch.tensor([2.0, 1.0, 0.0]))
    # mean 2, variance (2 * 1 + 4) / 3 = 2
    torch.testing.assert_close(whitened, torch.tensor([-(0.5**0.5), 2**0.5, 0.0]))


def test_whitening_equal_values_gives_zero() -> None:
    assert torch.equal(whiten(torch.full((5,), 3.0), weights=torch.ones(5)), torch.zeros(5))


def _evidence(**changes: object) -> Evidence:
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    base = {
        "scores": torch.tensor([1.0, 0.0]),
        "groups": torch.tensor([4, 4]),
        "episodes": torch.tensor([0, 0, 1]),
        "mask": mask,
        "weights": torch.tensor([[0.5, 0.5], [0.5, 0.0], [1.0, 1.0]]),
        "values": torch.zeros(3, 2),
        "gamma": 1.0,
        "lam": 1.0,
    }
    return Evidence(**(base | changes))  # type: ignore[arg-type]


def test_episode_with_two_rows_counts_once_in_its_group() -> None:
    estimate = ESTIMATORS["grpo"].compute(_evidence())
    half = 0.7071068  # mean 0.5 and not 2/3: two episodes, not three rows
    torch.testing.assert_close(estimate.advantages, torch.tensor([[half, half], [half, 0.0], [-half, -half]]))


def test_gae_estimator_whitens_advantages_but_not_the_critics_targets() -> None:
    estimate = ESTIMATORS["gae"].compute(_evidence())
    assert torch.equal(estimate.returns, torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]))
    # weighted mean 1.5 / 3.5, variance mean * (1 - mean)
    mean = 1.5 / 3.5
    deviation = (mean * (1 - mean)) ** 0.5
    high, low = (1 - mean) / deviation, -mean / deviation
    torch.testing.assert_close(estimate.advantages, torch.tensor([[high, high], [high, 0.0], [low, low]]))


def test_only_gae_needs_a_critic() -> None:
    assert {name: estimator.needs_critic for name, estimator in ESTIMATORS.items()} == {"gae": True, "grpo": False}


def test_explained_variance_of_perfect_blind_and_constant() -> None:
    returns = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert explained_variance(returns, returns=returns) == 1.0
    assert explained_variance(torch.zeros(4), returns=returns) == 0.0
    assert explained_variance(torch.zeros(4), returns=torch.ones(4)) == 0.0
