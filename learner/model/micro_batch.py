"""What one forward pass of one rank takes: tokens that lie one after another, and whom each of them attends to.

Made by `learner.training.packing` and `learner.training.tree_packing`, read by `learner.model.policy`. Invariants: tokens are
divided into segments, in each of which positions count on by one; without `paths` a segment is a whole row and attends to itself,
with them to its own path: everything from the first token of its rows up to its own end. Every place predicts at most one token.
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
class MicroBatch:
    """T tokens in n segments, m trained tokens of whole rows at u places."""

    ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64: place of each token in its row."""
    starts: Tensor
    """[n + 1] int32: where each segment starts, and T."""
    longest: int
    """Tokens of the longest segment."""
    before: Tensor
    """[u] int64: the places whose states predict trained tokens, each once."""
    tokens: Tensor
    """[u] int64: the tokens that these predict."""
    shared: Tensor | None
    """[m] int64: which of the u predictions is that of each trained token; None: each has its own, in order."""
    index: Tensor
    """[m] int64: place of each trained token in the batch's flat arrays, row by row."""
    paths: Paths | None = None
    """None: segments are rows."""
