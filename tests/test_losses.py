"""Rules of learner/losses.py, against numbers computed by hand and finite differences in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.losses import Targets, actor_loss, kl_k3, policy_loss, value_loss


def _targets(**changes: Tensor) -> Targets:
    """Three tokens: importance ratios 3, 0.5 and 1, advantages 2, -1 and 1."""
    proximal = torch.tensor([-2.0, -1.0, -3.0], dtype=torch.float64)
    base = Targets(
        behaviour=proximal - torch.tensor([3.0, 0.5, 1.0], dtype=torch.float64).log(),
        proximal=proximal,
        reference=proximal + 0.3,
        advantages=torch.tensor([2.0, -1.0, 1.0], dtype=torch.float64),
        returns=torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64),
        values=torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64),
        weights=torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64),
    )
    return replace(base, **changes)


def _logprobs(targets: Targets) -> Tensor:
    """Ratios to the proximal policy: 1.5 (clipped from above), 0.5 (from below), 1."""
    return targets.proximal + torch.tensor([1.5, 0.5, 1.0], dtype=torch.float64).log()


CLIP = {"clip_low": 0.2, "clip_high": 0.28, "is_cap": 2.0}


def test_decoupled_loss_by_hand() -> None:
    targets = _targets()
    loss, means, maxima = policy_loss(_logprobs(targets), targets=targets, **CLIP)
    # -(0.5 * 2 * 1.28 * 2) + 0.25 * 0.5 * 0.8 - 0.25 * 1 * 1
    assert float(loss) == pytest.approx(-2.56 + 0.1 - 0.25)
    assert float(means["policy/clipfrac"]) == pytest.approx(0.75)
    assert float(means["policy/is_weight_mean"]) == pytest.approx(0.5 * 2.0 + 0.25 * 0.5 + 0.25 * 1.0)
    assert float(means["policy/is_capped"]) == pytest.approx(0.5)
    assert float(means["policy/approx_kl"]) == pytest.approx(0.5 * (0.5 - math.log(1.5)) + 0.25 * (math.log(2.0) - 0.5))
    assert float(maxima["policy/is_weight_max"]) == pytest.approx(3.0)
    assert float(maxima["policy/ratio_max"]) == pytest.approx(1.5)


def test_importance_weight_is_a_constant_for_the_gradient() -> None:
    targets = _targets(behaviour=_targets().behaviour.requires_grad_())
    logprobs = targets.proximal.clone().requires_grad_()
    loss, _, _ = policy_loss(logprobs, targets=targets, **CLIP)
    of_policy, of_behaviour = torch.autograd.grad(loss, [logprobs, targets.behaviour], allow_unused=True)
    assert of_behaviour is None
    # at ratio 1: -weight * min(w, 2) * advantage
    torch.testing.assert_close(of_policy, torch.tensor([-2.0, 0.125, -0.25], dtype=torch.float64))


def test_clipped_tokens_have_no_gradient() -> None:
    targets = _targets()
    logprobs = _logprobs(targets).requires_grad_()
    loss, _, _ = policy_loss(logprobs, targets=targets, **CLIP)
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([0.0, 0.0, -0.25])


def test_a_move_in_the_right_direction_back_from_beyond_the_clip_keeps_its_gradient() -> None:
    targets = _targets(advantages=torch.tensor([-2.0, 1.0, 1.0], dtype=torch.float64))
    logprobs = _logprobs(targets).requires_grad_()
    loss, means, _ = policy_loss(logprobs, targets=targets, **CLIP)
    # -weight * w * ratio * advantage
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([3.0, -0.0625, -0.25])
    assert float(means["policy/clipfrac"]) == 0.0


def test_value_loss_by_hand() -> None:
    values = torch.tensor([0.6, 0.9, 1.0], dtype=torch.float64)
    # errors: 0.4 (unclipped), 0.9 (clipped 0.7: the larger error counts), 0.3 (clipped 0.7; unclipped 0)
    expected = 0.5 * (0.5 * 0.16 + 0.25 * 0.81 + 0.25 * 0.09)
    assert float(value_loss(values, targets=_targets(), clip=0.2)) == pytest.approx(expected)


def test_k3_by_hand_and_zero_for_the_same_policy() -> None:
    logprobs = torch.tensor([-1.0, -2.0])
    estimate = kl_k3(logprobs, reference=torch.tensor([-1.0, -2.5]))
    assert estimate.tolist() == pytest.approx([0.0, math.exp(-0.5) + 0.5 - 1.0])


def test_gradients_agree_with_finite_differences() -> None:
    config = LearnerConfig(kl_coef=0.1, entropy_coef=0.01, value_coef=0.7)
    targets = _targets()

    def total(logprobs: Tensor, entropy: Tensor, values: Tensor) -> Tensor:
        return actor_loss(logprobs, entropy=entropy, values=values, targets=targets, config=config).total

    points = (
        targets.proximal + torch.tensor([0.1, -0.1, 0.05], dtype=torch.float64),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        torch.tensor([0.55, 0.9, 0.1], dtype=torch.float64),
    )
    assert torch.autograd.gradcheck(total, tuple(point.requires_grad_() for point in points))


def test_whole_loss_is_the_weighted_sum_of_its_parts() -> None:
    targets = _targets()
    logprobs, values = _logprobs(targets), torch.tensor([0.6, 0.9, 1.0], dtype=torch.float64)
    entropy = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    config = LearnerConfig(kl_coef=0.1, entropy_coef=0.01, value_coef=0.7)
    loss = actor_loss(logprobs, entropy=entropy, values=values, targets=targets, config=config)
    kl = float((targets.weights * kl_k3(logprobs, reference=targets.reference)).sum())
    vf = float(value_loss(values, targets=targets, clip=0.2))
    assert float(loss.means["policy/kl_ref"]) == pytest.approx(kl)
    assert float(loss.means["critic/vf_loss"]) == pytest.approx(vf)
    assert float(loss.total) == pytest.approx(-2.71 + 0.1 * kl - 0.01 * 2.0 + 0.7 * vf)


def test_parts_of_a_minibatch_add_up_to_the_whole() -> None:
    targets = _targets()
    logprobs = _logprobs(targets)
    config = LearnerConfig()
    whole = actor_loss(logprobs, entropy=None, values=None, targets=targets, config=config)
    parts = [
        actor_loss(logprobs[part], entropy=None, values=None, targets=targets.take(torch.tensor(part)), config=config)
        for part in ([0, 2], [1])
    ]
    assert float(sum(part.total for part in parts)) == pytest.approx(float(whole.total))
    for name, mean in whole.means.items():
        assert float(sum(part.means[name] for part in parts)) == pytest.approx(float(mean))


def test_no_tokens_give_zero_with_a_graph() -> None:
    nothing = torch.tensor([], dtype=torch.long)
    logprobs = _logprobs(_targets()).requires_grad_()
    targets = _targets().take(nothing)
    loss = actor_loss(logprobs[nothing], entropy=None, values=None, targets=targets, config=LearnerConfig())
    loss.total.backward()
    assert loss.total.item() == 0.0
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0, 0.0, 0.0]
    assert float(loss.maxima["policy/ratio_max"]) == 0.0


def test_absurd_log_ratios_stay_finite() -> None:
    targets = _targets(behaviour=torch.full((3,), -500.0, dtype=torch.float64))
    logprobs = (targets.proximal - 400.0).requires_grad_()
    loss, means, maxima = policy_loss(logprobs, targets=targets, **CLIP)
    loss.backward()
    assert all(math.isfinite(value.item()) for value in [loss, *means.values(), *maxima.values()])
