"""The losses of the papers, token by token and row by row, beside which `benchmarks.data` puts the one loss with its three streams.

Nothing of `learner.algorithms` is used but what is compared. `largest_difference` draws batches, and returns the largest difference
of a loss or of its gradient. Invariant: all of it is float64, so what differs is the formula (sapo has its
5e-7 from a float32 constant).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithms.losses import AGGREGATIONS, actor_loss, cross_entropy, token_weights
from learner.algorithms.objectives import LOSSES, Guide, Targets

ROWS, LONGEST, CHOICES, VOCABULARY = 5, 9, 6, 11
KL, HINTS, ECHO, ENTROPY, NORM = 0.04, 0.7, 0.1, 0.01, 16.0
"""Coefficients of the other signals, and the constant of seq-mean-token-sum-norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Random numbers for M tokens of N rows. `logits` [M, V] and `values` [M] carry gradients."""

    logits: Tensor
    values: Tensor
    sampled: Tensor
    sequences: Tensor
    own: Tensor
    """[N] weight of each row."""
    behaviour: Tensor
    proximal: Tensor
    advantages: Tensor
    returns: Tensor
    before: Tensor
    """The critic's values before the update."""
    picked: Tensor
    reference: Tensor
    hinted: Tensor
    """[M, V] log-probabilities of the policy that has read a hint."""
    likeliest: Tensor
    """[M, k] its likeliest tokens."""
    echoed: Tensor
    """[M] bool: said by the environment, for the third stream."""


def drawn(generator: torch.Generator) -> Drawn:
    """A batch."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    counts = torch.randint(1, LONGEST + 1, (ROWS,), generator=generator)
    m = int(counts.sum())
    logits, hinted = normal(m, VOCABULARY), normal(m, VOCABULARY).log_softmax(-1)
    sampled = torch.randint(VOCABULARY, (m,), generator=generator)
    present = logits.log_softmax(-1).gather(1, sampled[:, None])[:, 0]
    proximal = (present + normal(m, scale=0.3)).clamp(max=-1e-3)
    return Drawn(
        logits=logits.requires_grad_(), values=normal(m).requires_grad_(), sampled=sampled,
        sequences=torch.repeat_interleave(torch.arange(ROWS), counts),
        own=torch.rand(ROWS, generator=generator, dtype=torch.float64) + 0.1,
        behaviour=proximal + normal(m, scale=0.5), proximal=proximal, advantages=normal(m), returns=normal(m),
        before=normal(m), picked=torch.rand(m, generator=generator) < 0.3, reference=present.detach() + normal(m, scale=0.3),
        hinted=hinted, likeliest=hinted.topk(CHOICES).indices, echoed=torch.rand(m, generator=generator) < 0.5,
    )  # fmt: skip


def _tokens(batch: Drawn, config: LearnerConfig, *, logprobs: Tensor) -> Tensor:
    """[M] what each token's objective is by its paper, to be made large."""
    return torch.cat(
        [
            PAPERS[config.loss](
                logprobs[row], batch.proximal[row], batch.advantages[row], batch.picked[row]
            )
            for row in (batch.sequences == number for number in range(ROWS))
        ]
    )  # fmt: skip


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def _ppo(new: Tensor, old: Tensor, advantages: Tensor, picked: Tensor) -> Tensor:
    gain = _clipped((new - old).exp(), advantages, 0.2, 0.28)
    return torch.where(advantages < 0, torch.maximum(gain, 3 * advantages), gain)


def _gspo(new: Tensor, old: Tensor, advantages: Tensor, picked: Tensor) -> Tensor:
    ratio = (new - old).mean().exp().detach() * new.exp() / new.exp().detach()
    return _clipped(ratio, advantages, 3e-4, 4e-4)


def _gmpo(new: Tensor, old: Tensor, advantages: Tensor, picked: Tensor) -> Tensor:
    logs = new - old
    held = torch.where(advantages > 0, logs.clamp(max=0.4), logs.clamp(min=-0.4))
    return held.mean().exp() * advantages


def _sapo(new: Tensor, old: Tensor, advantages: Tensor, picked: Tensor) -> Tensor:
    tau = 1.0 + 0.05 * (advantages <= 0)
    return 4 / tau / (1 + (-tau * ((new - old).exp() - 1)).exp()) * advantages


def _dppo(new: Tensor, old: Tensor, advantages: Tensor, divergence: Tensor, most: float) -> Tensor:
    moved = torch.sign(new - old) == torch.sign(advantages)
    ratio = (new - old).exp().detach().clamp(max=20)
    return torch.where(moved & (divergence.detach() > most), 0.0 * new, ratio * advantages * new)


def _dppo_kl(new: Tensor, old: Tensor, advantages: Tensor, picked: Tensor) -> Tensor:
    p, q = old.exp(), new.exp()
    return _dppo(new, old, advantages, p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log(), 0.05)


PAPERS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "gmpo": _gmpo,
    "sapo": _sapo,
    "cispo": lambda new, old, advantages, _: (new - old).exp().detach().clamp(0, 5) * advantages * new,
    "gpg": lambda new, old, advantages, _: advantages * new,
    "clip_cov": lambda new, old, advantages, picked: ~picked * _clipped((new - old).exp(), advantages, 0.2, 0.2),
    "kl_cov": lambda new, old, advantages, picked: (new - old).exp() * advantages - picked * (new - old).abs(),
    "dppo_tv": lambda new, old, advantages, _: _dppo(new, old, advantages, (new.exp() - old.exp()).abs(), 0.15),
    "dppo_kl": _dppo_kl,
}
"""Loss -> its objective on the tokens of a row: log pi, log pi before the step, advantages, tokens picked by covariance."""


def papers_loss(batch: Drawn, config: LearnerConfig) -> Tensor:
    """All signals as their papers write them, one after the other."""
    every = batch.logits.log_softmax(-1)
    logprobs = every.gather(1, batch.sampled[:, None])[:, 0]

    def aggregate(losses: Tensor, mode: str) -> Tensor:
        """A loop over rows."""
        rows = [losses[batch.sequences == number] for number in range(ROWS)]
        lengths = torch.tensor([float(len(row)) for row in rows], dtype=torch.float64)
        sums = torch.stack([row.sum() for row in rows])
        if mode.startswith("token"):
            return (batch.own * sums).sum() / ((batch.own * lengths).sum() if mode == "token-mean" else 1.0)
        divisors = {"seq-mean-token-mean": lengths, "seq-mean-token-sum-norm": torch.full_like(lengths, NORM)}
        return (batch.own * sums / divisors.get(mode, torch.ones_like(lengths))).sum() / batch.own.sum()

    mode = config.aggregation
    weight = (batch.proximal - batch.behaviour).exp().clamp(max=2)
    gap = batch.reference - logprobs
    told, read = every.gather(1, batch.likeliest), batch.hinted.gather(1, batch.likeliest)
    rest, other = 1 - told.exp().sum(-1), 1 - read.exp().sum(-1)
    entropy = -(every.exp() * every).sum(-1)
    near = batch.before + (batch.values - batch.before).clamp(-config.value_clip, config.value_clip)
    error = torch.maximum((batch.values - batch.returns) ** 2, (near - batch.returns) ** 2)
    foreseen = batch.own[batch.sequences] * batch.echoed
    return (
        aggregate(-weight * _tokens(batch, config, logprobs=logprobs), mode)
        + KL * aggregate((gap.exp() - 1 - gap).clamp(max=10), mode)
        + HINTS * aggregate((told.exp() * (told - read)).sum(-1) + rest * (rest / other).log(), "token-mean")
        - ENTROPY * aggregate(entropy, mode)
        + 0.5 * 0.5 * aggregate(error, "token-mean")
        - ECHO * (foreseen * logprobs).sum() / foreseen.sum().clamp(min=1e-9)
    )


def streams_loss(batch: Drawn, config: LearnerConfig) -> Tensor:
    """The same by the streams."""
    every = batch.logits.log_softmax(-1)
    logprobs = every.gather(1, batch.sampled[:, None])[:, 0]
    counts = torch.bincount(batch.sequences).double()
    weights, shares = (
        token_weights(batch.own, counts=counts, norm=NORM, mode=mode)[batch.sequences]
        for mode in (config.aggregation, "token-mean")
    )
    chosen = batch.likeliest
    guides = {
        "kl_ref": Guide(kind="k3", logprobs=batch.reference, weights=KL * weights, shares=shares),
        "kl_hinted": Guide(ids=chosen, logprobs=batch.hinted.gather(1, chosen), weights=HINTS * shares, shares=shares),
    }
    targets = Targets(
        behaviour=batch.behaviour, proximal=batch.proximal, advantages=batch.advantages, returns=batch.returns,
        values=batch.before, sequences=batch.sequences, weights=weights, shares=shares, picked=batch.picked, guides=guides,
    )  # fmt: skip
    loss = actor_loss(
        logprobs, entropy=-(every.exp() * every).sum(-1), values=batch.values, targets=targets, config=config,
        entropy_coef=ENTROPY, scale=1.0, choices=every.gather(1, chosen),
    )  # fmt: skip
    foreseen = batch.own[batch.sequences] * batch.echoed
    echo = ECHO * foreseen / foreseen.sum().clamp(min=1e-9)
    return loss.total + cross_entropy(logprobs, weights=echo)


def largest_difference(*, seed: int, batches: int) -> dict[str, float]:
    """Loss -> the largest difference over batches and aggregations, of the total or of a number of its gradient."""
    found = dict.fromkeys(LOSSES, 0.0)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(batches):
        batch = drawn(generator)
        for name in LOSSES:
            for mode in AGGREGATIONS:
                config = LearnerConfig.model_validate({"loss": name, "loss_agg": mode})
                sides = []
                for side in (papers_loss, streams_loss):
                    total = side(batch, config)
                    sides.append([total.detach(), *torch.autograd.grad(total, (batch.logits, batch.values))])
                gaps = [float((one - other).abs().max()) for one, other in zip(*sides, strict=True)]
                found[name] = max(found[name], *gaps)
    return found
