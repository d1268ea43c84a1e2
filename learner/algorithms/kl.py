"""KL(policy || frozen reference) from log-probabilities of sampled tokens, and the coefficient that weighs it.

Called by `learner.algorithms.losses` (KL as a term of the loss) and `learner.training.trainer` (KL taken off the
rewards, and the coefficient). All tensors are [m], one entry per token that the policy sampled. Pure functions and one
small object.

John Schulman's names (joschu.net/blog/kl-approx.html); with d = log pi - log pi_ref:

| kind | estimate       | mean                 | as a loss, its mean gradient on fresh data is      |
|------|----------------|----------------------|-----------------------------------------------------|
| k1   | d              | KL                   | 0: use it in the reward                             |
| abs  | |d|            | more than KL         | a pull towards the reference of constant size       |
| k2   | d^2 / 2        | close to KL          | that of KL itself                                   |
| k3   | e^-d - 1 + d   | KL, and never below 0| that of KL(reference || policy)                     |

d is kept within LOG_RATIO_LIMIT, and k3 at most LARGEST_K3, as in verl: a token that became much less likely than the reference has
it (d below -2.6) counts as 10 nats and is pulled no more, so that one token cannot rule a step. k1, abs and k2 pull it still.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp() of anything beyond is treated as this: float32 stays finite."""
LARGEST_K3 = 10.0
"""Nats. Unbounded, k3 has a gradient of 22,000 at a token that is 10 nats below the reference."""
LARGEST_ERROR = 0.2
"""Largest relative change of the adaptive coefficient in one horizon."""


def _k3(difference: Tensor) -> Tensor:
    return ((-difference).exp() - 1.0 + difference).clamp(max=LARGEST_K3)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: difference,
    "abs": torch.abs,
    "k2": lambda difference: 0.5 * difference**2,
    "k3": _k3,
}


def kl_estimate(logprobs: Tensor, *, reference: Tensor, kind: str) -> Tensor:
    """[m] estimate of KL(pi || pi_ref) at each token; the gradient flows through `logprobs`."""
    return KINDS[kind]((logprobs - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def kl_of_choices(logprobs: Tensor, *, reference: Tensor) -> Tensor:
    """[m] KL(pi || pi_ref) over k tokens of the vocabulary and all others as one outcome; [m, k] log-probabilities of each.

    sum over the k of pi (log pi - log pi_ref) + rest (log rest - log rest_ref), rest = 1 - sum of pi. It is the KL itself where the
    k are all, else at most that. The gradient flows through `logprobs`.
    """
    rest, other = (1.0 - each.exp().sum(-1) for each in (logprobs, reference))
    tiny = torch.finfo(logprobs.dtype).eps
    rest, other = rest.clamp(min=tiny), other.clamp(min=tiny)
    chosen = logprobs.exp() * (logprobs - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return chosen.sum(-1) + rest * (rest.log() - other.log())


class KLCoefficient:
    """Fixed at `start` when `target` is None; else steered towards a mean KL of `target` nats per token.

    arXiv:1909.08593 section 2.2: times 1 + clip(KL / target - 1, -0.2, 0.2) * episodes / `horizon`, a fifth at most in one
    step. `value` is its whole state while it is steered; a fixed one is the configuration's.
    """

    def __init__(self, start: float, *, target: float | None, horizon: float) -> None:
        self.value = start
        self._target = target
        self._horizon = horizon

    @property
    def is_adaptive(self) -> bool:
        return self._target is not None

    def update(self, mean_kl: float, *, num_episodes: int) -> None:
        """Adapt the coefficient after a step with this mean KL over its tokens."""
        if self._target is not None:
            error = min(max(mean_kl / self._target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
            self.value *= 1.0 + error * min(num_episodes / self._horizon, 1.0)
