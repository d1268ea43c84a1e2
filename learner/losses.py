"""The loss of one micro-batch: pure torch functions on the trained tokens, in the papers' order.

Called by `learner.trainer` for every micro-batch. All tensors are [m], one entry per trained token. Invariant:
`weights` sum to 1 over the whole mini-batch (all micro-batches of all ranks), so sums of what is returned here are
mini-batch means whatever the number of ranks. A micro-batch of no tokens gives 0 with a graph behind it. No model and
no communication here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from configs.schema import LearnerConfig

LOG_RATIO_LIMIT = 20.0
"""exp() of anything beyond is treated as this: the ratio is clipped anyway, and float32 stays finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the loss compares the model with; fixed during the updates on one batch."""

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
    weights: Tensor

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


def policy_loss(
    logprobs: Tensor, *, targets: Targets, clip_low: float, clip_high: float, is_cap: float
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Decoupled PPO, arXiv:2505.24298 eq. 5, with a truncated importance weight.

    -E[w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)] with r = pi / pi_prox and w = min(pi_prox / pi_behave, is_cap);
    no gradient flows through w. Returns (loss, means, maxima).
    """
    log_ratio = (logprobs - targets.proximal).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    raw_is = (targets.proximal - targets.behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().detach()
    is_weight = raw_is.clamp(max=is_cap)
    plain = ratio * targets.advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * targets.advantages
    loss = -(targets.weights * is_weight * torch.minimum(plain, clipped)).sum()
    means = {
        "policy/loss": loss,
        "policy/clipfrac": (targets.weights * (clipped < plain)).sum(),
        "policy/approx_kl": (targets.weights * (ratio - 1.0 - log_ratio)).sum(),
        "policy/is_weight_mean": (targets.weights * is_weight).sum(),
        "policy/is_capped": (targets.weights * (raw_is > is_cap)).sum(),
    }
    return loss, means, {"policy/is_weight_max": _largest(raw_is), "policy/ratio_max": _largest(ratio)}


def value_loss(values: Tensor, *, targets: Targets, clip: float) -> Tensor:
    """0.5 E[max((v - R)^2, (v_clipped - R)^2)]; v_clipped stays within `clip` of the value before the updates."""
    clipped = targets.values + (values - targets.values).clamp(-clip, clip)
    error = torch.maximum((values - targets.returns) ** 2, (clipped - targets.returns) ** 2)
    return 0.5 * (targets.weights * error).sum()


def kl_k3(logprobs: Tensor, *, reference: Tensor) -> Tensor:
    """[m] estimate of KL(pi || pi_ref), never negative: exp(d) - d - 1 with d = log pi_ref - log pi."""
    difference = (reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return difference.exp() - difference - 1.0


def actor_loss(
    logprobs: Tensor, *, entropy: Tensor | None, values: Tensor | None, targets: Targets, config: LearnerConfig
) -> Loss:
    """The policy's whole loss. `entropy` is given when `entropy_coef` > 0, `values` when the critic is shared."""
    total, means, maxima = policy_loss(
        logprobs, targets=targets, clip_low=config.clip_low, clip_high=config.clip_high, is_cap=config.is_cap
    )
    if config.kl_coef > 0.0:
        kl = (targets.weights * kl_k3(logprobs, reference=targets.reference)).sum()
        total = total + config.kl_coef * kl
        means["policy/kl_ref"] = kl
    if entropy is not None:
        total = total - config.entropy_coef * (targets.weights * entropy).sum()
    if values is not None:
        critic = value_loss(values, targets=targets, clip=config.value_clip)
        total = total + config.value_coef * critic
        means["critic/vf_loss"] = critic
    return Loss(total=total, means={name: mean.detach() for name, mean in means.items()}, maxima=maxima)


def _largest(values: Tensor) -> Tensor:
    """The largest of non-negative values; 0 of none."""
    return torch.cat([values.detach(), values.new_zeros(1)]).max()
