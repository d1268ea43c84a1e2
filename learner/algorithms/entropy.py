"""What keeps the policy's entropy from falling: the coefficient of the bonus, and tokens picked by covariance.

Called by `learner.training.trainer` once per step (the coefficient) and once per mini-batch (the tokens), with the numbers of the
whole mini-batch, so that the choice does not depend on how it is packed or divided. Pure functions and one small object.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
