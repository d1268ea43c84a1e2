"""How the losses of tokens become one number: the weight of each row's tokens, by the aggregation's name.

Called by `learner.training.batch_tensors` for every mini-batch, so that the weights do not depend on how it is packed or divided.
Pure torch functions.

| name | loss of rows i of n_i tokens (w_i: the row's share of its episode) | source                          |
|---------------------------|---|---|
| `token-mean` | sum of w_i l_it / sum of w_i n_i: every token alike | arXiv:2503.14476 eq. 12 (DAPO)  |
| `token-sum` | sum of w_i l_it: as large as the batch is | verl                            |
| `seq-mean-token-sum` | mean over rows of the sums | arXiv:2402.14740 (RLOO)         |
| `seq-mean-token-mean` | mean over rows of each row's mean | arXiv:2402.03300 eq. 3 (GRPO)   |
| `seq-mean-token-sum-norm` | mean over rows of the sums, divided by a constant | arXiv:2503.20783 (Dr. GRPO)     |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "token-mean": lambda own, counts, norm: own / (own * counts).sum(),
    "token-sum": lambda own, counts, norm: own,
    "seq-mean-token-sum": lambda own, counts, norm: own / own.sum(),
    "seq-mean-token-mean": lambda own, counts, norm: own / own.sum() / counts.clamp(min=1),
    "seq-mean-token-sum-norm": lambda own, counts, norm: own / own.sum() / norm,
}


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
