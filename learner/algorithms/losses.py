"""The loss of one micro-batch: pure torch functions on the trained tokens.

It is a sum over tokens in three streams, each with weights of its own: - sum w objective (policy gradient: `policy_loss`), - sum w
log pi (`cross_entropy`) and sum w D(pi, guide) (`distillation`). A signal is one of them with its weights, which the trainer fills.

Called by `learner.training.trainer` for every micro-batch, `cross_entropy` by the warm start; `role_weights` by
`learner.training.batch_tensors` for every mini-batch, so that the weights do not depend on how it is packed or divided. All tensors
are [m], one entry per trained token; a micro-batch holds whole rows. Invariants: `shares` sum to 1 over the whole mini-batch (all
micro-batches of all ranks), so sums of the metrics returned here are mini-batch means for any number of ranks, and `weights` are
scaled alike; a token of weight 0 changes nothing, not even its row's importance weight or mean. A micro-batch of no tokens gives 0
with a graph behind it. No model and no communication here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithms.importance_weights import CORRECTIONS, REJECTIONS, Drift, chosen
from learner.algorithms.kl import LOG_RATIO_LIMIT, kl_estimate, kl_of_choices
from learner.algorithms.objectives import LOSSES, Guide, Objective, Targets

VALUE_COEF = 0.5
"""Weight of the value loss beside the policy's when both share a model. The head is clipped by itself, and Adam's steps do not grow
with a gradient: it decides nothing but the reported total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """`total` carries the gradient; `means` add up and `maxima` take the largest, over micro-batches and ranks."""

    total: Tensor
    means: dict[str, Tensor]
    maxima: dict[str, Tensor]


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "token-mean": lambda own, counts, norm: own / (own * counts).sum(),
    "token-sum": lambda own, counts, norm: own,
    "seq-mean-token-sum": lambda own, counts, norm: own / own.sum(),
    "seq-mean-token-mean": lambda own, counts, norm: own / own.sum() / counts.clamp(min=1),
    "seq-mean-token-sum-norm": lambda own, counts, norm: own / own.sum() / norm,
}
"""How the losses of tokens become one number, for rows i of n_i tokens (w_i: the row's share of its episode).

| name                      | loss                                                | source                          |
|---------------------------|-----------------------------------------------------|---------------------------------|
| `token-mean`              | sum of w_i l_it / sum of w_i n_i: every token alike | arXiv:2503.14476 eq. 12 (DAPO)  |
| `token-sum`               | sum of w_i l_it: as large as the batch is           | verl                            |
| `seq-mean-token-sum`      | mean over rows of the sums                          | arXiv:2402.14740 (RLOO)         |
| `seq-mean-token-mean`     | mean over rows of each row's mean                   | arXiv:2402.03300 eq. 3 (GRPO)   |
| `seq-mean-token-sum-norm` | mean over rows of the sums, divided by a constant   | arXiv:2503.20783 (Dr. GRPO)     |
"""


def token_weights(loss_weights: Tensor, *, counts: Tensor, norm: float, mode: str) -> Tensor:
    """[n] weight of each trained token of n rows, so that sum(weight * loss) is the aggregate.

    `loss_weights` [n] let an episode count once however many rows it has; `counts` [n] trained tokens; `norm` is the constant
    of seq-mean-token-sum-norm, in tokens: a constant, so that one long row does not make every other token weigh less. A
    row without a trained token weighs nothing; there must be one with.
    """
    own = torch.where(counts > 0, loss_weights, torch.zeros_like(loss_weights))
    return AGGREGATIONS[mode](own, counts, norm)


def role_weights(loss_weights: Tensor, *, roles: Tensor | None, counts: Tensor, norm: float, mode: str) -> Tensor:
    """[n] the same where rows are of several roles ([n], None: of one): each role is aggregated by itself, and counts for as much
    as the episodes that it speaks in, however many rounds or tokens it takes there."""
    if roles is None:
        return token_weights(loss_weights, counts=counts, norm=norm, mode=mode)
    nothing = torch.zeros_like(loss_weights)
    heard = torch.where(counts > 0, loss_weights, nothing)
    total = nothing
    for role in torch.unique(roles[heard > 0]):
        own = torch.where(roles == role, heard, nothing)
        share = 1.0 if mode == "token-sum" else float(own.sum() / heard.sum())
        total = total + share * token_weights(own, counts=counts, norm=norm, mode=mode)
    return total


def objective(log_ratio: Tensor, *, logprobs: Tensor, targets: Targets, config: LearnerConfig) -> Objective:
    """The objective of `config.loss`, with the bounds that were set and its paper's where none was."""
    loss = LOSSES[config.loss]
    settings = {**config.sapo.model_dump(), **config.cov.model_dump()}
    bounds = {name: settings[name] for name in loss.uses}
    if loss.clip is not None:
        bounds["low"], bounds["high"] = chosen(loss.clip, low=config.clip.low, high=config.clip.high)
    if loss.ratio_max is not None:
        bounds["ratio_max"] = config.clip.ratio_max or loss.ratio_max
    return loss.compute(log_ratio, logprobs=logprobs, targets=targets, **bounds)


def policy_loss(
    logprobs: Tensor, *, targets: Targets, config: LearnerConfig
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Decoupled PPO, arXiv:2505.24298 eq. 5: -sum(weight * w * objective) with ratio r = pi / pi_prox.

    w corrects for pi_prox / pi_behave, is 0 in rows that `config.rejection` leaves out, and carries no gradient.
    `correction: naive` is PPO without a proximal policy: r = pi / pi_behave, w = 1. Returns (loss, means, maxima).
    """
    naive = config.correction == "naive"
    anchor = targets.behaviour if naive else targets.proximal
    log_ratio = _bounded(logprobs - anchor)
    log_rho = _bounded(targets.proximal - targets.behaviour)
    weight = _weight(log_rho, logprobs=logprobs, targets=targets, config=config)
    found = objective(log_ratio, logprobs=logprobs, targets=targets, config=config)
    total = -(targets.weights * weight * found.gain).sum()
    ratio, rho = log_ratio.exp(), log_rho.exp()
    means = {
        "policy/loss": total,
        "policy/clipfrac": (targets.shares * found.clipped).sum(),
        "policy/approx_kl": (targets.shares * (ratio - 1.0 - log_ratio)).sum(),
        "policy/is_weight_mean": (targets.shares * weight).sum(),
        "policy/is_capped": (targets.shares * (rho > _bounds(config)[1])).sum(),
        "policy/is_masked": (targets.shares * (weight == 0.0)).sum(),
    }
    return total, means, {"policy/is_weight_max": _largest(rho), "policy/ratio_max": _largest(ratio)}


def counting(targets: Targets, *, config: LearnerConfig) -> Tensor:
    """[m] bool: tokens that move the policy in a step's first update: they have an advantage and a weight, after correction and
    rejection too, and are not clipped."""
    start = targets.proximal
    anchor = targets.behaviour if config.correction == "naive" else start
    weight = _weight(_bounded(start - targets.behaviour), logprobs=start, targets=targets, config=config)
    clipped = objective(_bounded(start - anchor), logprobs=start, targets=targets, config=config).clipped
    return (targets.weights > 0.0) & (weight > 0.0) & (targets.advantages != 0.0) & ~clipped


def _weight(log_rho: Tensor, *, logprobs: Tensor, targets: Targets, config: LearnerConfig) -> Tensor:
    """[m] what a token's loss is multiplied by."""
    counted = targets.weights > 0.0
    correction = CORRECTIONS["none" if config.correction == "naive" else config.correction]
    weight = correction.compute(log_rho, sequences=targets.sequences, counted=counted, bounds=_bounds(config))
    rejection = REJECTIONS[config.rejection.kind]
    drift = Drift(
        log_rho=log_rho,
        log_present=_bounded(logprobs.detach() - targets.behaviour),
        advantages=targets.advantages,
        sequences=targets.sequences,
        counted=counted,
    )
    bounds = chosen(rejection.bounds, low=config.rejection.low, high=config.rejection.high)
    return torch.where(rejection.keeps(drift, bounds), weight, torch.zeros_like(weight))


def _bounds(config: LearnerConfig) -> tuple[float, float]:
    own = CORRECTIONS["none" if config.correction == "naive" else config.correction].bounds
    return chosen(own, low=config.correction_bounds.low, high=config.correction_bounds.high)


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def cross_entropy(logprobs: Tensor, *, weights: Tensor) -> Tensor:
    """-sum(weight * log pi): the loss of tokens that were given, not sampled."""
    return -(weights * logprobs).sum()


def distillation(logprobs: Tensor, *, choices: Tensor | None, guide: Guide) -> tuple[Tensor, Tensor]:
    """sum(weight * D(pi, guide)), and its mean by the guide's shares. D is an estimate by the sampled token, or where the guide has
    `ids` the KL over these: `choices` [m, k] are then the policy's log-probabilities of them."""
    if choices is None or guide.ids is None:
        divergence = kl_estimate(logprobs, reference=guide.logprobs, kind=guide.kind)
    else:
        divergence = kl_of_choices(choices, reference=guide.logprobs)
    return (guide.weights * divergence).sum(), (guide.shares * divergence).sum()


def value_loss(values: Tensor, *, targets: Targets, clip: float) -> Tensor:
    """0.5 E[max((v - R)^2, (v_clipped - R)^2)]; v_clipped stays within `clip` of the value before the updates.

    As in arXiv:1707.06347's code: a value that moved further than `clip` has no gradient that moves it on.
    """
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
    entropy_coef: float,
    scale: float,
    choices: Tensor | None = None,
) -> Loss:
    """The policy's whole loss on what it sampled. `entropy` is given when there is a bonus, `values` when the critic is shared,
    `choices` for a guide with `ids`.

    `entropy_coef` is the present coefficient; 0 when there is no such term. `scale` is the size of the scores: the
    value loss is divided by it, so that the head's gradient does not grow with them.
    """
    total, means, maxima = policy_loss(logprobs, targets=targets, config=config)
    for metric, guide in targets.guides.items():
        drawn, means[metric] = distillation(logprobs, choices=choices, guide=guide)
        total = total + drawn
    if entropy is not None:
        total = total - entropy_coef * (targets.weights * entropy).sum()
    if values is not None:
        critic = value_loss(values, targets=targets, clip=config.value_clip * scale)
        total = total + VALUE_COEF / scale * critic
        means["critic/vf_loss"] = critic
    return Loss(total=total, means={name: mean.detach() for name, mean in means.items()}, maxima=maxima)


def _largest(values: Tensor) -> Tensor:
    """The largest of non-negative values; 0 of none."""
    return torch.cat([values.detach(), values.new_zeros(1)]).max()
