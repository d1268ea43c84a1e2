"""Importance weights for data that an older (or differently computed) policy sampled, and rows that are too far off: tables by
name.

Called by `learner.algorithms.losses`. With rho = pi_proximal / pi_behaviour at each token, a correction gives the
constant that the token's loss is multiplied by, and a rejection says which rows are left out, whatever their weight. All tensors
are [m], one entry per trained token; `sequences` numbers the row of each, `counted` is false for tokens whose loss has weight 0:
they are context, and take no part in a row's product or mean. Invariants: no gradient; a weight is finite and never negative.

| correction | weight, with its own bounds low and high                          | source                                   |
|------------|-------------------------------------------------------------------|------------------------------------------|
| `none`     | 1                                                                 | synchronous data                         |
| `tis`      | min(rho, 2)                                                       | truncated, arXiv:1802.01561 section 4.1  |
| `seq_tis`  | min(product of rho over the row, 2)                               | the same for a row                       |
| `icepop`   | rho where 0.5 <= rho <= 5, else 0                                 | IcePop, arXiv:2510.18855                 |
| `mis`      | rho where rho <= 2, else 0                                        | masked instead of truncated              |
| `seq_mis`  | the row's product where that is <= 2, else 0                      | the same for a row                       |

The products grow and shrink with a row's length: on rows of thousands of tokens use a rejection by mean instead.

| rejection         | a row is kept where                                                       | source                           |
|-------------------|---------------------------------------------------------------------------|----------------------------------|
| `none`            | always                                                                    |                                  |
| `geo_mean`        | 0.999 <= exp(mean of log rho) <= 1.001                                    | verl, `rollout_rs: seq_mean_k1`  |
| `k3_mean`         | mean of rho - 1 - log rho <= 0.01                                         | verl, `rollout_rs: seq_mean_k3`  |
| `stale_negatives` | its advantage is not negative, or mean of log(pi_behave / pi) <= 0.5      | arXiv:2512.02556 eq. 9; TRL      |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from learner.algorithms.kl import LOG_RATIO_LIMIT

Bounds = tuple[float, float]


def per_sequence(values: Tensor, *, sequences: Tensor, counted: Tensor, mean: bool) -> Tensor:
    """[m] sum (or mean) of the values of the counted tokens of a token's row, at each of its tokens; 0 without any."""
    _, numbers, counts = torch.unique(sequences, return_inverse=True, return_counts=True)
    nothing = torch.zeros(len(counts), dtype=values.dtype, device=values.device)
    sums = nothing.index_add(0, numbers, torch.where(counted, values, torch.zeros_like(values)))
    if mean:
        sums = sums / nothing.index_add(0, numbers, counted.to(values)).clamp(min=1.0)
    return sums[numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """`compute(log_rho, sequences=, counted=, bounds=)` -> weight, all [m]; `bounds` are its own (low, high)."""

    compute: Callable[..., Tensor]
    bounds: Bounds


def _ratio(log_rho: Tensor, *, sequences: Tensor, counted: Tensor, whole: bool) -> Tensor:
    logs = per_sequence(log_rho, sequences=sequences, counted=counted, mean=False) if whole else log_rho
    return logs.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _none(log_rho: Tensor, *, sequences: Tensor, counted: Tensor, bounds: Bounds) -> Tensor:
    return torch.ones_like(log_rho)


def _truncated(log_rho: Tensor, *, sequences: Tensor, counted: Tensor, bounds: Bounds, whole: bool) -> Tensor:
    return _ratio(log_rho, sequences=sequences, counted=counted, whole=whole).clamp(max=bounds[1])


def _masked(log_rho: Tensor, *, sequences: Tensor, counted: Tensor, bounds: Bounds, whole: bool) -> Tensor:
    ratio = _ratio(log_rho, sequences=sequences, counted=counted, whole=whole)
    return torch.where((ratio >= bounds[0]) & (ratio <= bounds[1]), ratio, torch.zeros_like(ratio))


CORRECTIONS: dict[str, Correction] = {
    "none": Correction(compute=_none, bounds=(0.0, 2.0)),
    "tis": Correction(compute=partial(_truncated, whole=False), bounds=(0.0, 2.0)),
    "seq_tis": Correction(compute=partial(_truncated, whole=True), bounds=(0.0, 2.0)),
    "icepop": Correction(compute=partial(_masked, whole=False), bounds=(0.5, 5.0)),
    "mis": Correction(compute=partial(_masked, whole=False), bounds=(0.0, 2.0)),
    "seq_mis": Correction(compute=partial(_masked, whole=True), bounds=(0.0, 2.0)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How far a row's tokens are from the policy that sampled them. [m] each."""

    log_rho: Tensor
    """log pi_proximal - log pi_behaviour."""
    log_present: Tensor
    """log pi - log pi_behaviour, of the present weights."""
    advantages: Tensor
    sequences: Tensor
    counted: Tensor

    def mean(self, values: Tensor) -> Tensor:
        return per_sequence(values.detach(), sequences=self.sequences, counted=self.counted, mean=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """`keeps(drift, bounds)` -> [m] bool; `bounds` are its own (low, high)."""

    keeps: Callable[[Drift, Bounds], Tensor]
    bounds: Bounds


def _keeps_all(drift: Drift, bounds: Bounds) -> Tensor:
    return torch.ones_like(drift.counted)


def _geo_mean(drift: Drift, bounds: Bounds) -> Tensor:
    mean = drift.mean(drift.log_rho).exp()
    return (mean >= bounds[0]) & (mean <= bounds[1])


def _k3_mean(drift: Drift, bounds: Bounds) -> Tensor:
    return drift.mean(drift.log_rho.exp() - 1.0 - drift.log_rho) <= bounds[1]


def _stale_negatives(drift: Drift, bounds: Bounds) -> Tensor:
    return (drift.advantages >= 0.0) | (drift.mean(-drift.log_present) <= bounds[1])


REJECTIONS: dict[str, Rejection] = {
    "none": Rejection(keeps=_keeps_all, bounds=(0.0, 1.0)),
    "geo_mean": Rejection(keeps=_geo_mean, bounds=(0.999, 1.001)),
    "k3_mean": Rejection(keeps=_k3_mean, bounds=(0.0, 0.01)),
    "stale_negatives": Rejection(keeps=_stale_negatives, bounds=(0.0, 0.5)),
}


def chosen(own: Bounds, *, low: float | None, high: float | None) -> Bounds:
    """The bounds that were set, and its own where none was."""
    return own[0] if low is None else low, own[1] if high is None else high
