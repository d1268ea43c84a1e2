"""What a teacher says of each token that the policy sampled: on-policy distillation.

Called by `learner.training.trainer` once per step. With the policy sampling, the mean over its tokens of log pi - log pi_T is
KL(pi || pi_T), and its gradient is that of a policy gradient with the advantage log pi_T - log pi at each token, discounted to
nothing after it (arXiv:2306.08543, arXiv:2306.13649 with the reverse KL). So it goes into the advantages, where old data is
corrected for as any other is. Pure torch functions on [M] tensors; no model here.
"""

from __future__ import annotations

from torch import Tensor

from learner.algorithms.kl import LOG_RATIO_LIMIT


def teacher_advantages(logprobs: Tensor, *, teacher: Tensor, coef: float) -> Tensor:
    """[M] coef (log pi_T - log pi). `logprobs`: of the policy before the step; a token that the teacher would never say counts
    LOG_RATIO_LIMIT nats."""
    return coef * (teacher - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
