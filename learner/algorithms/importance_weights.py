"""Importance weights for data that an older (or differently computed) policy sampled: one table by name.

Called by `learner.algorithms.losses`. With rho = pi_proximal / pi_behaviour at each token, a correction gives the
constant that the token's loss is multiplied by. All tensors are [m], one entry per trained token; `sequences` numbers
the row of each. Invariants: no gradient; a weight is finite and never negative. No advantages and no model here.

| name       | weight                                                            | source                                   |
|------------|-------------------------------------------------------------------|------------------------------------------|
| `none`     | 1                                                                 | synchronous data                         |
| `tis`      | min(rho, 2)                                                       | truncated, arXiv:1802.01561 section 4.1  |
| `seq_tis`  | min(product of rho over the row, 2)                               | the same for a row                       |
| `icepop`   | rho where 0.5 <= rho <= 5, else 0                                 | IcePop, arXiv:2510.18855                 |
| `mis`      | rho where rho <= 2, else 0                                        | masked instead of truncated              |
| `seq_mis`  | the row's product where that is <= 2, else 0                      | the same for a row                       |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from learner.algorithms.kl import LOG_RATIO_LIMIT

CAP = 2.0
BAND = (0.5, 5.0)

Correction = Callable[..., Tensor]
"""(log rho [m], sequences=[m]) -> weight [m]."""


def per_sequence(values: Tensor, *, sequences: Tensor, mean: bool) -> Tensor:
    """[m] sum (or mean) of the values of a token's row, at each of its tokens."""
    _, numbers, counts = torch.unique(sequences, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add(0, numbers, values)
    return (sums / counts if mean else sums)[numbers]


def _ratio(log_rho: Tensor, *, sequences: Tensor, whole: bool) -> Tensor:
    logs = per_sequence(log_rho, sequences=sequences, mean=False) if whole else log_rho
    return logs.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _truncated(log_rho: Tensor, *, sequences: Tensor, whole: bool) -> Tensor:
    return _ratio(log_rho, sequences=sequences, whole=whole).clamp(max=CAP)


def _masked(log_rho: Tensor, *, sequences: Tensor, whole: bool, low: float, high: float) -> Tensor:
    ratio = _ratio(log_rho, sequences=sequences, whole=whole)
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


def _none(log_rho: Tensor, *, sequences: Tensor) -> Tensor:
    return torch.ones_like(log_rho)


CORRECTIONS: dict[str, Correction] = {
    "none": _none,
    "tis": partial(_truncated, whole=False),
    "seq_tis": partial(_truncated, whole=True),
    "icepop": partial(_masked, whole=False, low=BAND[0], high=BAND[1]),
    "mis": partial(_masked, whole=False, low=0.0, high=CAP),
    "seq_mis": partial(_masked, whole=True, low=0.0, high=CAP),
}
