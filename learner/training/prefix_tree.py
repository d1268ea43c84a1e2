"""Rows as a tree: tokens that rows have in common from their start on are laid out once.

Used by `learner.training.tree_packing`. Rows are sorted, so that each shares most with the one before it; all that is kept are the
order and these depths. Invariants: rows part one token *before* they differ, so that every place of the tree predicts one token;
a row's path is its exact ids; the sizes that a plan counts are those that the layout has. numpy only: no model here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from buffers.records import Int32

Places = npt.NDArray[np.int64]
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
