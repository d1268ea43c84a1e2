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

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from buffers.records import UNKNOWN_EXPERT, Int32, UInt8, UInt16
from learner.model.packed_attention import MicroBatch, Segments

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
        ids = [self.ids[row] for row in rows] or [np.zeros(2, dtype=np.int32)]
        masks = [self.masks[row] for row in rows] or [np.zeros(2, dtype=np.uint8)]
        lengths = [len(row) for row in ids]
        flat = np.concatenate(ids).astype(np.int64)
        trained = np.flatnonzero(np.concatenate(masks))
        positions = np.concatenate([np.arange(length) for length in lengths])
        return MicroBatch(
            ids=torch.from_numpy(flat)[None].to(device),
            segments=Segments(
                positions=torch.from_numpy(positions)[None].to(device),
                starts=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)).to(device),
                longest=max(lengths),
            ),
            before=torch.from_numpy(trained - 1).to(device),
            tokens=torch.from_numpy(flat[trained]).to(device),
            shared=None,
            index=self.places(rows).to(device),
            experts=self._experts(
                rows, nodes=np.split(np.arange(len(flat)), np.cumsum(lengths)), size=len(flat), device=device
            ),
        )

    def _experts(
        self, rows: Sequence[int], *, nodes: Sequence[npt.NDArray[np.int64]], size: int, device: torch.device
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
        masks = [self.masks[row] for row in rows] or [np.zeros(2, dtype=np.uint8)]
        longest = max(map(len, ids))
        rectangle = np.stack([np.pad(row, (0, longest - len(row)), mode="edge") for row in ids]).astype(np.int64)
        trained = np.concatenate([np.flatnonzero(mask) + place * longest for place, mask in enumerate(masks)])
        nodes = [np.arange(len(row)) + place * longest for place, row in enumerate(ids)]
        return MicroBatch(
            ids=torch.from_numpy(rectangle).to(device),
            segments=None,
            before=torch.from_numpy(trained - 1).to(device),
            tokens=torch.from_numpy(rectangle.reshape(-1)[trained]).to(device),
            shared=None,
            index=self.places(rows).to(device),
            experts=self._experts(rows, nodes=nodes, size=rectangle.size, device=device),
            real=torch.from_numpy(np.isin(np.arange(rectangle.size), np.concatenate(nodes))).to(device),
        )


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
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for row in sorted(rows, key=lambda row: (-int(lengths[row]), row)):
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += int(lengths[row])
    piles = [(fill or _fill)(lengths, rows=share, token_budget=token_budget) for share in shares]
    steps = max(1, max(len(pile) for pile in piles))
    return [[pile[step] if step < len(pile) else [] for pile in piles] for step in range(steps)]


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
