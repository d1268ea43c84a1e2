"""Rules of learner/algorithms/losses.py, against numbers computed by hand and finite differences in float64."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithms.kl import kl_estimate
from learner.algorithms.losses import AGGREGATIONS, LOSSES, Targets, actor_loss, policy_loss, token_weights, value_loss


def _double(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _targets(**changes: Tensor) -> Targets:
    """Two rows, of two tokens and one: importance ratios 3, 0.5 and 1, advantages 2, -1 and 1."""
    proximal = _double(-2.0, -1.0, -3.0)
    base = Targets(
        behaviour=proximal - _double(3.0, 0.5, 1.0).log(),
        proximal=proximal,
        reference=proximal + 0.3,
        advantages=_double(2.0, -1.0, 1.0),
        returns=_double(1.0, 0.0, 1.0),
        values=_double(0.5, 0.5, 0.5),
        sequences=torch.tensor([4, 4, 7]),
        weights=_double(0.5, 0.25, 0.25),
        shares=_double(0.5, 0.25, 0.25),
    )
    return replace(base, **changes)


def _logprobs(targets: Targets) -> Tensor:
    """Ratios to the proximal policy: 1.5 (clipped from above), 0.5 (from below), 1."""
    return targets.proximal + _double(1.5, 0.5, 1.0).log()


def _loss(logprobs: Tensor, targets: Targets, **options: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    return policy_loss(logprobs, targets=targets, **({"loss": "ppo", "clip": None, "correction": "tis"} | options))


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
    loss, _, _ = _loss(_logprobs(targets), targets, clip=(0.6, 0.1))
    assert float(loss) == pytest.approx(-(0.5 * 2 * 1.1 * 2) + 0.25 * 0.5 * 0.5 - 0.25)


def test_dual_clip_bounds_what_a_likelier_bad_token_costs() -> None:
    targets = _targets(advantages=_double(-2.0, -1.0, 1.0), behaviour=_targets().proximal)
    logprobs = (targets.proximal + _double(5.0, 2.5, 1.0).log()).requires_grad_()
    loss, means, _ = _loss(logprobs, targets)
    # ratio 5 counts as 3; ratio 2.5 is not that far yet
    assert float(loss.detach()) == pytest.approx(0.5 * 3 * 2 + 0.25 * 2.5 - 0.25)
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([0.0, 0.625, -0.25])
    assert float(means["policy/clipfrac"]) == pytest.approx(0.5)


def test_gspo_clips_the_row_by_the_geometric_mean_of_its_ratios() -> None:
    targets = _targets(advantages=_double(1.0, 1.0, -1.0), behaviour=_targets().proximal)
    logprobs = (targets.proximal + _double(1.5, 0.6, 1.0).log()).requires_grad_()
    inside, means, _ = _loss(logprobs, targets, loss="gspo", clip=(0.2, 0.2))
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
    loss, _, _ = _loss(targets.proximal + _double(9.0, 1.1, 1.0).log(), targets, loss="gspo", clip=(0.5, 0.5))
    assert float(loss) == pytest.approx(-0.5 * 1.1 - 0.5)


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    targets = _targets(behaviour=_targets().proximal)
    logprobs = (targets.proximal + _double(9.0, 0.01, 1.0).log()).requires_grad_()
    loss, means, _ = _loss(logprobs, targets, loss="cispo")
    # -weight * min(ratio, 5) * advantage
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([-0.5 * 5 * 2, 0.25 * 0.01, -0.25])
    assert float(means["policy/clipfrac"]) == pytest.approx(0.5)


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


def test_value_loss_by_hand() -> None:
    # errors: 0.4 (unclipped), 0.9 (clipped 0.7: the larger error counts), 0.3 (clipped 0.7; unclipped 0)
    expected = 0.5 * (0.5 * 0.16 + 0.25 * 0.81 + 0.25 * 0.09)
    assert float(value_loss(_double(0.6, 0.9, 1.0), targets=_targets(), clip=0.2)) == pytest.approx(expected)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", ["tis", "seq_tis", "naive"])
def test_gradients_agree_with_finite_differences(loss: str, correction: str) -> None:
    config = LearnerConfig(
        kl_coef=0.1, entropy_coef=0.01, loss=loss, clip=(0.3, 0.3), correction=correction, kl_kind="k2"
    )
    proximal = _targets().proximal
    targets = _targets(behaviour=proximal - _double(1.1, 0.9, 1.2).log())
    moved = _double(1.1, 0.95, 1.04).log()  # within the clip of each loss, for each correction
    constant = loss == "cispo"  # its ratio is a constant for autograd, not for a difference

    def total(logprobs: Tensor, entropy: Tensor, values: Tensor) -> Tensor:
        near = replace(targets, proximal=logprobs.detach() - moved) if constant else targets
        near = replace(near, behaviour=logprobs.detach() - moved) if constant else near
        return actor_loss(
            logprobs, entropy=entropy, values=values, targets=near, config=config, kl_coef=config.kl_coef
        ).total

    points = (proximal + moved, _double(1.0, 2.0, 3.0), _double(0.55, 0.9, 0.1))
    if loss != "gspo":
        assert torch.autograd.gradcheck(total, tuple(point.requires_grad_() for point in points))
    else:  # GSPO-token's gradient is that of the sequence loss when a row's tokens share advantage and weight
        shared = replace(targets, advantages=_double(2.0, 2.0, 1.0), weights=_double(0.4, 0.4, 0.2))
        point = points[0].requires_grad_()
        gained, _, _ = policy_loss(point, targets=shared, loss="gspo", clip=(0.3, 0.3), correction="none")
        own = torch.autograd.grad(gained, point)[0]
        row = point - shared.proximal
        s = torch.stack([row[:2].mean(), row[2]]).exp()
        whole = -(0.8 * s[0] * 2.0 + 0.2 * s[1] * 1.0)
        torch.testing.assert_close(own, torch.autograd.grad(whole, point)[0])


def test_whole_loss_is_the_weighted_sum_of_its_parts() -> None:
    targets = _targets(shares=_double(0.2, 0.2, 0.6))
    logprobs, values = _logprobs(targets), _double(0.6, 0.9, 1.0)
    config = LearnerConfig(kl_coef=0.1, entropy_coef=0.01)
    loss = actor_loss(
        logprobs, entropy=_double(1.0, 2.0, 4.0), values=values, targets=targets, config=config, kl_coef=0.3
    )
    kl = kl_estimate(logprobs, reference=targets.reference, kind="k3")
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
        return actor_loss(logprobs[index], entropy=None, values=None, targets=taken, config=config, kl_coef=0.0)

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
    found = actor_loss(logprobs[nothing], entropy=None, values=None, targets=targets, config=config, kl_coef=0.0)
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
        ("seq-mean-token-sum", [0.25, 0.25, 0.5]),
        ("seq-mean-token-mean", [0.25, 0.25 / 3, 0.125]),
        ("seq-mean-token-sum-norm", [0.05, 0.05, 0.1]),
    ],
)
def test_aggregation_by_hand(mode: str, expected: list[float]) -> None:
    weights = token_weights(OWN, counts=COUNTS, longest=5, mode=mode)
    torch.testing.assert_close(weights, torch.tensor([*expected, 0.0]))
    assert set(AGGREGATIONS) == set(LearnerConfig.model_fields["loss_agg"].annotation.__args__)  # type: ignore[union-attr]


def test_means_weigh_all_tokens_to_one() -> None:
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert float((token_weights(OWN, counts=COUNTS, longest=5, mode=mode) * COUNTS).sum()) == pytest.approx(1.0)


def test_config_names_every_loss_and_no_other() -> None:
    assert set(LOSSES) == set(LearnerConfig.model_fields["loss"].annotation.__args__)  # type: ignore[union-attr]
