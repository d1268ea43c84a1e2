"""What the score of one unit says beside those of its group: scores and groups [U] -> advantages [U].

Called by `learner.algorithms.advantages`. Pure torch functions. Invariant: a group of one, or of scores that are equal up to
rounding, has advantage 0 everywhere; members that a group lacks are not made up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.values import ROUNDING


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


def difficulty(scores: Tensor, *, groups: Tensor) -> Tensor:
    """[U] int64 -1: no member of the group succeeded (score > 0); 1: all did; 0: some did."""
    levels = torch.zeros_like(groups)
    for group in torch.unique(groups):
        solved = scores[groups == group] > 0
        levels[groups == group] = int(solved.all()) - int((~solved).all())
    return levels


def differing(scores: Tensor, *, groups: Tensor) -> list[Tensor]:
    """The units of each group whose scores differ by more than rounding; so it has at least two."""
    found = [torch.nonzero(groups == group).squeeze(1) for group in torch.unique(groups)]
    spreads = [scores[members].max() - scores[members].min() for members in found]
    sizes = [scores[members].abs().max() for members in found]
    return [members for members, spread, size in zip(found, spreads, sizes) if bool(spread > ROUNDING * size)]
