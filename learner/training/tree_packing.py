"""Rows to micro-batches in which what rows share is computed once: as `learner.training.packing`, with a prefix tree.

Used by `learner.training.layout`, `learner.training.stems` and `learner.training.trainer`. Invariants: as there, every rank makes
the same plan; a micro-batch holds at most `token_budget` places, and at most GATHERED times as many gathered keys, but for a row
longer than that; a group's rows are on one rank and in one mini-batch unless that leaves ranks or mini-batches without work. No
model and no loss here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from buffers.records import Int32
from learner.model.packed_attention import MicroBatch, Paths, Segments
from learner.training.packing import Places, Plan, Sequences, dealt, in_step

# Rows as a tree: tokens that rows have in common from their start on are laid out once. Rows are sorted, so that each shares
# most with the one before it; all that is kept are the order and these depths. Invariants: rows part one token *before* they
# differ, so that every place of the tree predicts one token; a row's path is its exact ids; the sizes that a plan counts are
# those that the layout has. numpy only: no model here.

LEAST_SHARED = 8
"""Tokens that a fork must lie beyond the one before it: each segment costs a call of attention, and its path gathered once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Some rows of the tree: T places in n segments, and where each row lies."""

    rows: list[int]
    """The rows, in the tree's order."""
    nodes: list[Places]
    """[L] each: the place of every token of the row."""
    positions: Places
    """[T] place of each token in its row."""
    starts: Places
    """[n + 1] where each segment starts, and T."""
    paths: list[Places]
    """Each segment's path: the places of all tokens from its rows' first to its own last."""


class PrefixTree:
    """The tree of all rows of a batch; plans and layouts take any of them."""

    def __init__(self, ids: Sequence[Int32]) -> None:
        texts = [row.astype(">u4").tobytes() for row in ids]  # big-endian bytes sort as the ids do
        self._order = sorted(range(len(ids)), key=texts.__getitem__)
        self._place = {row: place for place, row in enumerate(self._order)}
        pairs = pairwise(self._order)
        common = [0, *(_shared(ids[row], after=ids[previous]) for previous, row in pairs)]
        self._shared = _spaced(np.array(common, dtype=np.int64))
        self._lengths = [len(row) for row in ids]

    def sorted(self, rows: Sequence[int]) -> list[int]:
        """These rows in the tree's order: each next to those that it shares most with."""
        return sorted(rows, key=self._place.__getitem__)

    def tokens(self, rows: Sequence[int]) -> int:
        """Places of the layout of these rows."""
        return self.size(rows)[0]

    def size(self, rows: Sequence[int]) -> tuple[int, int]:
        """Places of the layout of these rows, and of all its paths together."""
        meter = Meter()
        ordered = self.sorted(rows)
        for row, shared in zip(ordered, self.depths(ordered)):
            meter = meter.after(self._lengths[row], shared=shared)
        return meter.tokens, meter.gathered

    def runs(self, rows: Sequence[int], *, tokens: int, gathered: int) -> list[list[int]]:
        """Divides these rows, in the tree's order, into runs within both limits; a row beyond them has a run of its own."""
        runs: list[list[int]] = []
        meter = Meter()
        ordered = self.sorted(rows)
        for row, shared in zip(ordered, self.depths(ordered)):
            longer = meter.after(self._lengths[row], shared=shared)
            if runs and longer.tokens <= tokens and longer.gathered <= gathered:
                runs[-1].append(row)
                meter = longer
            else:
                runs.append([row])
                meter = Meter().after(self._lengths[row], shared=0)
        return runs

    def layout(self, rows: Sequence[int]) -> Layout:
        """Lays each row's tokens behind those of the row before it, without what they share; a fork ends a segment."""
        ordered = self.sorted(rows)
        nodes: list[Places] = []
        positions: list[Places] = []
        firsts: list[int] = []
        cuts: set[int] = set()
        total = 0
        path = np.empty(0, dtype=np.int64)
        for row, shared in zip(ordered, self.depths(ordered)):
            length = self._lengths[row]
            if shared < len(path) or not nodes:
                cuts.update((total, *path[shared : shared + 1].tolist()))
            firsts.append(total)
            positions.append(np.arange(shared, length))
            path = np.concatenate([path[:shared], np.arange(total, total + length - shared)])
            nodes.append(path)
            total += length - shared
        starts = np.array([*sorted(cut for cut in cuts if cut < total), total], dtype=np.int64)
        depths = np.concatenate(positions)
        owners = np.searchsorted(firsts, starts[1:] - 1, side="right") - 1
        paths = [nodes[owner][: depths[end - 1] + 1] for owner, end in zip(owners.tolist(), starts[1:].tolist())]
        return Layout(rows=ordered, nodes=nodes, positions=depths, starts=starts, paths=paths)

    def depths(self, ordered: Sequence[int]) -> list[int]:
        """How many tokens each of these rows shares with the one before it; 0 of the first."""
        places = [self._place[row] for row in ordered]
        between = (self._shared[before + 1 : place + 1].min() for before, place in pairwise(places))
        return [0, *map(int, between)][: len(places)]


@dataclass(frozen=True, slots=True)
class Meter:
    """The size of a layout that grows row by row."""

    tokens: int = 0
    gathered: int = 0
    forks: tuple[int, ...] = ()
    """Depths at which segments end on the last row's path, but its end."""
    end: int = 0
    """Length of the last row."""

    def after(self, length: int, *, shared: int) -> Meter:
        """The size with one more row, which shares so many tokens with the last; in the tree's order it is no start of that one."""
        forks = self.forks
        while forks and forks[-1] > shared:
            forks = forks[:-1]
        tokens = self.tokens + length - shared
        if shared == self.end:  # the last row continues: its last segment grows
            return Meter(tokens, self.gathered + length - shared, forks, length)
        cut = 0
        if shared and (not forks or forks[-1] < shared):
            cut, forks = shared, (*forks, shared)
        return Meter(tokens, self.gathered + length + cut, forks, length)


def _shared(row: Int32, *, after: Int32) -> int:
    """Tokens that both may share: one fewer than they have in common, unless one is all of the other's start."""
    least = min(len(row), len(after))
    differ = row[:least] != after[:least]
    if not differ.any():
        return least
    return max(0, int(differ.argmax()) - 1)


def _spaced(shared: Places) -> Places:
    """Depths that neighbours share, forks that lie less than LEAST_SHARED beyond another moved up to that one."""
    found = np.zeros_like(shared)
    ranges = [(0, len(shared))]
    while ranges:
        first, end = ranges.pop()
        inner = shared[first + 1 : end]
        if not len(inner):
            continue
        depth = int(inner.min())
        depth = depth if depth >= LEAST_SHARED else 0  # behind a fork, only those are left that lie so far beyond it
        forks = np.flatnonzero(inner < depth + LEAST_SHARED) + first + 1
        found[forks] = depth
        edges = [first, *forks.tolist(), end]
        ranges += pairwise(edges)
    return found


LEAST_RATIO = 1.1
"""Tokens of the rows over those of the tree below which rows are packed one by one."""
GATHERED = 6
"""Gathered keys for each token of the budget: a chain of short branches would gather its path again and again. At 6, eight answers
that are a thirteenth of their prompt's length stay together."""
WORTH_SPLITTING = 0.9
"""A group is divided where the rank that has most to do then has at most this share of it."""


class TreeSequences(Sequences):
    """Rows whose shared prefixes are laid out once."""

    def __init__(self, rows: Sequences, *, tree: PrefixTree, groups: npt.NDArray[np.int64]) -> None:
        super().__init__(rows.ids, masks=rows.masks, experts=rows.experts)
        self.groups = groups
        self._tree = tree
        self._computed = super().computed

    @property
    def computed(self) -> tuple[int, int]:
        return self._computed

    def measure(self, *, num_ranks: int, token_budget: int) -> None:
        """Counts what a pass over all rows computes, divided over so many ranks and within this budget."""
        everything = self.plan(range(len(self.ids)), num_ranks=num_ranks, token_budget=token_budget)
        depths = [self._positions(pile) for piles in everything for pile in piles if pile]
        tokens, squares = sum(map(len, depths)), sum(int((2 * own + 1).sum()) for own in depths)
        self._computed = tokens, squares

    def plan(self, rows: Sequence[int], *, num_ranks: int, token_budget: int) -> Plan:
        """Divides groups over ranks by what they add to compute, then each rank's rows, in the tree's order, into micro-batches."""
        shares = self._shares(rows, num_ranks=num_ranks)
        return in_step([self._piles(share, token_budget=token_budget) for share in shares])

    def micro_batch(self, rows: Sequence[int], *, device: torch.device) -> MicroBatch:
        """Lays these rows out as a tree. No rows: one of two tokens that trains nothing."""
        if not rows:
            return super().micro_batch(rows, device=device)
        layout = self._tree.layout(rows)
        micro = self._predictions(layout.rows, nodes=layout.nodes, size=len(layout.positions), device=device)
        segments = Segments(
            positions=torch.from_numpy(layout.positions)[None].to(device),
            starts=torch.from_numpy(layout.starts.astype(np.int32)).to(device),
            longest=int(np.diff(layout.starts).max()),
            paths=_paths(layout, device=device),
        )
        return replace(micro, segments=segments)

    def _positions(self, rows: Sequence[int]) -> Places:
        """The place in its row of each token that a micro-batch of these rows computes."""
        return self._tree.layout(rows).positions

    def _shares(self, rows: Sequence[int], *, num_ranks: int) -> list[list[int]]:
        """The rows of each rank. Groups are whole, unless dividing one shortens the work of the rank that has most."""
        ordered = self._tree.sorted(rows)
        owners = self.groups[ordered]
        items = [[ordered[place] for place in np.flatnonzero(owners == group)] for group in np.unique(owners)]
        shares, most = self._dealt(items, num_ranks=num_ranks)
        while num_ranks > 1 and items and len(heaviest := max(items, key=self._tree.tokens)) > 1:
            half = len(heaviest) // 2
            finer = [item for item in items if item is not heaviest] + [heaviest[:half], heaviest[half:]]
            finer_shares, finer_most = self._dealt(finer, num_ranks=num_ranks)
            if finer_most > WORTH_SPLITTING * most:
                break
            items, shares, most = finer, finer_shares, finer_most
        return shares

    def _dealt(self, items: list[list[int]], *, num_ranks: int) -> tuple[list[list[int]], int]:
        return dealt(items, sizes=[self._tree.tokens(item) for item in items], num_ranks=num_ranks)

    def _piles(self, rows: Sequence[int], *, token_budget: int) -> list[list[int]]:
        """Runs of rows that fit both budgets, then the small ones together where they fit."""
        most = GATHERED * token_budget
        piles: list[list[int]] = []
        runs = self._tree.runs(rows, tokens=token_budget, gathered=most)
        for run in sorted(runs, key=lambda run: (-self._tree.tokens(run), run)):
            for place, pile in enumerate(piles):
                tokens, gathered = self._tree.size([*pile, *run])
                if tokens <= token_budget and gathered <= most:
                    piles[place] = [*pile, *run]
                    break
            else:
                piles.append(run)
        return piles


def kept_together(
    sequences: Sequences, *, groups: npt.NDArray[np.int64], episodes: npt.NDArray[np.int64], num: int
) -> npt.NDArray[np.int64]:
    """[N] what one of `num` mini-batches takes as a whole: groups where their rows share enough, else episodes. By the rows alone:
    neither ranks nor budgets nor how rows are packed may change what is trained together."""
    if len(np.unique(groups)) < num:
        return episodes
    computed = PrefixTree(sequences.ids).tokens(range(len(sequences.ids)))
    return groups if int(sequences.lengths.sum()) >= LEAST_RATIO * computed else episodes


def _paths(layout: Layout, *, device: torch.device) -> Paths | None:
    """None where no segment has another before it: rows that share nothing."""
    lengths = np.array([len(path) for path in layout.paths])
    if (lengths == np.diff(layout.starts)).all():
        return None
    return Paths(
        places=torch.from_numpy(np.concatenate(layout.paths)).to(device),
        starts=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device),
        longest=int(lengths.max()),
    )
