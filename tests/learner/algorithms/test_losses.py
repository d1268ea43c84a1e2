"""Rules of learner/algorithms/losses.py, against numbers computed by hand and finite differences in float64."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithms.importance_weights import REJECTIONS
from learner.algorithms.kl import kl_estimate
from learner.algorithms.losses import (
    AGGREGATIONS,
    Loss,
    actor_loss,
    policy_loss,
    role_weights,
    token_weights,
    value_loss,
)
from learner.algorithms.objectives import LOSSES, Guide, Targets


def _double(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


REFERENCE = _double(-1.7, -0.7, -2.7)


def _targets(**changes: Tensor) -> Targets:
    """Two rows, of two tokens and one: importance ratios 3, 0.5 and 1, advantages 2, -1 and 1."""
    proximal = _double(-2.0, -1.0, -3.0)
    base = Targets(
        behaviour=proximal - _double(3.0, 0.5, 1.0).log(),
        proximal=proximal,
        advantages=_double(2.0, -1.0, 1.0),
        returns=_double(1.0, 0.0, 1.0),
        values=_double(0.5, 0.5, 0.5),
        sequences=torch.tensor([4, 4, 7]),
        weights=_double(0.5, 0.25, 0.25),
        shares=_double(0.5, 0.25, 0.25),
        picked=torch.zeros(3, dtype=torch.bool),
    )
    return replace(base, **changes)


def _logprobs(targets: Targets) -> Tensor:
    """Ratios to the proximal policy: 1.5 (clipped from above), 0.5 (from below), 1."""
    return targets.proximal + _double(1.5, 0.5, 1.0).log()


def _loss(logprobs: Tensor, targets: Targets, **options: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    return policy_loss(logprobs, targets=targets, config=LearnerConfig(**options))


def _whole(
    logprobs: Tensor,
    targets: Targets,
    config: LearnerConfig,
    *,
    entropy: Tensor | None = None,
    values: Tensor | None = None,
    kl_coef: float = 0.0,
    scale: float = 1.0,
) -> Loss:
    if kl_coef:
        weights = kl_coef * targets.weights
        guide = Guide(kind=config.kl.kind, logprobs=REFERENCE, weights=weights, shares=targets.shares)
        targets = replace(targets, guides={"policy/kl_ref": guide})
    return actor_loss(
        logprobs, entropy=entropy, values=values, targets=targets, config=config, entropy_coef=config.entropy_coef,
        scale=scale,
    )  # fmt: skip


def test_decoupled_loss_by_hand() -> None:
    targets = _targets()
    loss, means, maxima = _loss(_logprobs(targets), targets)
    # -(0.5 * 2 * 1.28 * 2) + 0.25 * 0.5 * 0.8 - 0.25 * 1 * 1
    assert float(loss) == pytest.approx(-2.56 + 0.1 - 0.25)
    assert float(means["policy/clipfrac"]) == pytest.approx(0.75)
    assert float(means["policy/is_weight_mean"]) == pytest.approx(0.5 * 2.0 + 0.25 * 0.5 + 0.25 * 1.0)
    assert float(means["policy/is_capped"]) == pytest.approx(0.5)
    assert float(means["policy/is_masked"]) == 0.0
    assert float(means["policy/approx_kl"]) == pytest.approx(0.5 * (0.5 - math.log(1.5)) + 0.25 * (math.log(2.0) - 0.5))
    assert float(maxima["policy/is_weight_max"]) == pytest.approx(3.0)
    assert float(maxima["policy/ratio_max"]) == pytest.approx(1.5)


def test_importance_weight_is_a_constant_for_the_gradient() -> None:
    targets = _targets(behaviour=_targets().behaviour.requires_grad_())
    logprobs = targets.proximal.clone().requires_grad_()
    loss, _, _ = _loss(logprobs, targets)
    of_policy, of_behaviour = torch.autograd.grad(loss, [logprobs, targets.behaviour], allow_unused=True)
    assert of_behaviour is None
    # at ratio 1: -weight * min(w, 2) * advantage
    torch.testing.assert_close(of_policy, _double(-2.0, 0.125, -0.25))


def test_clipped_tokens_have_no_gradient() -> None:
    targets = _targets()
    logprobs = _logprobs(targets).requires_grad_()
    loss, _, _ = _loss(logprobs, targets)
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([0.0, 0.0, -0.25])


def test_a_move_in_the_right_direction_back_from_beyond_the_clip_keeps_its_gradient() -> None:
    targets = _targets(advantages=_double(-2.0, 1.0, 1.0))
    logprobs = _logprobs(targets).requires_grad_()
    loss, means, _ = _loss(logprobs, targets)
    # -weight * w * ratio * advantage
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([3.0, -0.0625, -0.25])
    assert float(means["policy/clipfrac"]) == 0.0


def test_a_given_clip_replaces_the_losses_own() -> None:
    targets = _targets()
    loss, _, _ = _loss(_logprobs(targets), targets, clip={"low": 0.6, "high": 0.1})
    assert float(loss) == pytest.approx(-(0.5 * 2 * 1.1 * 2) + 0.25 * 0.5 * 0.5 - 0.25)


def test_dual_clip_bounds_what_a_likelier_bad_token_costs() -> None:
    targets = _targets(advantages=_double(-2.0, -1.0, 1.0), behaviour=_targets().proximal)
    logprobs = (targets.proximal + _double(5.0, 2.5, 1.0).log()).requires_grad_()
    loss, means, _ = _loss(logprobs, targets)
    # ratio 5 counts as 3; ratio 2.5 is not that far yet
    assert float(loss.detach()) == pytest.approx(0.5 * 3 * 2 + 0.25 * 2.5 - 0.25)
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([0.0, 0.625, -0.25])
    assert float(means["policy/clipfrac"]) == pytest.approx(0.5)


def test_dual_clip_leaves_a_good_token_alone() -> None:
    targets = _targets(advantages=_double(0.5, 0.25, 0.5), behaviour=_targets().proximal)
    loss, _, _ = _loss(targets.proximal, targets)
    assert float(loss) == pytest.approx(-(0.5 * 0.5 + 0.25 * 0.25 + 0.25 * 0.5))


def test_gspo_clips_the_row_by_the_geometric_mean_of_its_ratios() -> None:
    targets = _targets(advantages=_double(1.0, 1.0, -1.0), behaviour=_targets().proximal)
    logprobs = (targets.proximal + _double(1.5, 0.6, 1.0).log()).requires_grad_()
    inside, means, _ = _loss(logprobs, targets, loss="gspo", clip={"low": 0.2, "high": 0.2})
    s = 0.9**0.5  # within 1 +- 0.2, though both its tokens are beyond
    assert float(inside.detach()) == pytest.approx(-0.75 * s + 0.25)
    assert torch.autograd.grad(inside, logprobs)[0].tolist() == pytest.approx([-0.5 * s, -0.25 * s, 0.25])
    assert float(means["policy/clipfrac"]) == 0.0
    higher = (targets.proximal + _double(1.5, 0.9, 1.0).log()).requires_grad_()
    beyond, means, _ = _loss(higher, targets, loss="gspo")
    assert float(beyond.detach()) == pytest.approx(-0.75 * 1.0004 + 0.25)
    assert torch.autograd.grad(beyond, higher)[0].tolist() == pytest.approx([0.0, 0.0, 0.25])
    assert float(means["policy/clipfrac"]) == pytest.approx(0.75)


def test_gspo_leaves_tokens_of_weight_zero_out_of_the_mean() -> None:
    targets = _targets(weights=_double(0.0, 0.5, 0.5), behaviour=_targets().proximal, advantages=_double(1, 1, 1))
    loss, _, _ = _loss(
        targets.proximal + _double(9.0, 1.1, 1.0).log(), targets, loss="gspo", clip={"low": 0.5, "high": 0.5}
    )
    assert float(loss) == pytest.approx(-0.5 * 1.1 - 0.5)


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    targets = _targets(behaviour=_targets().proximal, shares=_double(0.6, 0.2, 0.2))
    logprobs = (targets.proximal + _double(9.0, 0.01, 1.0).log()).requires_grad_()
    loss, means, _ = _loss(logprobs, targets, loss="cispo")
    # -weight * min(ratio, 5) * advantage
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([-0.5 * 5 * 2, 0.25 * 0.01, -0.25])
    assert float(means["policy/clipfrac"]) == pytest.approx(0.6)


def test_naive_ppo_compares_with_the_behaviour_policy_and_weighs_nothing() -> None:
    targets = _targets()
    loss, means, _ = _loss(targets.proximal, targets, correction="naive")
    # ratios 3 (clipped to 1.28), 0.5 (to 0.8), 1
    assert float(loss) == pytest.approx(-0.5 * 1.28 * 2 + 0.25 * 0.8 - 0.25)
    assert float(means["policy/is_weight_mean"]) == pytest.approx(1.0)


def test_masked_correction_drops_the_token_and_says_so() -> None:
    targets = _targets()
    loss, means, _ = _loss(targets.proximal, targets, correction="mis")
    assert float(loss) == pytest.approx(0.25 * 0.5 - 0.25)
    assert float(means["policy/is_masked"]) == pytest.approx(0.5)


def test_a_ratio_that_is_the_upper_bound_is_not_capped() -> None:
    targets = _targets(behaviour=_targets().proximal)
    _, means, _ = _loss(targets.proximal, targets, correction_bounds={"high": 1.0})
    assert float(means["policy/is_capped"]) == 0.0


def test_a_loss_without_a_kl_term_has_no_figure_of_it() -> None:
    loss = _whole(_logprobs(_targets()), _targets(), LearnerConfig(), kl_coef=0.0)
    assert "policy/kl_ref" not in loss.means


def test_a_value_loss_does_not_grow_with_the_scores() -> None:
    def gradient(size: float) -> list[float]:
        targets = _targets(returns=size * _targets().returns, values=size * _targets().values)
        values = (size * _double(0.6, 0.9, 1.0)).requires_grad_()
        total = _whole(_logprobs(targets), targets, LearnerConfig(), values=values, scale=size).total
        return [float(each) for each in torch.autograd.grad(total, values)[0]]

    assert gradient(100.0) == pytest.approx(gradient(1.0))


def test_value_loss_by_hand() -> None:
    # errors: 0.4 (unclipped), 0.9 (clipped 0.7: the larger error counts), 0.3 (clipped 0.7; unclipped 0)
    expected = 0.5 * (0.5 * 0.16 + 0.25 * 0.81 + 0.25 * 0.09)
    assert float(value_loss(_double(0.6, 0.9, 1.0), targets=_targets(), clip=0.2)) == pytest.approx(expected)


def test_value_loss_of_values_that_fell_by_hand() -> None:
    # errors: 0.45 (unclipped), 0.1 (clipped 0.3: the larger error counts), 0.5 (where it was)
    expected = 0.5 * (0.5 * 0.2025 + 0.25 * 0.09 + 0.25 * 0.25)
    assert float(value_loss(_double(0.55, 0.1, 0.5), targets=_targets(), clip=0.2)) == pytest.approx(expected)


CONSTANT = {"cispo", "dppo_tv", "dppo_kl"}
"""Losses whose ratio is a constant for autograd, not for a difference."""


@pytest.mark.seconds
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", ["tis", "seq_tis", "naive"])
def test_gradients_agree_with_finite_differences(loss: str, correction: str) -> None:
    clip = {"clip": {"low": 0.3, "high": 0.3}} if LOSSES[loss].clip else {}
    config = LearnerConfig(kl={"coef": 0.1, "kind": "k2"}, entropy_coef=0.01, loss=loss, correction=correction, **clip)
    proximal = _targets().proximal
    picked = torch.tensor([False, True, False])
    targets = _targets(behaviour=proximal - _double(1.1, 0.9, 1.2).log(), picked=picked)
    moved = _double(1.1, 0.95, 1.04).log()  # within the clip of each loss, for each correction

    def total(logprobs: Tensor, entropy: Tensor, values: Tensor) -> Tensor:
        near = replace(targets, proximal=logprobs.detach() - moved) if loss in CONSTANT else targets
        near = replace(near, behaviour=logprobs.detach() - moved) if loss in CONSTANT else near
        return _whole(logprobs, near, config, entropy=entropy, values=values, kl_coef=config.kl.coef, scale=3.0).total

    points = (proximal + moved, _double(1.0, 2.0, 3.0), _double(0.55, 0.9, 0.1))
    if loss != "gspo":
        assert torch.autograd.gradcheck(total, tuple(point.requires_grad_() for point in points))
    else:  # GSPO-token's gradient is that of the sequence loss when a row's tokens share advantage and weight
        shared = replace(targets, advantages=_double(2.0, 2.0, 1.0), weights=_double(0.4, 0.4, 0.2))
        point = points[0].requires_grad_()
        gained, _, _ = _loss(point, shared, loss="gspo", correction="none", **clip)
        own = torch.autograd.grad(gained, point)[0]
        row = point - shared.proximal
        s = torch.stack([row[:2].mean(), row[2]]).exp()
        whole = -(0.8 * s[0] * 2.0 + 0.2 * s[1] * 1.0)
        torch.testing.assert_close(own, torch.autograd.grad(whole, point)[0])


def test_gpg_is_the_policy_gradient_itself() -> None:
    targets = _targets()
    logprobs = _logprobs(targets).requires_grad_()
    loss, means, _ = _loss(logprobs, targets, loss="gpg", correction="none")
    assert float(loss.detach()) == pytest.approx(
        -float((targets.weights * targets.advantages * logprobs.detach()).sum())
    )
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([-1.0, 0.25, -0.25])
    assert float(means["policy/clipfrac"]) == 0.0


def test_gmpo_weighs_a_row_by_the_geometric_mean_of_its_clipped_ratios() -> None:
    targets = _targets(advantages=_double(1.0, 1.0, -1.0), behaviour=_targets().proximal)
    logprobs = (targets.proximal + _double(0.6, -0.5, -0.7)).requires_grad_()
    loss, means, _ = _loss(logprobs, targets, loss="gmpo")
    # A > 0 is held from above: 0.4, and not from below: -0.5; A < 0 from below: -0.4
    s, t = math.exp(-0.05), math.exp(-0.4)
    assert float(loss.detach()) == pytest.approx(-0.75 * s + 0.25 * t)
    # the clipped tokens have no gradient; the other that of half its row
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([0.0, -0.75 * s / 2, 0.0])
    assert float(means["policy/clipfrac"]) == pytest.approx(0.75)


def test_gmpo_gives_a_row_without_advantage_no_gradient() -> None:
    targets = _targets(advantages=_double(0.0, 0.0, -1.0), behaviour=_targets().proximal)
    logprobs = (targets.proximal + _double(0.6, -0.5, 0.0)).requires_grad_()
    loss, means, _ = _loss(logprobs, targets, loss="gmpo")
    assert float(loss.detach()) == pytest.approx(0.25)
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([0.0, 0.0, 0.25])
    assert float(means["policy/clipfrac"]) == 0.0


def test_sapo_is_ppo_at_ratio_one_and_softly_less_on_both_sides() -> None:
    targets = _targets(behaviour=_targets().proximal)
    logprobs = (targets.proximal + _double(1.0, 2.0, 0.5).log()).requires_grad_()
    loss, _, _ = _loss(logprobs, targets, loss="sapo")
    gates = [4.0 * 0.5, 4.0 / 1.05 / (1 + math.exp(-1.05)), 4.0 / (1 + math.exp(0.5))]
    assert float(loss.detach()) == pytest.approx(-(0.5 * 2 * gates[0] - 0.25 * gates[1] + 0.25 * gates[2]))
    p, q = 1 / (1 + math.exp(-1.05)), 1 / (1 + math.exp(0.5))
    expected = [-1.0, 0.25 * 2 * 4 * p * (1 - p), -0.25 * 0.5 * 4 * q * (1 - q)]
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx(expected)
    steep, _, _ = _loss(logprobs, targets, loss="sapo", sapo={"tau_neg": 4.0})
    assert abs(float(torch.autograd.grad(steep, logprobs)[0][1])) < abs(expected[1])


def test_clip_cov_takes_the_gradient_of_what_was_picked() -> None:
    targets = _targets(behaviour=_targets().proximal, picked=torch.tensor([False, False, True]))
    logprobs = targets.proximal.clone().requires_grad_()
    loss, means, _ = _loss(logprobs, targets, loss="clip_cov")
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([-1.0, 0.25, 0.0])
    assert float(means["policy/clipfrac"]) == pytest.approx(0.25)
    far, _, _ = _loss(_logprobs(targets), targets, loss="clip_cov")
    assert float(far) == pytest.approx(-0.5 * 1.2 * 2 + 0.25 * 0.8)  # both others clipped at 0.2


def test_kl_cov_holds_what_was_picked_near_the_policy_before() -> None:
    targets = _targets(behaviour=_targets().proximal, picked=torch.tensor([True, False, False]))
    loss, _, _ = _loss(_logprobs(targets), targets, loss="kl_cov", cov={"kl_coef": 2.0})
    assert float(loss) == pytest.approx(-0.5 * (1.5 * 2 - 2.0 * math.log(1.5)) + 0.25 * 0.5 - 0.25)


@pytest.mark.parametrize(
    ("loss", "old", "new", "advantage", "held"),
    [
        ("dppo_tv", 0.5, 0.66, 1.0, True),
        ("dppo_tv", 0.5, 0.64, 1.0, False),
        ("dppo_tv", 0.5, 0.66, -1.0, False),  # back towards where it was
        ("dppo_tv", 0.5, 0.34, -1.0, True),
        ("dppo_tv", 0.5, 0.34, 1.0, False),
        ("dppo_tv", 0.5, 0.64, 2.0, False),
        ("dppo_tv", 0.001, 0.1, 1.0, False),  # ratio 100, and moved by a tenth
        ("dppo_kl", 0.5, 0.66, 1.0, True),  # 0.5 log(0.5 / 0.66) + 0.5 log(0.5 / 0.34) = 0.054
        ("dppo_kl", 0.5, 0.64, 1.0, False),  # 0.041
        ("dppo_kl", 0.5, 0.34, -1.0, True),
        ("dppo_kl", 0.5, 0.66, -1.0, False),
        ("dppo_kl", 0.5, 0.34, 1.0, False),
    ],
)
def test_dppo_holds_a_token_by_its_probability(loss: str, old: float, new: float, advantage: float, held: bool) -> None:
    proximal = _double(old, 0.2, 0.2).log()
    targets = _targets(proximal=proximal, behaviour=proximal, advantages=_double(advantage, 0.0, 0.0))
    logprobs = _double(new, 0.2, 0.2).log().requires_grad_()
    total, means, _ = _loss(logprobs, targets, loss=loss, clip={"ratio_max": 30.0})
    expected = 0.0 if held else -0.5 * min(new / old, 30.0) * advantage
    assert float(torch.autograd.grad(total, logprobs)[0][0]) == pytest.approx(expected)
    assert float(means["policy/clipfrac"]) == (0.5 if held else 0.0)


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl"])
def test_dppo_holds_no_token_that_did_not_move_however_narrow_its_bounds(loss: str) -> None:
    targets = _targets(advantages=_double(1.0, -1.0, 1.0))
    found = LOSSES[loss].compute(
        torch.zeros(3), logprobs=torch.zeros(3), targets=targets, low=0.0, high=0.0, ratio_max=20.0
    )
    assert found.clipped.tolist() == [False] * 3


@pytest.mark.parametrize("kind", REJECTIONS)
def test_a_row_that_is_too_far_off_is_left_out(kind: str) -> None:
    proximal = _double(-1.0, -1.0, -1.0)
    log_rho = _double(0.4, -0.4, 0.1)  # row one: mean 0, mean k3 0.081; row two: mean 0.1, k3 0.005
    targets = _targets(proximal=proximal, behaviour=proximal - log_rho, advantages=_double(-1.0, -1.0, -1.0))
    kept = {"none": [True, True], "geo_mean": [True, False], "k3_mean": [False, True], "stale_negatives": [True, True]}
    logprobs = proximal.clone().requires_grad_()
    loss, means, _ = _loss(logprobs, targets, correction="none", rejection={"kind": kind})
    gradient = torch.autograd.grad(loss, logprobs)[0]
    assert [bool(gradient[0] != 0), bool(gradient[2] != 0)] == kept[kind]
    assert float(means["policy/is_masked"]) == pytest.approx(0.75 * (not kept[kind][0]) + 0.25 * (not kept[kind][1]))
    assert _loss(proximal, targets, correction="none", rejection={"kind": kind})[0] == loss


def test_stale_negatives_look_at_the_present_policy_and_the_sign() -> None:
    targets = _targets(behaviour=_targets().proximal, advantages=_double(-1.0, -1.0, 1.0))
    logprobs = (targets.proximal - _double(0.9, 0.3, 2.0)).requires_grad_()  # means 0.6 and 2
    for high, kept in ((None, False), (0.7, True)):
        rejection = {"kind": "stale_negatives"} | ({} if high is None else {"high": high})
        # no lower clip, which would hold them back
        loss, _, _ = _loss(logprobs, targets, rejection=rejection, clip={"low": 0.99})
        gradient = torch.autograd.grad(loss, logprobs)[0]
        assert [bool(each != 0) for each in gradient] == [kept, kept, True]


@pytest.mark.seconds
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", ["tis", "seq_tis", "seq_mis", "naive"])
@pytest.mark.parametrize("kind", REJECTIONS)
def test_a_token_of_weight_zero_changes_nothing(loss: str, correction: str, kind: str) -> None:
    """Whatever it was recorded with: it is context, as in a row that does not train it."""
    rejection = (
        {"kind": kind} | ({} if kind == "none" else {"high": 5.0}) | ({"low": 0.1} if kind == "geo_mean" else {})
    )
    gradients = []
    for off in (0.0, 3.0):
        shift = _double(off, 0.0, 0.0)
        targets = _targets(weights=_double(0.0, 0.5, 0.5), shares=_double(0.0, 0.5, 0.5))
        targets = replace(targets, behaviour=targets.behaviour - shift, proximal=targets.proximal + shift / 2)
        logprobs = _logprobs(_targets()).requires_grad_()
        found, _, _ = _loss(logprobs, targets, loss=loss, correction=correction, rejection=rejection)
        gradients.append(torch.autograd.grad(found, logprobs)[0].tolist())
    assert gradients[0] == gradients[1] and gradients[0][0] == 0.0


@pytest.mark.parametrize(
    ("given", "clip"), [({}, (0.2, 0.28)), ({"high": 0.4}, (0.2, 0.4)), ({"low": 0.7}, (0.7, 0.28))]
)
def test_a_bound_of_the_clip_that_is_not_set_is_the_losss_own(
    given: dict[str, float], clip: tuple[float, float]
) -> None:
    targets = _targets(advantages=_double(2.0, -2.0, 1.0))  # both bounds hold a token
    config = LearnerConfig(clip=given)
    found = _whole(_logprobs(targets), targets, config)
    expected, _, _ = _loss(_logprobs(targets), targets, clip={"low": clip[0], "high": clip[1]})
    assert float(found.total) == pytest.approx(float(expected))


def test_whole_loss_is_the_weighted_sum_of_its_parts() -> None:
    targets = _targets(shares=_double(0.2, 0.2, 0.6))
    logprobs, values = _logprobs(targets), _double(0.6, 0.9, 1.0)
    config = LearnerConfig(kl={"coef": 0.1}, entropy_coef=0.01)
    loss = _whole(logprobs, targets, config, entropy=_double(1.0, 2.0, 4.0), values=values, kl_coef=0.3)
    kl = kl_estimate(logprobs, reference=REFERENCE, kind="k3")
    vf = float(value_loss(values, targets=targets, clip=0.2))
    assert float(loss.means["policy/kl_ref"]) == pytest.approx(float((targets.shares * kl).sum()))
    assert float(loss.means["critic/vf_loss"]) == pytest.approx(vf)
    assert vf == pytest.approx(0.5 * (0.2 * 0.16 + 0.2 * 0.81 + 0.6 * 0.09))
    expected = -2.71 + 0.3 * float((targets.weights * kl).sum()) - 0.01 * 2.0 + 0.5 * vf
    assert float(loss.total) == pytest.approx(expected)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", ["tis", "seq_tis", "seq_mis"])
def test_parts_of_a_minibatch_add_up_to_the_whole(loss: str, correction: str) -> None:
    targets = _targets()
    logprobs = _logprobs(targets)
    config = LearnerConfig(loss=loss, correction=correction)

    def part(index: list[int]) -> Any:
        taken = targets.take(torch.tensor(index))
        return _whole(logprobs[index], taken, config)

    whole, parts = part([0, 1, 2]), [part([2]), part([0, 1])]
    assert float(sum(one.total for one in parts)) == pytest.approx(float(whole.total))
    for name, mean in whole.means.items():
        assert float(sum(one.means[name] for one in parts)) == pytest.approx(float(mean))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", ["tis", "seq_tis"])
def test_no_tokens_give_zero_with_a_graph(loss: str, correction: str) -> None:
    nothing = torch.tensor([], dtype=torch.long)
    logprobs = _logprobs(_targets()).requires_grad_()
    config = LearnerConfig(loss=loss, correction=correction)
    targets = _targets().take(nothing)
    found = _whole(logprobs[nothing], targets, config)
    found.total.backward()
    assert found.total.item() == 0.0
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0, 0.0, 0.0]
    assert float(found.maxima["policy/ratio_max"]) == 0.0


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", ["tis", "seq_tis", "icepop", "naive"])
def test_absurd_log_ratios_stay_finite(loss: str, correction: str) -> None:
    targets = _targets(behaviour=torch.full((3,), -500.0, dtype=torch.float64))
    logprobs = (targets.proximal - 400.0).requires_grad_()
    found, means, maxima = _loss(logprobs, targets, loss=loss, correction=correction)
    found.backward()
    assert logprobs.grad is not None and bool(logprobs.grad.isfinite().all())
    assert all(math.isfinite(value.item()) for value in [found, *means.values(), *maxima.values()])


# Two episodes: one of two rows (weight 1/2 each, 1 and 3 tokens), one of a single row of 4; and a row with nothing fresh.
OWN, COUNTS = torch.tensor([0.5, 0.5, 1.0, 1.0]), torch.tensor([1.0, 3.0, 4.0, 0.0])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [0.5 / 6, 0.5 / 6, 1 / 6]),
        ("token-sum", [0.5, 0.5, 1.0]),
        ("seq-mean-token-sum", [0.25, 0.25, 0.5]),
        ("seq-mean-token-mean", [0.25, 0.25 / 3, 0.125]),
        ("seq-mean-token-sum-norm", [0.05, 0.05, 0.1]),
    ],
)
def test_aggregation_by_hand(mode: str, expected: list[float]) -> None:
    weights = token_weights(OWN, counts=COUNTS, norm=5, mode=mode)
    torch.testing.assert_close(weights, torch.tensor([*expected, 0.0]))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_each_role_is_aggregated_by_itself_and_counts_for_its_episodes(mode: str) -> None:
    """Two episodes in which two roles speak, the second in five rows of an episode for one of the first's; a third in one."""
    own = torch.tensor([1.0, 1.0, *[0.2] * 5, *[0.2] * 5, 1.0, 1.0])
    counts = torch.tensor([7.0, 2.0, *[3.0] * 5, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 6.0])
    roles = torch.tensor([0, 0, *[1] * 10, 1, 2])
    weights = role_weights(own, roles=roles, counts=counts, norm=5, mode=mode)
    for role, share in ((0, 0.4), (1, 0.4), (2, 0.2)):
        rows = roles == role
        alone = token_weights(own[rows], counts=counts[rows], norm=5, mode=mode)
        torch.testing.assert_close(weights[rows], (1.0 if mode == "token-sum" else share) * alone)
    assert torch.equal(
        role_weights(own, roles=None, counts=counts, norm=5, mode=mode),
        token_weights(own, counts=counts, norm=5, mode=mode),
    )


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_role_that_trains_nothing_weighs_nothing(mode: str) -> None:
    own, counts = torch.ones(3), torch.tensor([4.0, 2.0, 0.0])
    weights = role_weights(own, roles=torch.tensor([0, 0, 1]), counts=counts, norm=5, mode=mode)
    torch.testing.assert_close(weights, token_weights(own, counts=counts, norm=5, mode=mode))
    assert weights[2] == 0.0


@pytest.mark.parametrize(
    ("knobs", "mode"),
    [
        ({}, "token-mean"),
        ({"advantage": "grpo"}, "token-mean"),
        ({"advantage": "grpo", "loss": "gspo"}, "seq-mean-token-mean"),
        ({"advantage": "dr_grpo"}, "seq-mean-token-sum-norm"),
        ({"advantage": "dr_grpo", "loss": "gspo"}, "seq-mean-token-mean"),
        ({"advantage": "dr_grpo", "loss_agg": "token-mean"}, "token-mean"),
        ({"recipe": "gspo", "loss": "ppo"}, "token-mean"),
    ],
)
def test_an_aggregation_that_is_not_set_is_the_papers(knobs: dict[str, Any], mode: str) -> None:
    assert LearnerConfig(**knobs).aggregation == mode
    assert mode in AGGREGATIONS


def test_means_weigh_all_tokens_to_one() -> None:
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert float((token_weights(OWN, counts=COUNTS, norm=5, mode=mode) * COUNTS).sum()) == pytest.approx(1.0)


def test_config_names_every_loss_and_no_other() -> None:
    assert set(LOSSES) == set(LearnerConfig.model_fields["loss"].annotation.__args__)  # type: ignore[union-attr]
