"""The rival of packed rows: the same policy on rows padded to the longest of their micro-batch, as a rectangle.

Used by `benchmarks.learner` and by the test that packed and padded are equal. Invariant: it differs from `Policy` in what its
layers compute, not in what they are asked: the same rows in, the same states out. Nothing of it is in the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.model.micro_batch import MicroBatch
from learner.model.policy import Policy

ALIKE = 0.7
"""`sorted_piles`: the shortest row of a micro-batch is at least this share of the longest."""


class PaddedPolicy(Policy):
    """Takes packed rows like `Policy`, pads them on the right, and gives the states of the real tokens back."""

    def __init__(self, lm: Any, *, value_head: bool) -> None:
        super().__init__(lm, value_head=value_head)
        lm.set_attn_implementation("sdpa")

    def states(self, micro: MicroBatch) -> Tensor:
        """[T, hidden]"""
        places = micro.starts[:-1, None] + torch.arange(micro.longest, device=micro.ids.device)
        inside = places < micro.starts[1:, None]
        padded = torch.where(inside, micro.ids[places.clamp(max=len(micro.ids) - 1)], 0)
        hidden: Tensor = self.lm.get_decoder()(input_ids=padded, use_cache=False).last_hidden_state
        return hidden[inside]


def equal_piles(lengths: npt.NDArray[np.int64], *, rows: Sequence[int], token_budget: int) -> list[list[int]]:
    """Micro-batches of one size, in the rows' order: as many rows as fit the budget when all are as long as the longest."""
    size = max(1, token_budget // int(lengths[list(rows)].max()))
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def sorted_piles(lengths: npt.NDArray[np.int64], *, rows: Sequence[int], token_budget: int) -> list[list[int]]:
    """The best that padding can do: rows sorted by length, each micro-batch filled up to the budget with rows alike."""
    piles: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (-int(lengths[row]), row)):
        longest = int(lengths[piles[-1][0]]) if piles else 0
        if piles and int(lengths[row]) >= ALIKE * longest and (len(piles[-1]) + 1) * longest <= token_budget:
            piles[-1].append(row)
        else:
            piles.append([row])
    return piles


def padding_share(lengths: npt.NDArray[np.int64], *, piles: Sequence[Sequence[int]]) -> float:
    """Share of the tokens computed that are padding."""
    computed = sum(len(pile) * int(lengths[list(pile)].max()) for pile in piles)
    return 1.0 - sum(int(lengths[list(pile)].sum()) for pile in piles) / computed
