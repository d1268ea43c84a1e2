"""The objectives of the policy-gradient stream, token by token: what is to be made large, and what holds a token back.

Called by `learner.algorithms.losses`, which weighs, adds up and negates them. All tensors are [m], one entry per trained token of
whole rows; `log_ratio` is log pi - log pi of the policy that the ratio is taken against. Pure torch functions. Invariant: a token
of weight 0 changes nothing, a row's mean included. Each entry of LOSSES says which bounds its function takes, and its paper's
values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from learner.algorithms.importance_weights import per_sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """A distribution that the policy is drawn to: one part of the distillation stream. [m] each."""

    logprobs: Tensor
    """Its log-probabilities of the sampled tokens; or [m, k], of those of `ids`."""
    weights: Tensor
    shares: Tensor
    """Weights of the mean that is reported; they sum to 1 over the mini-batch."""
    kind: str = ""
    """How far the policy is from it at a sampled token: a name in `learner.algorithms.kl`."""
    ids: Tensor | None = None
    """[m, k] int64 tokens of the vocabulary, over which the whole KL is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the loss compares the model with; fixed during the updates on one mini-batch."""

    behaviour: Tensor
    """log pi_behave: recorded when the token was sampled."""
    proximal: Tensor
    """log pi_prox: the policy before this step's first update."""
    advantages: Tensor
    returns: Tensor
    values: Tensor
    """The critic's values before this step's first update; zeros when there is no critic."""
    sequences: Tensor
    """int64 row of each token."""
    weights: Tensor
    """Weights of the policy-gradient stream, by `token_weights`."""
    shares: Tensor
    """Weights of the value loss and the metrics: `token_weights` by token-mean."""
    picked: Tensor
    """bool: tokens that `clip_cov` or `kl_cov` picked of the mini-batch; false for other losses."""
    guides: dict[str, Guide] = field(default_factory=dict)
    """The distillation stream, by the metric of its mean."""

    def take(self, index: Tensor) -> Targets:
        taken: Targets = _each(self, lambda tensor: tensor[index])
        return taken

    def to(self, device: torch.device) -> Targets:
        moved: Targets = _each(self, lambda tensor: tensor.to(device))
        return moved


def _each(record: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The record with each of its tensors changed."""
    changed: dict[str, Any] = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if isinstance(value, Tensor):
            changed[each.name] = change(value)
        elif isinstance(value, dict):
            changed[each.name] = {key: _each(part, change) for key, part in value.items()}
    return replace(record, **changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """[m] each, to be made large; `clipped` is true where the clip holds the token back."""

    gain: Tensor
    clipped: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """An objective, and its paper's clip range (low, high) and largest ratio, where it has them."""

    compute: Callable[..., Objective]
    clip: tuple[float, float] | None = None
    ratio_max: float | None = None
    uses: tuple[str, ...] = ()
    """The settings that `compute` takes by name, beside clip range and largest ratio."""


def ppo(
    log_ratio: Tensor, *, logprobs: Tensor, targets: Targets, low: float, high: float, ratio_max: float
) -> Objective:
    """min(r A, clip(r, 1 - low, 1 + high) A), arXiv:1707.06347 eq. 7, never below `ratio_max` A: dual clip, arXiv:1912.09729 eq. 5.

    high > low is DAPO's clip-higher, arXiv:2503.14476 eq. 8; with token-mean this is DAPO's loss.
    """
    ratio = log_ratio.exp()
    plain = ratio * targets.advantages
    clipped = ratio.clamp(1.0 - low, 1.0 + high) * targets.advantages
    gain = torch.minimum(plain, clipped)
    floor = ratio_max * targets.advantages
    dual = (targets.advantages < 0.0) & (gain < floor)
    return Objective(gain=torch.where(dual, floor, gain), clipped=(clipped < plain) | dual)


def gspo(log_ratio: Tensor, *, logprobs: Tensor, targets: Targets, low: float, high: float) -> Objective:
    """PPO's clip on the row's ratio s = exp(mean of log r), arXiv:2507.18071 eq. 7, 14: a row is held back as a whole.

    The token's own gradient is kept (GSPO-token); with one advantage per row it is GSPO's.
    """
    log_s = _row_mean(log_ratio, targets=targets).detach() + logprobs - logprobs.detach()
    ratio = log_s.exp()
    plain = ratio * targets.advantages
    clipped = ratio.clamp(1.0 - low, 1.0 + high) * targets.advantages
    return Objective(gain=torch.minimum(plain, clipped), clipped=clipped < plain)


def gmpo(log_ratio: Tensor, *, logprobs: Tensor, targets: Targets, low: float, high: float) -> Objective:
    """s A with s = exp(mean of clipped log r) over the row, arXiv:2507.20673: the geometric mean of the ratios.

    Each token's log r is clipped to [-low, high] on the side that its advantage pushes to, before the mean; the gradient of a
    row is A s times the mean of its unclipped tokens'. It is the paper's with seq-mean-token-mean.
    """
    bounded = log_ratio.clamp(-low, high)
    sign = targets.advantages.sign()
    held = torch.minimum(sign * log_ratio, sign * bounded) * sign
    ratio = _row_mean(held, targets=targets).exp()
    return Objective(gain=ratio * targets.advantages, clipped=(held != log_ratio) & (sign != 0.0))


def cispo(log_ratio: Tensor, *, logprobs: Tensor, targets: Targets, low: float, high: float) -> Objective:
    """clip(r, 1 - low, 1 + high) A log pi with the clipped ratio a constant, arXiv:2506.13585 eq. 4-5: no token loses
    its gradient."""
    ratio = log_ratio.detach().exp()
    bounded = ratio.clamp(1.0 - low, 1.0 + high)
    return Objective(gain=bounded * targets.advantages * logprobs, clipped=bounded != ratio)


def gpg(log_ratio: Tensor, *, logprobs: Tensor, targets: Targets) -> Objective:
    """A log pi, arXiv:2504.02546: the policy gradient itself, without ratio and clip. For fresh data: one update of a
    batch, or few."""
    return Objective(gain=targets.advantages * logprobs, clipped=torch.zeros_like(targets.picked))


def sapo(log_ratio: Tensor, *, logprobs: Tensor, targets: Targets, tau_pos: float, tau_neg: float) -> Objective:
    """(4 / tau) sigmoid(tau (r - 1)) A, arXiv:2511.20347, with tau by the advantage's sign: a soft clip.

    Its gradient is r A times 4 p (1 - p), p the sigmoid: that of PPO at r = 1, and smoothly less on both sides.
    """
    tau = torch.where(targets.advantages > 0.0, tau_pos, tau_neg).to(log_ratio)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * 4.0 / tau
    return Objective(gain=gate * targets.advantages, clipped=torch.zeros_like(targets.picked))


def clip_cov(log_ratio: Tensor, *, logprobs: Tensor, targets: Targets, low: float, high: float) -> Objective:
    """PPO's objective without the tokens picked by `pick_clip_cov`, arXiv:2505.22617: those whose update would cost most
    entropy have no gradient."""
    ratio = log_ratio.exp()
    plain = ratio * targets.advantages
    clipped = ratio.clamp(1.0 - low, 1.0 + high) * targets.advantages
    gain = torch.where(targets.picked, torch.zeros_like(plain), torch.minimum(plain, clipped))
    return Objective(gain=gain, clipped=(clipped < plain) | targets.picked)


def kl_cov(log_ratio: Tensor, *, logprobs: Tensor, targets: Targets, kl_coef: float) -> Objective:
    """r A, less `kl_coef` |log r| for the tokens picked by `pick_kl_cov`, arXiv:2505.22617: these are held near the policy
    before the step."""
    penalty = torch.where(targets.picked, kl_coef * log_ratio.abs(), torch.zeros_like(log_ratio))
    return Objective(gain=log_ratio.exp() * targets.advantages - penalty, clipped=targets.picked)


def dppo_tv(
    log_ratio: Tensor, *, logprobs: Tensor, targets: Targets, low: float, high: float, ratio_max: float
) -> Objective:
    """r A where the token's probability has not moved too far in the direction of its advantage, arXiv:2602.04879.

    Binary total variation: held back where pi - pi_old > high and A > 0, or pi - pi_old < -low and A < 0. A rare token may change
    its ratio a lot, a likely one not. r weighs as a constant, `ratio_max` at most (section 5.4).
    """
    new, old = _probabilities(log_ratio, logprobs=logprobs)
    beyond = torch.where(targets.advantages > 0.0, new - old > high, old - new > low)
    return _trusted(log_ratio, logprobs=logprobs, targets=targets, beyond=beyond, ratio_max=ratio_max)


def dppo_kl(
    log_ratio: Tensor, *, logprobs: Tensor, targets: Targets, low: float, high: float, ratio_max: float
) -> Objective:
    """The same by KL(pi_old || pi) of the token against all others, arXiv:2602.04879: held back where it is above high (A > 0
    and the token became likelier) or above low (A < 0 and it became less likely)."""
    new, old = _probabilities(log_ratio, logprobs=logprobs)
    tiny = torch.finfo(new.dtype).eps
    others = (1.0 - old) * (((1.0 - old).clamp(min=tiny)).log() - (1.0 - new).clamp(min=tiny).log())
    divergence = others - old * log_ratio.detach()
    up = targets.advantages > 0.0
    beyond = torch.where(up, (divergence > high) & (new > old), (divergence > low) & (new < old))
    return _trusted(log_ratio, logprobs=logprobs, targets=targets, beyond=beyond, ratio_max=ratio_max)


def _trusted(log_ratio: Tensor, *, logprobs: Tensor, targets: Targets, beyond: Tensor, ratio_max: float) -> Objective:
    ratio = log_ratio.detach().exp().clamp(max=ratio_max)
    gain = torch.where(beyond, torch.zeros_like(logprobs), ratio * targets.advantages * logprobs)
    return Objective(gain=gain, clipped=beyond)


def _probabilities(log_ratio: Tensor, *, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """The token's probability now, and under the policy that the ratio is taken against."""
    new = logprobs.detach()
    return new.exp(), (new - log_ratio.detach()).exp()


def _row_mean(values: Tensor, *, targets: Targets) -> Tensor:
    return per_sequence(values, sequences=targets.sequences, counted=targets.weights > 0.0, mean=True)


LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(compute=ppo, clip=(0.2, 0.28), ratio_max=3.0),
    "gspo": PolicyLoss(compute=gspo, clip=(3e-4, 4e-4)),
    "cispo": PolicyLoss(compute=cispo, clip=(1.0, 4.0)),
    "gpg": PolicyLoss(compute=gpg),
    "gmpo": PolicyLoss(compute=gmpo, clip=(0.4, 0.4)),
    "sapo": PolicyLoss(compute=sapo, uses=("tau_pos", "tau_neg")),
    "clip_cov": PolicyLoss(compute=clip_cov, clip=(0.2, 0.2)),
    "kl_cov": PolicyLoss(compute=kl_cov, uses=("kl_coef",)),
    "dppo_tv": PolicyLoss(compute=dppo_tv, clip=(0.15, 0.15), ratio_max=20.0),
    "dppo_kl": PolicyLoss(compute=dppo_kl, clip=(0.05, 0.05), ratio_max=20.0),
}


# What keeps the policy's entropy from falling: the coefficient of the bonus, and tokens picked by covariance. Pure functions
# and one small object.


class EntropyCoefficient:
    """Fixed at `start` when `target` is None; else steered by the measured entropy, as in Skywork-OR1, arXiv:2505.22312.

    It rises by `step` after a step whose entropy was below the target and falls by it after others, within
    [0, `most`], and is in force only while the entropy is at or below the target. `value` is its whole state while it is
    steered; a fixed one is the configuration's.
    """

    def __init__(self, start: float, *, target: float | None, step: float, most: float) -> None:
        self.value = start
        self._target = target
        self._step = step
        self._most = most

    @property
    def is_adaptive(self) -> bool:
        return self._target is not None

    def in_force(self, entropy: float) -> float:
        """The weight of the bonus in a step that begins with this mean entropy, nats per token."""
        return self.value if self._target is None or entropy <= self._target else 0.0

    def update(self, entropy: float) -> None:
        """Adapt the coefficient after a step that began with this mean entropy."""
        if self._target is not None:
            change = self._step if entropy < self._target else -self._step
            self.value = min(max(self.value + change, 0.0), self._most)


def covariances(logprobs: Tensor, *, advantages: Tensor, shares: Tensor) -> Tensor:
    """[m] (log pi - mean log pi) (A - mean A), arXiv:2505.22617; their mean is how fast entropy falls.

    The means are weighted by `shares`, which sum to 1 over the mini-batch; -inf where the share is 0.
    """
    centred = (logprobs - (shares * logprobs).sum()) * (advantages - (shares * advantages).sum())
    return torch.where(shares > 0.0, centred, torch.full_like(centred, -torch.inf))


def pick_clip_cov(covariance: Tensor, *, share: float, low: float, high: float, generator: torch.Generator) -> Tensor:
    """[m] bool: a random `share` of the tokens (at least one) out of those with low < covariance < high; arXiv:2505.22617.

    All of those, if they are fewer.
    """
    fitting = torch.nonzero((covariance > low) & (covariance < high)).squeeze(1)
    order = torch.randperm(len(fitting), generator=generator)[: _num_picked(covariance, share=share)]
    return torch.zeros_like(covariance, dtype=torch.bool).index_fill(0, fitting[order], True)


def pick_kl_cov(covariance: Tensor, *, share: float) -> Tensor:
    """[m] bool: the `share` of the tokens (at least one) with the largest covariances; arXiv:2505.22617."""
    largest = covariance.topk(_num_picked(covariance, share=share)).indices
    return torch.zeros_like(covariance, dtype=torch.bool).index_fill(0, largest, True)


def _num_picked(covariance: Tensor, *, share: float) -> int:
    """The number of tokens that are picked of those trained."""
    num = int(covariance.isfinite().sum())
    return min(max(int(share * num), 1), num)
