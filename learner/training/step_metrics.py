"""Adds up what the losses report over the micro-batches, updates and ranks of one step.

Used by `learner.training.trainer`. Invariant: every rank adds the same names the same number of times, so `metrics`
(entered by all ranks) may reduce them in one go. Knows no name but those of the updates themselves.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learner.model import fsdp


class StepMetrics:
    """One per step."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._norms: list[float] = []
        self._num_skipped = 0

    def add(self, *, means: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
        """One micro-batch of this rank: its share of the mini-batch's means, and its maxima."""
        for name, value in means.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def end_update(self, norm: float, *, critic: float = 0.0) -> None:
        """One optimizer update: its gradient norm before clipping, and a separate critic's; equal on all ranks."""
        self._norms.append(norm)
        self._num_skipped += not (math.isfinite(norm) and math.isfinite(critic))

    def metrics(self) -> dict[str, float]:
        """Means over updates, maxima over everything; the gradient norm is the mean of the updates that were made."""
        sums = fsdp.all_sum(torch.stack(list(self._sums.values()))) / len(self._norms)
        maxima = fsdp.all_max(torch.stack(list(self._maxima.values())))
        finite = [norm for norm in self._norms if math.isfinite(norm)]
        return {
            **dict(zip(self._sums, sums.tolist())),
            **dict(zip(self._maxima, maxima.tolist())),
            "policy/grad_norm": sum(finite) / len(finite) if finite else 0.0,
            "learner/updates": float(len(finite)),
            "learner/skipped": float(self._num_skipped),
        }
