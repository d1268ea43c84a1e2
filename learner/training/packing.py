"""Rows to micro-batches: who computes what, and the packed tensors for it.

Called by `learner.training.trainer`, `learner.training.batch_tensors` and `learner.training.sft`. Every rank
holds the whole batch and makes the same plan from it, so no communication is needed to agree. Invariants: each row is
in exactly one micro-batch of a plan, and every rank runs the same number of micro-batches (FSDP's collectives are
entered by all ranks or none): a rank without rows runs one that trains nothing. Rows lie one after another in a pack, without
padding, or for a model that cannot keep them apart there, beside one another and filled up (`PaddedSequences`);
`learner.training.tree_packing` and `learner.training.stems` compute what they share once. No model and no loss here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from buffers.records import UNKNOWN_EXPERT, Int32, UInt8, UInt16
from learner.model.packed_attention import MicroBatch, Segments

Places = npt.NDArray[np.int64]
Plan = list[list[list[int]]]
"""[micro-batch][rank] -> rows."""
ALIKE = 0.7
"""The shortest row of a rectangle is at least this share of the longest."""


class Sequences:
    """Rows of token ids with a training mask; their trained tokens are numbered 0..num_trained-1, row by row.

    `experts`: see `buffers.records.Row`; empty: of no row. `labels`: tokens may be computed once for several rows where these are
    equal; empty: the ids. Raises ValueError for a row that trains its first token: in a pack, what stands before it is another row.
    """

    def __init__(
        self,
        ids: Sequence[Int32],
        *,
        masks: Sequence[UInt8],
        experts: Sequence[UInt16 | None] = (),
        labels: Sequence[Int32] = (),
    ) -> None:
        first = [row for row, mask in enumerate(masks) if len(mask) and mask[0]]
        if first:
            raise ValueError(f"mask[0] of row {first[0]} must be 0, got 1; the first token of a row has no prefix")
        self.ids = ids
        self.masks = masks
        self.experts = experts or [None] * len(ids)
        self.labels = labels or ids
        self.lengths = np.array([len(row) for row in ids], dtype=np.int64)
        self.counts = np.array([int(mask.sum()) for mask in masks], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self.counts)])

    @property
    def num_trained(self) -> int:
        return int(self.counts.sum())

    @property
    def computed(self) -> tuple[int, int]:
        """Tokens that a pass over the rows computes, and twice the tokens that these see, less one each: L and L^2 of a row."""
        lengths = self.lengths.astype(np.int64)
        return int(lengths.sum()), int((lengths**2).sum())

    @property
    def raw_over_unique(self) -> float:
        """Tokens of the rows over those that a pass over them computes."""
        return float(self.lengths.sum()) / self.computed[0]

    def plan(self, rows: Sequence[int], *, num_ranks: int, token_budget: int) -> Plan:
        """The rows that each rank computes, and when."""
        return plan(self.lengths, rows=rows, num_ranks=num_ranks, token_budget=token_budget)

    def places(self, rows: Sequence[int]) -> Tensor:
        """[m] flat places of the trained tokens of these rows, in this order."""
        spans = [np.arange(self._starts[row], self._starts[row + 1]) for row in rows]
        return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *spans]))

    def micro_batch(self, rows: Sequence[int], *, device: torch.device) -> MicroBatch:
        """Packs these rows in this order. No rows: one of two tokens that trains nothing."""
        lengths = [len(self.ids[row]) for row in rows] or [2]
        nodes = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
        segments = Segments(
            positions=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None].to(device),
            starts=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)).to(device),
            longest=max(lengths),
        )
        return replace(self._predictions(rows, nodes=nodes, size=sum(lengths), device=device), segments=segments)

    def _predictions(
        self, rows: Sequence[int], *, nodes: Sequence[Places], size: int, device: torch.device
    ) -> MicroBatch:
        """What `size` places, among them the `nodes` of each row's tokens, predict."""
        ids = np.zeros(size, dtype=np.int64)
        for row, places in zip(rows, nodes):
            ids[places] = self.ids[row]
        trained = [np.flatnonzero(self.masks[row]) for row in rows]
        nothing = np.empty(0, dtype=np.int64)
        after = np.concatenate([nothing, *(self.ids[row][own] for row, own in zip(rows, trained))])
        predicting = np.concatenate([nothing, *(places[own - 1] for places, own in zip(nodes, trained))])
        before, firsts, which = np.unique(predicting, return_index=True, return_inverse=True)
        is_shared = len(before) < len(which) or (np.diff(which) != 1).any()
        real = np.isin(np.arange(size), np.concatenate(nodes))
        return MicroBatch(
            ids=torch.from_numpy(ids)[None].to(device),
            segments=None,
            before=torch.from_numpy(before).to(device),
            tokens=torch.from_numpy(after[firsts]).to(device),
            shared=torch.from_numpy(which).to(device) if is_shared else None,
            index=self.places(rows).to(device),
            experts=self._experts(rows, nodes=nodes, size=size, device=device),
            real=None if real.all() else torch.from_numpy(real).to(device),
        )

    def _experts(
        self, rows: Sequence[int], *, nodes: Sequence[Places], size: int, device: torch.device
    ) -> Tensor | None:
        """Those of `size` places, among them the `nodes` of each row's tokens."""
        recorded = [(self.experts[row], places) for row, places in zip(rows, nodes)]
        known = [(experts, places) for experts, places in recorded if experts is not None]
        if not known:
            return None
        found = np.full((size, *known[0][0].shape[1:]), UNKNOWN_EXPERT, dtype=np.int32)
        for experts, places in known:
            own = experts[:, 0, 0] != UNKNOWN_EXPERT
            found[places[own]] = experts[own]
        return torch.from_numpy(found).to(device)


class PaddedSequences(Sequences):
    """Rows as rectangles: the shorter ones are filled up on the right."""

    def __init__(self, rows: Sequences) -> None:
        super().__init__(rows.ids, masks=rows.masks, experts=rows.experts)

    def plan(self, rows: Sequence[int], *, num_ranks: int, token_budget: int) -> Plan:
        """Ranks get rows as packed ones; a micro-batch has at most `token_budget` places, and rows of about one length."""
        return plan(self.lengths, rows=rows, num_ranks=num_ranks, token_budget=token_budget, fill=_fill_rectangles)

    def micro_batch(self, rows: Sequence[int], *, device: torch.device) -> MicroBatch:
        """One row of ids for each. No rows: one of two tokens that trains nothing."""
        ids = [self.ids[row] for row in rows] or [np.zeros(2, dtype=np.int32)]
        longest = max(map(len, ids))
        nodes = [np.arange(len(row)) + place * longest for place, row in enumerate(ids)]
        micro = self._predictions(rows, nodes=nodes, size=len(ids) * longest, device=device)
        rectangle = np.stack([np.pad(row, (0, longest - len(row)), mode="edge") for row in ids]).astype(np.int64)
        return replace(micro, ids=torch.from_numpy(rectangle).to(device))


def split_minibatches(owners: npt.NDArray[np.int64], *, num: int, rng: np.random.Generator) -> list[list[int]]:
    """Shuffles what rows belong to (episodes, or whole groups) and deals it into `num` parts (fewer when there are fewer);
    returns each part's rows."""
    order = rng.permutation(np.unique(owners))
    parts = np.array_split(order, min(num, len(order)))
    return [np.flatnonzero(np.isin(owners, part)).tolist() for part in parts]


def plan(
    lengths: npt.NDArray[np.int64],
    *,
    rows: Sequence[int],
    num_ranks: int,
    token_budget: int,
    fill: Callable[..., list[list[int]]] | None = None,
) -> Plan:
    """Divides rows over ranks by tokens (longest first, to the least loaded), then each rank's rows into micro-batches.

    A micro-batch holds at most `token_budget` tokens; a row longer than that has one of its own.
    """
    sizes = lengths[rows].tolist()
    shares, _ = dealt([[row] for row in rows], sizes=sizes, num_ranks=num_ranks)
    return in_step([(fill or _fill)(lengths, rows=share, token_budget=token_budget) for share in shares])


def dealt(items: Sequence[list[int]], *, sizes: Sequence[int], num_ranks: int) -> tuple[list[list[int]], int]:
    """The rows of each rank: the largest items first, each to the rank with least to do; and the tokens of the rank with most."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for size, item in sorted(zip(sizes, items, strict=True), key=lambda each: (-each[0], each[1])):
        rank = loads.index(min(loads))
        shares[rank] += item
        loads[rank] += size
    return shares, max(loads)


def in_step(piles: Sequence[list[list[int]]]) -> Plan:
    """The micro-batches of each rank, side by side; a rank with fewer than others has empty ones, and there is at least one."""
    return [list(each) for each in zip_longest(*piles, fillvalue=[])] or [[[] for _ in piles]]


def _fill(lengths: npt.NDArray[np.int64], *, rows: Sequence[int], token_budget: int) -> list[list[int]]:
    """Rows, longest first, each into the first pile that has room for it (first fit decreasing)."""
    piles: list[list[int]] = []
    rooms: list[int] = []
    for row in rows:
        length = int(lengths[row])
        place = next((place for place, room in enumerate(rooms) if room >= length), None)
        if place is None:
            piles.append([row])
            rooms.append(token_budget - length)
        else:
            piles[place].append(row)
            rooms[place] -= length
    return piles


def _fill_rectangles(lengths: npt.NDArray[np.int64], *, rows: Sequence[int], token_budget: int) -> list[list[int]]:
    """Rows, longest first, each beside the one before it while the rectangle has room and they are alike."""
    piles: list[list[int]] = []
    for row in rows:
        longest = int(lengths[piles[-1][0]]) if piles else 0
        if piles and int(lengths[row]) >= ALIKE * longest and (len(piles[-1]) + 1) * longest <= token_budget:
            piles[-1].append(row)
        else:
            piles.append([row])
    return piles
