"""Advantages from scores: pure torch functions, one table of estimators by name.

Called by `learner.training.trainer` once per batch, on every rank with the same numbers, after values are known.
Invariants: a token with mask 0 gets advantage 0 and neither decays nor carries value; a group of one, or of equal
scores, has advantage 0 in every estimator that compares a group. No model, no randomness and no communication here.

Shapes: N rows, K = most trained tokens of a row, U scored units. A unit is what one score was given to: an episode with
all its rows, or a single row (a branch with a score of its own). Column k of a row is its k-th trained token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MIN_DEVIATION = 0.1
"""Smallest spread, in units of the score (about 1). A batch in which all succeed leaves only the critic's errors: scaled up to
1, they would be trained on like evidence."""
HINT_LIMIT = math.log(2.0)
"""Largest advantage that a hint gives a token under `cpo`: a hint that doubles its probability, or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """All that an estimator may look at."""

    scores: Tensor
    """[U] one score per unit."""
    groups: Tensor
    """[U] int64 group of each unit."""
    units: Tensor
    """[N] int64 unit (0..U-1) of each row."""
    mask: Tensor
    """[N, K] bool, true where a token is trained."""
    rewards: Tensor
    """[N, K] rewards beside the score: scores of single rounds, less the KL penalty. Zeros when there are none."""
    discounts: Tensor
    """[N, K] what the reward of the row's next token is multiplied by at this token: gamma where a round ends, else 1."""
    weights: Tensor
    """[N, K] loss weight of each token, 0 where mask is false."""
    values: Tensor
    """[N, K] the critic's values; zeros when there is no critic."""
    lam: float
    baselines: Tensor | None = None
    """[U] score of the unit's group under greedy sampling (`remax`)."""
    hinted: Tensor | None = None
    """[N, K] log pi(token | hint) - log pi(token) (`cpo`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """[N, K] each; `returns` are the critic's targets, zeros when there is no critic."""

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """A way to turn evidence into advantages, and what it needs besides scores."""

    compute: Callable[[AdvantageInputs], Estimate]
    needs_critic: bool = False
    needs_hints: bool = False


# On tokens


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


def calibrated(values: Tensor, *, returns: Tensor, weights: Tensor) -> Tensor:
    """The critic's values as the batch's returns bear them out: mean(R) + c (V - mean(V)), the means weighted.

    c = cov(R, V) / var(V) within [0, 1] is the baseline coefficient of least variance (Greensmith, Bartlett and Baxter, JMLR
    5, 2004, section 4). It is near 1 for a critic that tells good states from bad ones. Where all returns are equal, as
    in a task that is solved, or the critic lags behind them, it is near 0: what the values differ by is then the
    critic's error, and as advantages it would be trained on like evidence. Any shape, equal for all.
    """
    shares = weights / weights.sum()
    mean_value, mean_return = (shares * values).sum(), (shares * returns).sum()
    apart = values - mean_value
    variance = (shares * apart**2).sum()
    slope = (shares * apart * (returns - mean_return)).sum() / variance if float(variance) > 0.0 else variance
    return mean_return + slope.clamp(0.0, 1.0) * apart


def whiten(values: Tensor, *, weights: Tensor) -> Tensor:
    """Shift to weighted mean 0, divide by the deviation, or by `MIN_DEVIATION` if that is more; 0 where the weight is 0.

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


# On units: scores and groups [U] -> advantages [U]


def grpo(scores: Tensor, *, groups: Tensor) -> Tensor:
    """Group-relative advantage (score - mean) / std, arXiv:2402.03300 section 4.1.2; the std is the sample's (n - 1)."""
    advantages = torch.zeros_like(scores)
    for members in _members(groups):
        own = scores[members]
        if bool(own.max() > own.min()):
            advantages[members] = (own - own.mean()) / own.std()
    return advantages


def dr_grpo(scores: Tensor, *, groups: Tensor) -> Tensor:
    """score - mean: GRPO without the std, arXiv:2503.20783 section 3.2; its loss is `seq-mean-token-sum-norm`."""
    advantages = torch.zeros_like(scores)
    for members in _members(groups):
        advantages[members] = scores[members] - scores[members].mean()
    return advantages


def rloo(scores: Tensor, *, groups: Tensor) -> Tensor:
    """score - mean of the *other* scores of the group, arXiv:2402.14740 section 3.3: n / (n - 1) times score - mean."""
    advantages = dr_grpo(scores, groups=groups)
    for members in _members(groups):
        advantages[members] *= len(members) / (len(members) - 1)
    return advantages


def opo(scores: Tensor, *, groups: Tensor, lengths: Tensor) -> Tensor:
    """score - mean of the group's scores weighted by length, arXiv:2505.23585: the baseline of least variance.

    lengths: [U] trained tokens of each unit.
    """
    advantages = torch.zeros_like(scores)
    for members in _members(groups):
        baseline = (lengths[members] * scores[members]).sum() / lengths[members].sum()
        advantages[members] = scores[members] - baseline
    return advantages


def remax(scores: Tensor, *, baselines: Tensor) -> Tensor:
    """score - score of the greedy episode of the same task, arXiv:2310.10505 section 4."""
    return scores - baselines


def difficulty(scores: Tensor, *, groups: Tensor) -> Tensor:
    """[U] int64 -1: no member of the group succeeded (score > 0); 1: all did; 0: some did."""
    levels = torch.zeros_like(groups)
    for group in torch.unique(groups):
        solved = scores[groups == group] > 0
        levels[groups == group] = int(solved.all()) - int((~solved).all())
    return levels


def _members(groups: Tensor) -> list[Tensor]:
    """The units of each group that has at least two: a lone one has none to be compared with."""
    found = [torch.nonzero(groups == group).squeeze(1) for group in torch.unique(groups)]
    return [members for members in found if len(members) > 1]


# On evidence


def unit_returns(evidence: AdvantageInputs) -> Tensor:
    """[U] discounted sum of a unit's rewards from its first token on; its score without rewards and discounts.

    The score is earned at the end of every row of the unit and counts once: rows of different length discount it by the
    mean of their discounts.
    """
    first = torch.where(evidence.mask, evidence.discounts, 1.0).cumprod(1)
    earned = torch.cat([torch.ones_like(first[:, :1]), first[:, :-1]], dim=1)
    at_end = (final_rewards(torch.ones(len(first)), mask=evidence.mask) * earned).sum(1)
    beside = (torch.where(evidence.mask, evidence.rewards, 0.0) * earned).sum(1)
    zero = torch.zeros_like(evidence.scores)
    rows = zero.index_add(0, evidence.units, torch.ones_like(at_end))
    return evidence.scores * zero.index_add(0, evidence.units, at_end) / rows + zero.index_add(
        0, evidence.units, beside
    )


def _shared(evidence: AdvantageInputs, *, advantages: Tensor) -> Estimate:
    """Each unit's advantage on all its tokens."""
    nothing = torch.zeros_like(evidence.weights)
    per_row = advantages[evidence.units][:, None]
    return Estimate(advantages=torch.where(evidence.mask, per_row, nothing), returns=nothing)


def _token_rewards(evidence: AdvantageInputs) -> Tensor:
    return final_rewards(evidence.scores[evidence.units], mask=evidence.mask) + evidence.rewards


def calibrated_evidence(evidence: AdvantageInputs) -> AdvantageInputs:
    """The same evidence with calibrated values; the critic itself is not changed."""
    to_go = rewards_to_go(_token_rewards(evidence), mask=evidence.mask, discounts=evidence.discounts)
    return replace(evidence, values=calibrated(evidence.values, returns=to_go, weights=evidence.weights))


def _gae(evidence: AdvantageInputs) -> Estimate:
    """GAE, whitened over the batch; the critic's targets are not."""
    advantages, returns = gae(
        _token_rewards(evidence),
        values=evidence.values,
        mask=evidence.mask,
        discounts=evidence.discounts,
        lam=evidence.lam,
    )
    return Estimate(advantages=whiten(advantages, weights=evidence.weights), returns=returns)


def _grpo(evidence: AdvantageInputs) -> Estimate:
    return _shared(evidence, advantages=grpo(unit_returns(evidence), groups=evidence.groups))


def _dr_grpo(evidence: AdvantageInputs) -> Estimate:
    return _shared(evidence, advantages=dr_grpo(unit_returns(evidence), groups=evidence.groups))


def _rloo(evidence: AdvantageInputs) -> Estimate:
    return _shared(evidence, advantages=rloo(unit_returns(evidence), groups=evidence.groups))


def _opo(evidence: AdvantageInputs) -> Estimate:
    scores = unit_returns(evidence)
    lengths = torch.zeros_like(scores).index_add(0, evidence.units, evidence.mask.sum(1).to(scores.dtype))
    return _shared(evidence, advantages=opo(scores, groups=evidence.groups, lengths=lengths))


def _remax(evidence: AdvantageInputs) -> Estimate:
    if evidence.baselines is None:
        raise ValueError("learner.advantage=remax needs a greedy episode in each group, got none; use rloo without one")
    return _shared(evidence, advantages=remax(unit_returns(evidence), baselines=evidence.baselines))


def _reinforce_plus_plus(evidence: AdvantageInputs) -> Estimate:
    """arXiv:2501.03262 eq. 5-6: discounted rewards to go of each token (KL penalty in them), whitened over the batch."""
    to_go = rewards_to_go(_token_rewards(evidence), mask=evidence.mask, discounts=evidence.discounts)
    return Estimate(advantages=whiten(to_go, weights=evidence.weights), returns=torch.zeros_like(to_go))


def _reinforce_plus_plus_baseline(evidence: AdvantageInputs) -> Estimate:
    """arXiv:2501.03262 section 3.2: score - mean of the group, then whitened over the batch."""
    centred = _shared(evidence, advantages=dr_grpo(unit_returns(evidence), groups=evidence.groups))
    return Estimate(advantages=whiten(centred.advantages, weights=evidence.weights), returns=centred.returns)


def _cpo(evidence: AdvantageInputs) -> Estimate:
    """Curriculum policy optimization: GRPO where a group differs; where all failed, and GRPO is silent, each token's
    advantage is how much likelier a hint makes it: log pi(token | hint) - log pi(token), within `HINT_LIMIT`."""
    if evidence.hinted is None:
        raise ValueError("learner.advantage=cpo needs hints, got rows without; give tasks extra_info.hint or use grpo")
    estimate = _grpo(evidence)
    hard = difficulty(evidence.scores, groups=evidence.groups)[evidence.units] < 0
    guided = evidence.hinted.clamp(-HINT_LIMIT, HINT_LIMIT)
    advantages = torch.where(evidence.mask & hard[:, None], guided, estimate.advantages)
    return Estimate(advantages=advantages, returns=estimate.returns)


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(compute=_gae, needs_critic=True),
    "grpo": Estimator(compute=_grpo),
    "dr_grpo": Estimator(compute=_dr_grpo),
    "rloo": Estimator(compute=_rloo),
    "remax": Estimator(compute=_remax),
    "reinforce_plus_plus": Estimator(compute=_reinforce_plus_plus),
    "reinforce_plus_plus_baseline": Estimator(compute=_reinforce_plus_plus_baseline),
    "opo": Estimator(compute=_opo),
    "cpo": Estimator(compute=_cpo, needs_hints=True),
}
