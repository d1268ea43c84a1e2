"""Rows to micro-batches: who computes what, and the padded tensors for it.

Called by `learner.trainer`, `learner.token_table` and `learner.warm_start`. Every rank holds the whole batch and makes the
same plan from it, so no communication is needed to agree. Invariants: each row is in exactly one micro-batch of a plan,
and every rank runs the same number of micro-batches (FSDP's collectives are entered by all ranks or none): a rank without
rows runs one of no tokens. Padding is on the right, where causal attention never sees it. No model and no loss here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from buffers.records import Int32, UInt8

Plan = list[list[list[int]]]
"""[micro-batch][rank] -> rows."""

SHORTEST_SHARE = 0.7
"""The shortest row of a micro-batch is at least this share of the longest: walks of 1-8 rounds then pad 13 %, not 33 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass of one rank: B padded rows of T tokens with m trained tokens."""

    ids: Tensor
    """[B, T] int64."""
    mask: Tensor
    """[B, T] bool: true where the token is trained."""
    index: Tensor
    """[m] int64: place of each trained token in the batch's flat arrays, row by row."""


class Sequences:
    """Rows of token ids with a training mask; their trained tokens are numbered 0..num_trained-1, row by row."""

    def __init__(self, ids: Sequence[Int32], *, masks: Sequence[UInt8]) -> None:
        self.ids = ids
        self.masks = masks
        self.lengths = np.array([len(row) for row in ids], dtype=np.int64)
        self.counts = np.array([int(mask.sum()) for mask in masks], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self.counts)])

    @property
    def num_trained(self) -> int:
        return int(self.counts.sum())

    def places(self, rows: Sequence[int]) -> Tensor:
        """[m] flat places of the trained tokens of these rows, in this order."""
        spans = [np.arange(self._starts[row], self._starts[row + 1]) for row in rows]
        return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *spans]))

    def micro_batch(self, rows: Sequence[int], *, device: torch.device) -> MicroBatch:
        """Pads these rows on the right. No rows: two tokens that train nothing."""
        width = max((int(self.lengths[row]) for row in rows), default=2)
        ids = np.zeros((max(len(rows), 1), width), dtype=np.int64)
        mask = np.zeros(ids.shape, dtype=np.bool_)
        for line, row in enumerate(rows):
            ids[line, : self.lengths[row]] = self.ids[row]
            mask[line, : self.lengths[row]] = self.masks[row]
        return MicroBatch(
            ids=torch.from_numpy(ids).to(device),
            mask=torch.from_numpy(mask).to(device),
            index=self.places(rows).to(device),
        )


def split_minibatches(episodes: npt.NDArray[np.int64], *, num: int, rng: np.random.Generator) -> list[list[int]]:
    """Shuffles episodes and deals them into `num` parts (fewer when episodes are fewer); returns each part's rows."""
    order = rng.permutation(np.unique(episodes))
    parts = np.array_split(order, min(num, len(order)))
    return [np.flatnonzero(np.isin(episodes, part)).tolist() for part in parts]


def plan(lengths: npt.NDArray[np.int64], *, rows: Sequence[int], num_ranks: int, token_budget: int) -> Plan:
    """Divides rows over ranks by tokens (longest first, to the least loaded), then each rank's rows into micro-batches.

    A micro-batch holds at most `token_budget` padded tokens, and no row much shorter than its longest; a row longer than
    the budget has one of its own.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for row in sorted(rows, key=lambda row: (-int(lengths[row]), row)):
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += int(lengths[row])
    piles = [_fill(lengths, rows=share, token_budget=token_budget) for share in shares]
    steps = max(1, max(len(pile) for pile in piles))
    return [[pile[step] if step < len(pile) else [] for pile in piles] for step in range(steps)]


def _fill(lengths: npt.NDArray[np.int64], *, rows: Sequence[int], token_budget: int) -> list[list[int]]:
    """Rows, longest first, into piles whose count times longest row stays within the budget."""
    piles: list[list[int]] = []
    for row in rows:
        longest = int(lengths[piles[-1][0]]) if piles else 0
        alike = int(lengths[row]) >= SHORTEST_SHARE * longest
        if piles and alike and (len(piles[-1]) + 1) * longest <= token_budget:
            piles[-1].append(row)
        else:
            piles.append([row])
    return piles


def padding_share(lengths: npt.NDArray[np.int64], *, plan: Plan) -> float:
    """Share of the tokens computed under this plan that are padding."""
    piles = [pile for step in plan for pile in step]
    padded = sum(len(pile) * int(lengths[pile].max()) for pile in piles if pile)
    return 1.0 - sum(int(lengths[pile].sum()) for pile in piles if pile) / padded
