"""Rows to micro-batches in which what they begin with is computed once, for models whose layers carry states.

Called by `learner.training.layout`. A micro-batch has k stems of one length, and the rests of its rows beside one another, the
shorter filled up: always two passes of the model, so that all ranks enter as many, whatever their rows share. A stem and what
continues it are one graph, so that it has one backward pass; rows whose rests do not fit together compute it once in each
micro-batch. Of rows that part more than once, stems end at the fork that leaves least to compute. No model and no loss here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from learner.model.packed_attention import MicroBatch, Stems
from learner.training.packing import Places, Sequences
from learner.training.tree_packing import GATHERED, TreeSequences

CLOSE = 0.9
"""Places of two micro-batches over those that they have together, at least: all stems become as short as the shortest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forks:
    """How rows continue their stems."""

    rows: list[int]
    """Those rows, in the tree's order."""
    length: int
    """Tokens of each stem."""
    stems: Places
    """The stem of each row."""
    width: int
    """Places of each row behind its stem."""
    tokens: int
    """Those of stems and rests."""

    @property
    def places(self) -> int:
        return int(self.stems[-1] + 1) * self.length + len(self.rows) * self.width

    def fit(self, token_budget: int) -> bool:
        """Whether they are one micro-batch; a row alone always is."""
        gathered = len(self.rows) * (self.length + self.width)
        return len(self.rows) == 1 or (self.places <= token_budget and gathered <= GATHERED * token_budget)


class StemSequences(TreeSequences):
    """Rows that continue stems."""

    def micro_batch(self, rows: Sequence[int], *, device: torch.device) -> MicroBatch:
        """Stems, and a row of ids for the rest of each. No rows: three tokens that train nothing."""
        if not rows:
            empty = Sequences.micro_batch(self, rows, device=device)
            return replace(empty, segments=None, stems=Stems(ids=empty.ids[:, :1], of_rows=empty.ids[0, :1]))
        forks = self._forks(rows)
        count = int(forks.stems[-1] + 1) * forks.length
        firsts = count + forks.width * np.arange(len(forks.rows))
        nodes = [
            np.concatenate([np.arange(forks.length) + stem * forks.length, np.arange(length - forks.length) + first])
            for stem, length, first in zip(forks.stems, self.lengths[forks.rows], firsts)
        ]
        micro = self._predictions(forks.rows, nodes=nodes, size=forks.places, device=device)
        return replace(
            micro,
            ids=micro.ids[0, count:].reshape(-1, forks.width),
            stems=Stems(
                ids=micro.ids[0, :count].reshape(-1, forks.length), of_rows=torch.from_numpy(forks.stems).to(device)
            ),
        )

    def _positions(self, rows: Sequence[int]) -> Places:
        forks = self._forks(rows)
        stems = np.tile(np.arange(forks.length), forks.stems[-1] + 1)
        return np.concatenate([stems, *(np.arange(forks.length, length) for length in self.lengths[rows])])

    def _piles(self, rows: Sequence[int], *, token_budget: int) -> list[list[int]]:
        """Rows that share, longest first, while filling up a row costs less than its stem; then small micro-batches together."""
        sets: list[_Forks] = []
        for row in self._tree.sorted(rows):
            longer = self._forks([*sets[-1].rows, row], filled=False) if sets else None
            if longer is not None and longer.tokens < sets[-1].tokens + self.lengths[row]:
                sets[-1] = longer
            else:
                sets.append(self._forks([row]))
        parts: list[_Forks] = []
        for alike in sets:
            first = len(parts)
            for row in sorted(alike.rows, key=lambda row: (-int(self.lengths[row]), row)):
                longer = self._forks([*parts[-1].rows, row]) if len(parts) > first else None
                if (
                    longer is not None
                    and longer.fit(token_budget)
                    and longer.places <= parts[-1].places + self.lengths[row]
                ):
                    parts[-1] = longer
                else:
                    parts.append(self._forks([row]))
        piles: list[_Forks] = []
        apart: list[int] = []
        for part in sorted(parts, key=lambda part: (-part.length, part.rows)):
            for place, pile in enumerate(piles):
                size = apart[place] + part.places
                if size > token_budget:
                    continue
                both = self._forks([*pile.rows, *part.rows])
                if both.fit(token_budget) and CLOSE * both.places <= size:
                    piles[place], apart[place] = both, size
                    break
            else:
                piles.append(part)
                apart.append(part.places)
        return [pile.rows for pile in piles]

    def _forks(self, rows: Sequence[int], *, filled: bool = True) -> _Forks:
        """The stems of these rows that leave least to compute: places, or tokens."""
        ordered = self._tree.sorted(rows)
        shared = np.array(self._tree.depths(ordered)[1:], dtype=np.int64)
        lengths = self.lengths[ordered]
        most = max(1, int(lengths.min()) - 2)
        cuts = np.unique(np.clip([most, *shared], 1, most))[::-1]
        tokens = (1 + np.searchsorted(np.sort(shared), cuts)) * cuts + lengths.sum() - len(ordered) * cuts
        widths = np.maximum(2, lengths.max() - cuts)
        best = int(np.argmin(tokens - lengths.sum() + len(ordered) * (widths + cuts) if filled else tokens))
        return _Forks(
            rows=ordered,
            length=int(cuts[best]),
            stems=np.concatenate([[0], np.cumsum(shared < cuts[best])]),
            width=int(widths[best]),
            tokens=int(tokens[best]),
        )
