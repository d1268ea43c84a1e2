"""From scores to advantages: pure torch functions, one table of estimators by name.

Called by `learner.trainer` once per batch, on every rank with the same numbers, after values are known. Invariant: a
token with mask 0 gets advantage 0 and neither decays nor carries value. No model, no randomness and no communication
here.

Shapes: N rows, K = most trained tokens of a row, E episodes. Column k of a row is its k-th position; mask 0 is
skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_DEVIATION = 0.1
"""In units of the score (about 1). A batch in which all succeed leaves only the critic's errors: scaled up to 1, they
would be trained on like evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that an estimator may look at."""

    scores: Tensor
    """[E] one score per episode."""
    groups: Tensor
    """[E] int64 group of each episode."""
    episodes: Tensor
    """[N] int64 episode (0..E-1) of each row."""
    mask: Tensor
    """[N, K] bool, true where a token is trained."""
    weights: Tensor
    """[N, K] loss weight of each token, 0 where mask is false."""
    values: Tensor
    """[N, K] the critic's values; zeros when there is no critic."""
    gamma: float
    lam: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """[N, K] each; `returns` are the critic's targets."""

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """A way to turn evidence into advantages, and whether it needs a critic's values."""

    compute: Callable[[Evidence], Estimate]
    needs_critic: bool


def gae(rewards: Tensor, *, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, arXiv:1506.02438 eq. 16, over the sampled tokens only.

    All arguments [N, K]. The next state of a sampled token is the next *sampled* token: an observation between two
    rounds costs no discount and its value is never read. Returns (advantages, returns), [N, K], 0 where mask is false.
    """
    advantages = torch.zeros_like(values)
    running = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(running)
    for k in reversed(range(values.shape[1])):
        delta = rewards[:, k] + gamma * next_value - values[:, k]
        current = delta + gamma * lam * running
        running = torch.where(mask[:, k], current, running)
        next_value = torch.where(mask[:, k], values[:, k], next_value)
        advantages[:, k] = torch.where(mask[:, k], current, advantages[:, k])
    return advantages, torch.where(mask, advantages + values, torch.zeros_like(values))


def grpo(scores: Tensor, *, groups: Tensor) -> Tensor:
    """Group-relative advantage (score - mean) / std, arXiv:2402.03300 section 4.1.2; the std is the sample's (n - 1).

    scores, groups: [E]. Returns [E]. A group of one, or of equal scores, says nothing: 0.
    """
    advantages = torch.zeros_like(scores)
    for group in torch.unique(groups):
        members = groups == group
        own = scores[members]
        if own.numel() > 1 and bool(own.max() > own.min()):
            advantages[members] = (own - own.mean()) / own.std()
    return advantages


def final_rewards(scores: Tensor, *, mask: Tensor) -> Tensor:
    """[N] scores -> [N, K] rewards: each row's score on its last token with mask 1, 0 elsewhere."""
    later = mask.flip(1).long().cumsum(1).flip(1)
    return torch.where(mask & (later == 1), scores[:, None], torch.zeros_like(scores)[:, None])


def whiten(values: Tensor, *, weights: Tensor) -> Tensor:
    """Shift to weighted mean 0 and divide by the deviation, or by `MIN_DEVIATION` if that is more; 0 where the weight is 0.

    Any shape, equal for both.
    """
    total = weights.sum()
    mean = (weights * values).sum() / total
    variance = (weights * (values - mean) ** 2).sum() / total
    whitened = (values - mean) / variance.sqrt().clamp(min=MIN_DEVIATION)
    return torch.where(weights > 0, whitened, torch.zeros_like(values))


def explained_variance(values: Tensor, *, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over [M] tokens; 0.0 when the returns do not vary."""
    spread = float(returns.var(unbiased=False))
    return 1.0 - float((returns - values).var(unbiased=False)) / spread if spread > 0.0 else 0.0


def _gae(evidence: Evidence) -> Estimate:
    rewards = final_rewards(evidence.scores[evidence.episodes], mask=evidence.mask)
    advantages, returns = gae(
        rewards, values=evidence.values, mask=evidence.mask, gamma=evidence.gamma, lam=evidence.lam
    )
    return Estimate(advantages=whiten(advantages, weights=evidence.weights), returns=returns)


def _grpo(evidence: Evidence) -> Estimate:
    per_row = grpo(evidence.scores, groups=evidence.groups)[evidence.episodes]
    nothing = torch.zeros_like(evidence.weights)
    return Estimate(advantages=torch.where(evidence.mask, per_row[:, None], nothing), returns=nothing)


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(compute=_gae, needs_critic=True),
    "grpo": Estimator(compute=_grpo, needs_critic=False),
}
