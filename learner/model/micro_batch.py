"""What one forward pass of one rank takes: rows beside one another, which may continue stems, or tokens that lie one after another
and whom each attends to.

Made by `learner.training.packing`, `learner.training.tree_packing` and `learner.training.stems`, read by `learner.model.policy`.
Invariant: every place predicts at most one token.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The keys of each of n segments, by their places in the pack: those of its ancestors, then its own."""

    places: Tensor
    """[P] int64."""
    starts: Tensor
    """[n + 1] int32: where the path of each segment starts in `places`, and P."""
    longest: int
    """Places of the longest path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """How T tokens one after another are divided. In a segment positions count on by one; without `paths` it is a whole row and
    attends to itself, with them to its own path: everything from the first token of its rows up to its own end."""

    positions: Tensor
    """[1, T] int64: place of each token in its row."""
    starts: Tensor
    """[n + 1] int32: where each segment starts, and T."""
    longest: int
    """Tokens of the longest segment."""
    paths: Paths | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stems:
    """k beginnings of S tokens each, which several rows have in common."""

    ids: Tensor
    """[k, S] int64."""
    of_rows: Tensor
    """[b] int64: the stem that each row continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """b rows of L places behind k * S of stems, m trained tokens of whole rows at u places."""

    ids: Tensor
    """[b, L] int64. With `segments` b is 1; without, the shorter rows are filled up on the right with any token: what comes after
    a token is nothing to it."""
    segments: Segments | None
    before: Tensor
    """[u] int64: the places, of k * S and then b * L, whose states predict trained tokens, each once."""
    tokens: Tensor
    """[u] int64: the tokens that these predict."""
    shared: Tensor | None
    """[m] int64: which of the u predictions is that of each trained token; None: each has its own, in order."""
    index: Tensor
    """[m] int64: place of each trained token in the batch's flat arrays, row by row."""
    stems: Stems | None = None
    """What the rows of `ids` continue; None: they are whole."""
    experts: Tensor | None = None
    """[places, layers, K] int32: the experts that the engine used at each of k * S and then b * L places; see
    `buffers.records.Row`. None: nobody knows any."""
    real: Tensor | None = None
    """[places] bool: false where a row is filled up; None: nowhere."""
