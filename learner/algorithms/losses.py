"""The loss of one micro-batch: pure torch functions on the trained tokens, in the papers' order.

Called by `learner.training.trainer` for every micro-batch. All tensors are [m], one entry per trained token; a
micro-batch holds whole rows. Invariants: `shares` sum to 1 over the whole mini-batch (all micro-batches of all ranks),
so sums of the metrics returned here are mini-batch means for any number of ranks, and `weights` are scaled alike;
a token of weight 0 changes nothing. A micro-batch of no tokens gives 0 with a graph behind it. No model and no
communication here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithms.importance_weights import CAP, CORRECTIONS, per_sequence
from learner.algorithms.kl import LOG_RATIO_LIMIT, kl_estimate

DUAL_CLIP = 3.0
"""A bad token that became likelier weighs at most this, arXiv:1912.09729 eq. 5."""
VALUE_COEF = 0.5
"""Weight of the value loss beside the policy's when both share a model."""
VALUE_CLIP = 0.2
"""A value that moved further than this in one step has no gradient that moves it on, as in arXiv:1707.06347's code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the loss compares the model with; fixed during the updates on one mini-batch."""

    behaviour: Tensor
    """log pi_behave: recorded when the token was sampled."""
    proximal: Tensor
    """log pi_prox: the policy before this step's first update."""
    reference: Tensor
    """log pi_ref; zeros when there is no reference."""
    advantages: Tensor
    returns: Tensor
    values: Tensor
    """The critic's values before this step's first update; zeros when there is no critic."""
    sequences: Tensor
    """int64 row of each token."""
    weights: Tensor
    """Weights of the policy's loss, by `token_weights`."""
    shares: Tensor
    """Weights of the value loss and the metrics: `token_weights` by token-mean."""

    def take(self, index: Tensor) -> Targets:
        return Targets(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def to(self, device: torch.device) -> Targets:
        return Targets(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """`total` carries the gradient; `means` add up and `maxima` take the largest, over micro-batches and ranks."""

    total: Tensor
    means: dict[str, Tensor]
    maxima: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """[m] each, to be made large; `clipped` is true where the clip holds the token back."""

    gain: Tensor
    clipped: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """An objective and its paper's clip range (low, high): ratios within [1 - low, 1 + high]."""

    compute: Callable[..., Objective]
    clip: tuple[float, float]


def ppo(log_ratio: Tensor, *, logprobs: Tensor, targets: Targets, low: float, high: float) -> Objective:
    """min(r A, clip(r, 1 - low, 1 + high) A), arXiv:1707.06347 eq. 7, never below 3 A: dual clip, arXiv:1912.09729 eq. 5.

    high > low is DAPO's clip-higher, arXiv:2503.14476 eq. 8; with token-mean this is DAPO's loss.
    """
    ratio = log_ratio.exp()
    plain = ratio * targets.advantages
    clipped = ratio.clamp(1.0 - low, 1.0 + high) * targets.advantages
    gain = torch.minimum(plain, clipped)
    floor = DUAL_CLIP * targets.advantages
    dual = (targets.advantages < 0.0) & (gain < floor)
    return Objective(gain=torch.where(dual, floor, gain), clipped=(clipped < plain) | dual)


def gspo(log_ratio: Tensor, *, logprobs: Tensor, targets: Targets, low: float, high: float) -> Objective:
    """PPO's clip on the row's ratio s = exp(mean of log r), arXiv:2507.18071 eq. 7, 14: a row is held back as a whole.

    The token's own gradient is kept (GSPO-token); with one advantage per row it is GSPO's. A token of weight 0 does not
    count in the mean.
    """
    counted = targets.weights > 0.0
    total, count = (
        per_sequence(x, sequences=targets.sequences, mean=False) for x in (log_ratio * counted, counted.to(log_ratio))
    )
    log_s = (total / count.clamp(min=1.0)).detach() + logprobs - logprobs.detach()
    ratio = log_s.exp()
    plain = ratio * targets.advantages
    clipped = ratio.clamp(1.0 - low, 1.0 + high) * targets.advantages
    return Objective(gain=torch.minimum(plain, clipped), clipped=clipped < plain)


def cispo(log_ratio: Tensor, *, logprobs: Tensor, targets: Targets, low: float, high: float) -> Objective:
    """clip(r, 1 - low, 1 + high) A log pi with the clipped ratio a constant, arXiv:2506.13585 eq. 4-5: no token loses
    its gradient."""
    ratio = log_ratio.detach().exp()
    bounded = ratio.clamp(1.0 - low, 1.0 + high)
    return Objective(gain=bounded * targets.advantages * logprobs, clipped=bounded != ratio)


LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(compute=ppo, clip=(0.2, 0.28)),
    "gspo": PolicyLoss(compute=gspo, clip=(3e-4, 4e-4)),
    "cispo": PolicyLoss(compute=cispo, clip=(1.0, 4.0)),
}


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "token-mean": lambda own, counts, longest: own / (own * counts).sum(),
    "seq-mean-token-sum": lambda own, counts, longest: own / own.sum(),
    "seq-mean-token-mean": lambda own, counts, longest: own / own.sum() / counts.clamp(min=1),
    "seq-mean-token-sum-norm": lambda own, counts, longest: own / own.sum() / longest,
}


def token_weights(loss_weights: Tensor, *, counts: Tensor, longest: float, mode: str) -> Tensor:
    """[n] weight of each trained token of n rows, so that sum(weight * loss) is the aggregate.

    `loss_weights` [n] let an episode count once however many rows it has; `counts` [n] trained tokens. token-mean: every
    token alike, arXiv:2503.14476 eq. 12. seq-mean-token-sum: tokens added up, mean over rows. seq-mean-token-mean: mean
    of each row's mean, arXiv:2402.03300 eq. 3. seq-mean-token-sum-norm: the sums divided by `longest` (the batch's most
    trained tokens of a row) instead of by their own count, arXiv:2503.20783. A row without a trained token weighs
    nothing; there must be one with.
    """
    own = torch.where(counts > 0, loss_weights, torch.zeros_like(loss_weights))
    return AGGREGATIONS[mode](own, counts, longest)


def policy_loss(
    logprobs: Tensor, *, targets: Targets, loss: str, clip: tuple[float, float] | None, correction: str
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Decoupled PPO, arXiv:2505.24298 eq. 5: -sum(weight * w * objective) with ratio r = pi / pi_prox.

    w corrects for pi_prox / pi_behave and carries no gradient. `correction="naive"` is PPO without a proximal policy:
    r = pi / pi_behave, w = 1. `clip` None: the loss's own range. Returns (loss, means, maxima).
    """
    naive = correction == "naive"
    anchor = targets.behaviour if naive else targets.proximal
    log_ratio = (logprobs - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_rho = (targets.proximal - targets.behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weight = CORRECTIONS["none" if naive else correction](log_rho, sequences=targets.sequences)
    low, high = clip or LOSSES[loss].clip
    objective = LOSSES[loss].compute(log_ratio, logprobs=logprobs, targets=targets, low=low, high=high)
    total = -(targets.weights * weight * objective.gain).sum()
    ratio, rho = log_ratio.exp(), log_rho.exp()
    means = {
        "policy/loss": total,
        "policy/clipfrac": (targets.shares * objective.clipped).sum(),
        "policy/approx_kl": (targets.shares * (ratio - 1.0 - log_ratio)).sum(),
        "policy/is_weight_mean": (targets.shares * weight).sum(),
        "policy/is_capped": (targets.shares * (rho > CAP)).sum(),
        "policy/is_masked": (targets.shares * (weight == 0.0)).sum(),
    }
    return total, means, {"policy/is_weight_max": _largest(rho), "policy/ratio_max": _largest(ratio)}


def value_loss(values: Tensor, *, targets: Targets, clip: float) -> Tensor:
    """0.5 E[max((v - R)^2, (v_clipped - R)^2)]; v_clipped stays within `clip` of the value before the updates."""
    clipped = targets.values + (values - targets.values).clamp(-clip, clip)
    error = torch.maximum((values - targets.returns) ** 2, (clipped - targets.returns) ** 2)
    return 0.5 * (targets.shares * error).sum()


def actor_loss(
    logprobs: Tensor,
    *,
    entropy: Tensor | None,
    values: Tensor | None,
    targets: Targets,
    config: LearnerConfig,
    kl_coef: float,
) -> Loss:
    """The policy's whole loss. `entropy` is given when `entropy_coef` > 0, `values` when the critic is shared.

    `kl_coef` is the present coefficient of a KL term in the loss; 0 when there is none.
    """
    low, high = LOSSES[config.loss].clip
    clip = (config.clip.low or low, config.clip.high or high)
    total, means, maxima = policy_loss(
        logprobs, targets=targets, loss=config.loss, clip=clip, correction=config.correction
    )
    if kl_coef > 0.0:
        kl = kl_estimate(logprobs, reference=targets.reference, kind=config.kl.kind)
        total = total + kl_coef * (targets.weights * kl).sum()
        means["policy/kl_ref"] = (targets.shares * kl).sum()
    if entropy is not None:
        total = total - config.entropy_coef * (targets.weights * entropy).sum()
    if values is not None:
        critic = value_loss(values, targets=targets, clip=VALUE_CLIP)
        total = total + VALUE_COEF * critic
        means["critic/vf_loss"] = critic
    return Loss(total=total, means={name: mean.detach() for name, mean in means.items()}, maxima=maxima)


def _largest(values: Tensor) -> Tensor:
    """The largest of non-negative values; 0 of none."""
    return torch.cat([values.detach(), values.new_zeros(1)]).max()
