"""Rules of learner/algorithms/kl.py, against numbers computed by hand and exact sums over a small vocabulary."""

import math

import pytest
import torch

from configs.schema import KLConfig
from learner.algorithms.kl import KINDS, KLCoefficient, kl_estimate, kl_of_choices

POLICY = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
KL = float((POLICY * (POLICY / REFERENCE).log()).sum())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [0.0, 0.5, -0.5]),
        ("abs", [0.0, 0.5, 0.5]),
        ("k2", [0.0, 0.125, 0.125]),
        ("k3", [0.0, math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5]),
    ],
)
def test_estimates_by_hand(kind: str, expected: list[float]) -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0])
    estimate = kl_estimate(logprobs, reference=logprobs - torch.tensor([0.0, 0.5, -0.5]), kind=kind)
    assert estimate.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_kl_in_the_mean(kind: str) -> None:
    assert float((POLICY * kl_estimate(POLICY.log(), reference=REFERENCE.log(), kind=kind)).sum()) == pytest.approx(KL)


def test_mean_gradients_as_a_loss_are_those_of_the_table() -> None:
    logits = POLICY.log().requires_grad_()

    def mean_gradient(kind: str) -> torch.Tensor:
        logprobs = logits.log_softmax(0)
        sampled = (POLICY * kl_estimate(logprobs, reference=REFERENCE.log(), kind=kind)).sum()
        return torch.autograd.grad(sampled, logits)[0]

    logprobs = logits.log_softmax(0)
    kl = torch.autograd.grad((logprobs.exp() * (logprobs - REFERENCE.log())).sum(), logits, retain_graph=True)[0]
    other = torch.autograd.grad((REFERENCE * (REFERENCE.log() - logprobs)).sum(), logits)[0]
    torch.testing.assert_close(mean_gradient("k1"), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(mean_gradient("k2"), kl)
    torch.testing.assert_close(mean_gradient("k3"), other)


def test_absurd_differences_stay_finite() -> None:
    logprobs = torch.tensor([-500.0, 0.0])
    for kind in KINDS:
        assert bool(kl_estimate(logprobs, reference=logprobs.flip(0), kind=kind).isfinite().all())


def test_a_difference_counts_twenty_nats_at_most() -> None:
    found = kl_estimate(torch.tensor([-1.0, -50.0]), reference=torch.tensor([-50.0, -1.0]), kind="k1")
    assert found.tolist() == [20.0, -20.0]


def test_one_token_far_below_the_reference_cannot_rule_a_step() -> None:
    logprobs = torch.tensor([-1.0, -3.0, -11.0], requires_grad=True)
    estimate = kl_estimate(logprobs, reference=torch.full((3,), -1.0), kind="k3")
    assert estimate.tolist() == pytest.approx([0.0, math.exp(2.0) - 3.0, 10.0])
    assert torch.autograd.grad(estimate.sum(), logprobs)[0].tolist() == pytest.approx([0.0, 1.0 - math.exp(2.0), 0.0])


def test_a_target_steers_within_tens_of_steps() -> None:
    horizon = KLConfig().horizon
    coefficient = KLCoefficient(0.1, target=0.05, horizon=horizon)
    for _ in range(28):
        coefficient.update(9.0, num_episodes=64)
    assert coefficient.value == pytest.approx(0.2, rel=0.03)
    coefficient.update(0.0, num_episodes=100_000)  # a fifth at most, however large the batch
    assert coefficient.value == pytest.approx(0.16, rel=0.03)


def test_fixed_coefficient_stays() -> None:
    coefficient = KLCoefficient(0.1, target=None, horizon=10_000.0)
    coefficient.update(9.0, num_episodes=64)
    assert coefficient.value == 0.1


@pytest.mark.parametrize(("mean_kl", "factor"), [(0.055, 1.1), (9.0, 1.2), (0.05, 1.0), (0.0, 0.8)])
def test_adaptive_coefficient_follows_its_target_by_at_most_a_fifth_per_horizon(mean_kl: float, factor: float) -> None:
    coefficient = KLCoefficient(0.1, target=0.05, horizon=10_000.0)
    coefficient.update(mean_kl, num_episodes=10_000)
    assert coefficient.value == pytest.approx(0.1 * factor)
    coefficient.update(mean_kl, num_episodes=100)
    assert coefficient.value == pytest.approx(0.1 * factor * (1 + (factor - 1) / 100))


def test_a_shorter_horizon_steers_faster() -> None:
    coefficient = KLCoefficient(0.1, target=0.05, horizon=500.0)
    coefficient.update(9.0, num_episodes=100)
    assert coefficient.value == pytest.approx(0.1 * (1 + 0.2 * 100 / 500))


def test_config_offers_every_kind() -> None:
    offered = KLConfig.model_fields["kind"].annotation.__args__  # type: ignore[union-attr]
    assert set(offered) == set(KINDS)


def test_kl_over_choices_is_the_kl_itself_over_all_and_no_more_over_some() -> None:
    policy, reference = (torch.tensor(each).log() for each in ([[0.5, 0.3, 0.15, 0.05]], [[0.25, 0.25, 0.4, 0.1]]))
    whole = 0.5 * math.log(2.0) + 0.3 * math.log(1.2) + 0.15 * math.log(0.375) + 0.05 * math.log(0.5)
    assert kl_of_choices(policy, reference=reference).item() == pytest.approx(whole, rel=1e-5)
    some = 0.5 * math.log(2.0) + 0.3 * math.log(1.2) + 0.2 * math.log(0.4)  # the others are 0.2 and 0.5 together
    assert kl_of_choices(policy[:, :2], reference=reference[:, :2]).item() == pytest.approx(some, rel=1e-5)
    assert some < whole
    assert kl_of_choices(policy[:, :3], reference=policy[:, :3]).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("num", [2, 5])
def test_gradient_of_the_kl_over_choices_agrees_with_finite_differences(num: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(3, 5, dtype=torch.float64).log_softmax(-1)[:, :num]
    assert torch.autograd.gradcheck(
        lambda each: kl_of_choices(each.log_softmax(-1)[:, :num], reference=reference), (logits,)
    )
    other = reference.exp() * 0.0 - 50.0  # hardly anything: bounded, not infinite
    assert bool(kl_of_choices(logits.log_softmax(-1)[:, :num], reference=other).isfinite().all())
