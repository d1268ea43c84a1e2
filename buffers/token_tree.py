"""The token tree of one running episode: finds the round that a new prompt continues, token by token.

Used by whoever turns generations into `Round`s. Invariant: a round's parent is a round whose prompt + sampled ids are
an exact prefix of its own prompt, so that storing only the rest loses nothing. Of each round it keeps a digest of its new
ids, not the ids: a long conversation costs no memory here. Not thread-safe; nothing is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from buffers.records import Float32, Int32, Round, UInt8
from buffers.training_rows import ABORTED


@dataclass(slots=True)
class _Node:
    """A round that was not aborted: digest and number of its new ids (tail, then sampled), and the rounds that continue it."""

    index: int
    digest: bytes
    num_ids: int
    children: list[_Node] = field(default_factory=list)


class TokenTree:
    """Grows by `add`, or is rebuilt from stored rounds."""

    def __init__(self, episode_id: str, *, rounds: Iterable[Round] = ()) -> None:
        self._episode_id = episode_id
        self._next_index = 0
        self._nodes: dict[int, _Node] = {}
        self._roots: list[_Node] = []
        for round_ in rounds:
            self._keep(round_)

    def add(
        self,
        *,
        prompt_ids: Int32,
        sampled_ids: Int32,
        logprobs: Float32,
        versions: Int32,
        finish_reason: str,
        memo: bytes = b"",
        trained: UInt8 | None = None,
    ) -> Round:
        """The next round. Its parent is the longest earlier round that the prompt starts with, the latest of equals."""
        parent, shared = self._find(prompt_ids)
        round_ = Round(
            episode_id=self._episode_id,
            round_index=self._next_index,
            parent=parent,
            tail_ids=np.array(prompt_ids[shared:], dtype=np.int32),
            sampled_ids=np.asarray(sampled_ids, dtype=np.int32),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            versions=np.asarray(versions, dtype=np.int32),
            finish_reason=finish_reason,
            memo=memo,
            trained=trained,
        )
        self._keep(round_)
        return round_

    def _find(self, prompt_ids: Int32) -> tuple[int | None, int]:
        """(`round_index`, number of shared ids). A child is looked at only where its parent's ids are all in the prompt."""
        best, longest = None, 0
        open_: list[tuple[_Node, int]] = [(node, 0) for node in self._roots]
        while open_:
            node, start = open_.pop()
            end = start + node.num_ids
            if end > len(prompt_ids) or _digest(prompt_ids[start:end]) != node.digest:
                continue
            if best is None or (end, node.index) > (longest, best):
                best, longest = node.index, end
            open_ += [(child, end) for child in node.children]
        return best, longest

    def _keep(self, round_: Round) -> None:
        self._next_index = round_.round_index + 1
        if round_.finish_reason == ABORTED:
            return
        ids = np.concatenate([round_.tail_ids, round_.sampled_ids])
        node = _Node(round_.round_index, _digest(ids), len(ids))
        siblings = self._roots if round_.parent is None else self._nodes[round_.parent].children
        siblings.append(node)
        self._nodes[node.index] = node


def _digest(ids: Int32) -> bytes:
    """16 bytes that only these ids have."""
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype=np.int32).tobytes(), digest_size=16).digest()
