"""Values, returns and their scale, token by token: what estimators with a critic or a whole batch to compare are made of.

Called by `learner.algorithms.advantages`, and by `learner.training.trainer` for its figures. Pure torch functions. Invariant: a
token with mask or weight 0 neither decays nor carries value, and has no say in a mean. Shapes as in
`learner.algorithms.advantages`.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 1e-6
"""Differences below this share of the numbers' size are rounding, and never evidence: normalised, they would be as large as any."""
LARGEST_SCALE = 1e6
"""Scores beyond are taken for a scorer's mistake: nothing is made as large as they are, and an update that overflows is skipped."""
FEWEST_OTHERS = 4
"""Other episodes that a fit of the critic's values needs; with fewer its error is larger than that of a critic that has learned."""


def gae(rewards: Tensor, *, values: Tensor, mask: Tensor, discounts: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, arXiv:1506.02438 eq. 16, over the sampled tokens only.

    All arguments [N, K]. The next state of a sampled token is the next *sampled* token: an observation between two
    rounds is no step of its own and its value is never read. Returns (advantages, returns), [N, K], 0 where mask is
    false.
    """
    advantages = torch.zeros_like(values)
    running = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(running)
    for k in reversed(range(values.shape[1])):
        delta = rewards[:, k] + discounts[:, k] * next_value - values[:, k]
        current = delta + discounts[:, k] * lam * running
        running = torch.where(mask[:, k], current, running)
        next_value = torch.where(mask[:, k], values[:, k], next_value)
        advantages[:, k] = torch.where(mask[:, k], current, advantages[:, k])
    return advantages, torch.where(mask, advantages + values, torch.zeros_like(values))


def rewards_to_go(rewards: Tensor, *, mask: Tensor, discounts: Tensor) -> Tensor:
    """[N, K] discounted sum of a row's rewards from each sampled token on: GAE without a critic and with lambda 1."""
    return gae(rewards, values=torch.zeros_like(rewards), mask=mask, discounts=discounts, lam=1.0)[0]


def final_rewards(scores: Tensor, *, mask: Tensor) -> Tensor:
    """[N] scores -> [N, K] rewards: each row's score on its last token with mask 1, 0 elsewhere."""
    later = mask.flip(1).long().cumsum(1).flip(1)
    return torch.where(mask & (later == 1), scores[:, None], torch.zeros_like(scores)[:, None])


def calibrated(values: Tensor, *, returns: Tensor, weights: Tensor, units: Tensor) -> Tensor:
    """The critic's values as the returns of the batch's *other* units bear them out: mean(R) + c (V - mean(V)).

    c = cov(R, V) / var(V) within [0, 1] is the baseline coefficient of least variance (Greensmith, Bartlett and Baxter, JMLR
    5, 2004, section 4). It is near 1 for a critic that tells good states from bad ones. Where all returns are equal, as
    in a task that is solved, or the critic lags behind them, it is near 0: what the values differ by is then the
    critic's error, and as advantages it would be trained on like evidence. Means, cov and var are weighted, and leave the
    unit's own tokens out: a baseline that knows the return it is compared with takes a part of it away. [N, K] each but
    `units` [N]; a unit with fewer than FEWEST_OTHERS others keeps its values.
    """
    shares = (weights / weights.sum()).double()
    mean = (shares * returns).sum()
    v, r = values - (shares * values).sum(), returns - mean  # centred: the sums below are differences of small numbers
    num = int(units.max()) + 1
    own = torch.stack([shares, shares * v, shares * r, shares * v * v, shares * v * r]).sum(2)
    per_unit = torch.zeros(5, num, dtype=own.dtype).index_add(1, units, own)
    weight, sum_v, sum_r, sum_vv, sum_vr = (per_unit.sum(1, keepdim=True) - per_unit)[:, units].unsqueeze(2)
    mean_v, mean_r = sum_v / weight, sum_r / weight
    variance, covariance = sum_vv / weight - mean_v**2, sum_vr / weight - mean_v * mean_r
    flat = variance <= (ROUNDING * values.abs().max().double()) ** 2
    slope = torch.where(flat, 0.0, covariance / variance.clamp(min=torch.finfo(variance.dtype).tiny)).clamp(0.0, 1.0)
    fitted = (mean + mean_r + slope * (v - mean_v)).to(values.dtype)
    counted = per_unit[0] > 0.0
    others = counted.sum() - counted[units].long()
    return torch.where((others >= FEWEST_OTHERS)[:, None], fitted, values)


def whiten(values: Tensor, *, weights: Tensor, size: float, min_deviation: float) -> Tensor:
    """Shift to weighted mean 0, divide by the deviation, or by `min_deviation * size` if that is more; 0 where the weight is 0.

    `size`: of the numbers that the values are differences of. Values that differ by its rounding only become 0. Any shape, equal
    for values and weights.
    """
    total = weights.sum()
    mean = (weights * values).sum() / total
    deviation = ((weights * (values - mean) ** 2).sum() / total).sqrt()
    if not bool(deviation > ROUNDING * size):
        return torch.zeros_like(values)
    whitened = (values - mean) / deviation.clamp(min=min_deviation * size)
    return torch.where(weights > 0, whitened, torch.zeros_like(values))


def score_scale(returns: Tensor, *, values: Tensor) -> float:
    """The size of a batch's scores: its largest return, or the critic's typical value if that is more; 1 where all is 0.

    What is not a score by itself (least deviations, clips of values, learning rates of value heads) is in units of it, so that
    scores of any size train alike. `returns` [U], `values` of any shape.
    """
    largest = float(returns.abs().max())
    typical = float(values.square().mean().sqrt())
    return min(max(largest, typical), LARGEST_SCALE) or 1.0


def explained_variance(values: Tensor, *, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over [M] tokens; 0.0 when the returns do not vary."""
    spread = float(returns.var(unbiased=False))
    return 1.0 - float((returns - values).var(unbiased=False)) / spread if spread > 0.0 else 0.0
