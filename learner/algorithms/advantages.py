"""Advantages from scores: one table of estimators by name, over what a batch is evidence of.

Called by `learner.training.trainer` once per batch, on every rank with the same numbers, after values are known. Per-token sums
are in `learner.algorithms.advantages`. Pure torch functions: no model, no randomness and no communication here.
Invariants: a token with mask 0 gets advantage 0 and neither decays nor carries value; a group of one, or of scores that are equal
up to rounding, has advantage 0 in every estimator that compares a group, and members that a group lacks are not made up; scores of
another size train alike (those in units of the score are as much larger).

Shapes: N rows, K = most trained tokens of a row, U scored units. A unit is what one score was given to: an episode with
all its rows, or a single row (a branch with a score of its own). Column k of a row is its k-th trained token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.algorithms.kl import LOG_RATIO_LIMIT


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
    scale: float
    """Size of the batch's scores, by `score_scale`."""
    min_deviation: float
    """Least deviation that whitening divides by, in units of `scale`."""
    baselines: Tensor | None = None
    """[U] score of the unit's group under greedy sampling (`remax`)."""
    earlier: Tensor | None = None
    """[U] mean score of its user's sessions before (`reinforce_plus_plus`); None: the batch's own mean counts."""
    judges: Tensor | None = None
    """[U, J] score of each judge, nan where it gave none (`gdpo`); None: the score is of one judge."""
    roles: Tensor | None = None
    """[N] int64 role of each row, which are whitened apart; None: all rows are of one."""
    energy: Tensor | None = None
    """[N, K] 1 - 2 pi(token) + sum of pi^2 over the vocabulary: squared norm of the gradient of log pi at the logits (`otb`)."""


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
    needs_energy: bool = False
    in_scores: bool = False
    """Advantages are in units of the score, not normalised: they and their gradients grow with it."""


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
    earned_share = (
        zero.index_add(0, evidence.units, at_end) / rows
    )  # exactly 1 without discounts: equal scores stay equal
    return evidence.scores * earned_share + zero.index_add(0, evidence.units, beside)


def _shared(evidence: AdvantageInputs, *, advantages: Tensor) -> Estimate:
    """Each unit's advantage on all its tokens."""
    nothing = torch.zeros_like(evidence.weights)
    per_row = advantages[evidence.units][:, None]
    return Estimate(advantages=torch.where(evidence.mask, per_row, nothing), returns=nothing)


def _by_group(compare: Callable[..., Tensor]) -> Callable[[AdvantageInputs], Estimate]:
    """The estimator that compares each unit's return with those of its group, and no more."""
    return lambda evidence: _shared(evidence, advantages=compare(unit_returns(evidence), groups=evidence.groups))


def _token_rewards(evidence: AdvantageInputs) -> Tensor:
    return final_rewards(evidence.scores[evidence.units], mask=evidence.mask) + evidence.rewards


def calibrated_evidence(evidence: AdvantageInputs) -> AdvantageInputs:
    """The same evidence with calibrated values. With lambda below 1 the critic's targets bootstrap from these too: it learns
    towards what the batch's returns bear out, not towards its own values."""
    to_go = rewards_to_go(_token_rewards(evidence), mask=evidence.mask, discounts=evidence.discounts)
    values = calibrated(evidence.values, returns=to_go, weights=evidence.weights, units=evidence.units)
    return replace(evidence, values=torch.where(evidence.mask, values, torch.zeros_like(values)))


def _whitened(advantages: Tensor, *, evidence: AdvantageInputs, size: float) -> Tensor:
    if evidence.roles is None:
        return whiten(advantages, weights=evidence.weights, size=size, min_deviation=evidence.min_deviation)
    apart = torch.zeros_like(advantages)
    for role in torch.unique(evidence.roles):
        own = evidence.roles == role
        if bool((evidence.weights[own] > 0.0).any()):
            apart[own] = whiten(
                advantages[own], weights=evidence.weights[own], size=size, min_deviation=evidence.min_deviation
            )
    return apart


def _gae(evidence: AdvantageInputs) -> Estimate:
    """GAE, whitened over the batch; the critic's targets are not."""
    advantages, returns = gae(
        _token_rewards(evidence),
        values=evidence.values,
        mask=evidence.mask,
        discounts=evidence.discounts,
        lam=evidence.lam,
    )
    return Estimate(advantages=_whitened(advantages, evidence=evidence, size=evidence.scale), returns=returns)


def _gdpo(evidence: AdvantageInputs) -> Estimate:
    """arXiv:2601.05242: judges are normalised one by one. Rewards beside the score (of rounds, KL) are added in units of the
    scores' size: normalised, a KL would count as much as a judge."""
    judged = evidence.scores[:, None] if evidence.judges is None else evidence.judges
    beside = unit_returns(replace(evidence, scores=torch.zeros_like(evidence.scores))) / evidence.scale
    normalised = gdpo(judged, groups=evidence.groups) + dr_grpo(beside, groups=evidence.groups)
    summed = _shared(evidence, advantages=normalised)
    return Estimate(advantages=_whitened(summed.advantages, evidence=evidence, size=1.0), returns=summed.returns)


def _otb(evidence: AdvantageInputs) -> Estimate:
    """Optimal token baseline: the return to go less B_t = sum(W_t G_t) / sum(W_t) over the group's rows at their t-th token.

    W_t is the sum of `energy` up to t, so a row counts for as much as its gradient may vary. As verl's
    `optimal_token_baseline` (https://richardli.xyz/optimal-token-baseline), without its zero tail: a token that no other row of
    the group reaches has advantage 0. Rows are weighed as in the loss.
    """
    if evidence.energy is None:
        raise ValueError("learner.advantage=otb needs the policy's probabilities, got none; use opo without them")
    to_go = rewards_to_go(_token_rewards(evidence), mask=evidence.mask, discounts=evidence.discounts)
    so_far = torch.where(evidence.mask, evidence.energy, 0.0).cumsum(1)
    energy = torch.where(evidence.mask, so_far * evidence.weights, 0.0)
    advantages = torch.zeros_like(to_go)
    groups = evidence.groups[evidence.units]
    for group in torch.unique(groups):
        own = groups == group
        total = energy[own].sum(0)
        baseline = (energy[own] * to_go[own]).sum(0) / total.clamp(min=torch.finfo(total.dtype).tiny)
        advantages[own] = to_go[own] - baseline
    told = evidence.mask & (evidence.weights > 0) & (advantages.abs() > ROUNDING * evidence.scale)
    nothing = torch.zeros_like(to_go)
    return Estimate(advantages=torch.where(told, advantages, nothing), returns=nothing)


def _opo(evidence: AdvantageInputs) -> Estimate:
    scores = unit_returns(evidence)
    lengths = torch.zeros_like(scores).index_add(0, evidence.units, evidence.mask.sum(1).to(scores.dtype))
    return _shared(evidence, advantages=opo(scores, groups=evidence.groups, lengths=lengths))


def _remax(evidence: AdvantageInputs) -> Estimate:
    if evidence.baselines is None:
        raise ValueError("learner.advantage=remax needs a greedy episode in each group, got none; use rloo without one")
    return _shared(evidence, advantages=remax(unit_returns(evidence), baselines=evidence.baselines))


def _reinforce_plus_plus(evidence: AdvantageInputs) -> Estimate:
    """arXiv:2501.03262 eq. 5-6: discounted rewards to go of each token (KL penalty in them), whitened over the batch. Where each
    unit has a baseline of earlier ones, that is taken off, and the batch's root mean square is the size: a batch in which all fare
    worse than before says so."""
    to_go = rewards_to_go(_token_rewards(evidence), mask=evidence.mask, discounts=evidence.discounts)
    if evidence.earlier is not None:
        centred = torch.where(evidence.mask, to_go - evidence.earlier[evidence.units][:, None], 0.0)
        size = (centred.square() * evidence.weights).sum() / evidence.weights.sum().clamp(min=1e-12)
        return Estimate(
            advantages=centred / size.sqrt().clamp(min=evidence.min_deviation * evidence.scale + 1e-8),
            returns=torch.zeros_like(to_go),
        )
    return Estimate(
        advantages=_whitened(to_go, evidence=evidence, size=evidence.scale), returns=torch.zeros_like(to_go)
    )


def _reinforce_plus_plus_baseline(evidence: AdvantageInputs) -> Estimate:
    """arXiv:2501.03262 section 3.2: score - mean of the group, then whitened over the batch."""
    centred = _shared(evidence, advantages=dr_grpo(unit_returns(evidence), groups=evidence.groups))
    return Estimate(
        advantages=_whitened(centred.advantages, evidence=evidence, size=evidence.scale), returns=centred.returns
    )


def _none(evidence: AdvantageInputs) -> Estimate:
    """Nothing of the scores: a teacher or hints say what is good."""
    nothing = torch.zeros_like(evidence.weights)
    return Estimate(advantages=nothing, returns=nothing)


def teacher_advantages(logprobs: Tensor, *, teacher: Tensor, coef: float) -> Tensor:
    """[M] coef (log pi_T - log pi): on-policy distillation. `logprobs`: of the policy before the step; a token that the teacher
    would never say counts LOG_RATIO_LIMIT nats.

    With the policy sampling, the mean over its tokens of log pi - log pi_T is KL(pi || pi_T), and its gradient is that of a policy
    gradient with the advantage log pi_T - log pi at each token, discounted to nothing after it (arXiv:2306.08543, arXiv:2306.13649
    with the reverse KL). So it goes into the advantages, where old data is corrected for as any other is.
    """
    return coef * (teacher - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def grpo(scores: Tensor, *, groups: Tensor) -> Tensor:
    """Group-relative advantage (score - mean) / std, arXiv:2402.03300 section 4.1.2; the std is the sample's (n - 1)."""
    advantages = torch.zeros_like(scores)
    for members in differing(scores, groups=groups):
        own = scores[members]
        advantages[members] = (own - own.mean()) / own.std()
    return advantages


def dr_grpo(scores: Tensor, *, groups: Tensor) -> Tensor:
    """score - mean: GRPO without the std, arXiv:2503.20783 section 3.2; its loss is `seq-mean-token-sum-norm`."""
    advantages = torch.zeros_like(scores)
    for members in differing(scores, groups=groups):
        advantages[members] = scores[members] - scores[members].mean()
    return advantages


def rloo(scores: Tensor, *, groups: Tensor) -> Tensor:
    """score - mean of the *other* scores of the group, arXiv:2402.14740 section 3.3: n / (n - 1) times score - mean."""
    advantages = dr_grpo(scores, groups=groups)
    for members in differing(scores, groups=groups):
        advantages[members] *= len(members) / (len(members) - 1)
    return advantages


def gpg(scores: Tensor, *, groups: Tensor) -> Tensor:
    """alpha (score - mean), arXiv:2504.02546 with F_norm = 1.

    alpha = units of the batch / units in groups that differ: groups without a gradient do not make the batch's smaller.
    """
    telling = sum(len(members) for members in differing(scores, groups=groups))
    return dr_grpo(scores, groups=groups) * (len(scores) / max(telling, 1))


def grpo_passk(scores: Tensor, *, groups: Tensor) -> Tensor:
    """(best - second best) / std for the best of a group, 0 for the others; none where two are best.

    The leave-one-out gradient of the expected maximum of k samples, k the group's size: arXiv:2503.19595 section 3, divided by
    the group's std as in verl's `grpo_passk`.
    """
    advantages = torch.zeros_like(scores)
    for members in differing(scores, groups=groups):
        best = scores[members].topk(2)
        advantages[members[best.indices[0]]] = (best.values[0] - best.values[1]) / scores[members].std()
    return advantages


def gdpo(judged: Tensor, *, groups: Tensor) -> Tensor:
    """Each judge's scores normalised within the group as by GRPO, then added up: arXiv:2601.05242.

    judged: [U, J] scores by judge, nan where a judge gave none: it is then silent for this unit. A judge with a small range
    counts as much as one with a large one. The batch is whitened afterwards, by `whiten`.
    """
    total = torch.zeros_like(judged[:, 0])
    for column in judged.T:
        given = torch.nonzero(~column.isnan()).squeeze(1)
        total[given] += grpo(column[given], groups=groups[given])
    return total


def opo(scores: Tensor, *, groups: Tensor, lengths: Tensor) -> Tensor:
    """score - mean of the group's scores weighted by length, arXiv:2505.23585: the baseline of least variance.

    lengths: [U] trained tokens of each unit.
    """
    advantages = torch.zeros_like(scores)
    for members in differing(scores, groups=groups):
        baseline = (lengths[members] * scores[members]).sum() / lengths[members].sum()
        advantages[members] = scores[members] - baseline
    return advantages


def remax(scores: Tensor, *, baselines: Tensor) -> Tensor:
    """score - score of the greedy episode of the same task, arXiv:2310.10505 section 4."""
    return scores - baselines


def differing(scores: Tensor, *, groups: Tensor) -> list[Tensor]:
    """The units of each group whose scores differ by more than rounding; so it has at least two."""
    found = [torch.nonzero(groups == group).squeeze(1) for group in torch.unique(groups)]
    spreads = [scores[members].max() - scores[members].min() for members in found]
    sizes = [scores[members].abs().max() for members in found]
    return [members for members, spread, size in zip(found, spreads, sizes) if bool(spread > ROUNDING * size)]


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(compute=_gae, needs_critic=True),
    "grpo": Estimator(compute=_by_group(grpo)),
    "dr_grpo": Estimator(compute=_by_group(dr_grpo), in_scores=True),
    "rloo": Estimator(compute=_by_group(rloo), in_scores=True),
    "remax": Estimator(compute=_remax, in_scores=True),
    "reinforce_plus_plus": Estimator(compute=_reinforce_plus_plus),
    "reinforce_plus_plus_baseline": Estimator(compute=_reinforce_plus_plus_baseline),
    "opo": Estimator(compute=_opo, in_scores=True),
    "gpg": Estimator(compute=_by_group(gpg), in_scores=True),
    "gdpo": Estimator(compute=_gdpo),
    "grpo_passk": Estimator(compute=_by_group(grpo_passk)),
    "otb": Estimator(compute=_otb, needs_energy=True, in_scores=True),
    "none": Estimator(compute=_none),
}


# Values, returns and their scale, token by token: what estimators with a critic or a whole batch to compare are made of.
# Invariant: a token with mask or weight 0 neither decays nor carries value, and has no say in a mean.

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
