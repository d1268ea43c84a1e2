"""Rules of learner/algorithms/objectives.py, against numbers computed by hand."""

import math

import pytest
import torch

from learner.algorithms.objectives import EntropyCoefficient, covariances, pick_clip_cov, pick_kl_cov


def test_fixed_coefficient_stays() -> None:
    coefficient = EntropyCoefficient(0.01, target=None, step=0.005, most=1.0)
    coefficient.update(0.0)
    assert coefficient.value == coefficient.in_force(9.0) == 0.01
    assert not coefficient.is_adaptive


def test_adaptive_coefficient_rises_below_the_target_and_is_in_force_there() -> None:
    coefficient = EntropyCoefficient(0.0, target=0.2, step=0.005, most=0.008)
    seen = []
    for entropy in (0.1, 0.1, 0.1, 0.3, 0.3, 0.3):
        seen.append((coefficient.value, coefficient.in_force(entropy)))
        coefficient.update(entropy)
    assert coefficient.is_adaptive
    values = [0.0, 0.005, 0.008, 0.008, 0.003, 0.0]
    assert [value for value, _ in seen] == pytest.approx(values)
    assert [used for _, used in seen] == pytest.approx([*values[:3], 0.0, 0.0, 0.0])


def test_entropy_that_is_the_target_has_its_bonus_and_lowers_the_coefficient() -> None:
    coefficient = EntropyCoefficient(0.5, target=0.25, step=0.125, most=1.0)
    assert coefficient.in_force(0.25) == 0.5
    coefficient.update(0.25)
    assert coefficient.value == 0.375


def test_covariance_by_hand() -> None:
    logprobs, advantages = torch.tensor([-1.0, -3.0, -7.0]), torch.tensor([4.0, 2.0, 5.0])
    found = covariances(logprobs, advantages=advantages, shares=torch.tensor([0.5, 0.5, 0.0]))
    assert found.tolist() == [1.0, 1.0, -math.inf]  # means -2 and 3; the last token is not trained
    twice = covariances(logprobs, advantages=2.0 * advantages, shares=torch.tensor([0.5, 0.5, 0.0]))
    assert twice.tolist() == [2.0, 2.0, -math.inf]


def test_clip_cov_picks_at_random_between_its_bounds() -> None:
    covariance = torch.tensor([0.5, 2.0, 3.0, 4.0, 6.0, -math.inf])
    picks = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        picked = pick_clip_cov(covariance, share=0.4, low=1.0, high=5.0, generator=generator)
        assert int(picked.sum()) == 2  # 0.4 of the five that are trained
        again = torch.Generator().manual_seed(seed)
        assert torch.equal(picked, pick_clip_cov(covariance, share=0.4, low=1.0, high=5.0, generator=again))
        picks.append(picked)
    assert picks[0].dtype == torch.bool
    assert torch.stack(picks).any(0).tolist() == [False, True, True, True, False, False]
    few = pick_clip_cov(covariance, share=1e-9, low=1.0, high=5.0, generator=torch.Generator().manual_seed(0))
    assert int(few.sum()) == 1
    assert not pick_clip_cov(covariance, share=1.0, low=9.0, high=10.0, generator=torch.Generator()).any()


def test_clip_cov_picks_nothing_that_lies_on_a_bound() -> None:
    covariance = torch.tensor([1.0, 2.0, 5.0, 2.0])
    picked = pick_clip_cov(covariance, share=1.0, low=1.0, high=5.0, generator=torch.Generator())
    assert picked.tolist() == [False, True, False, True]


def test_kl_cov_picks_the_largest() -> None:
    covariance = torch.tensor([0.5, 2.0, 3.0, -math.inf])
    assert pick_kl_cov(covariance, share=0.7).dtype == torch.bool
    assert pick_kl_cov(covariance, share=0.7).tolist() == [False, True, True, False]
    assert pick_kl_cov(covariance, share=1.0).tolist() == [True, True, True, False]
    assert pick_kl_cov(covariance, share=1e-9).tolist() == [False, False, True, False]
