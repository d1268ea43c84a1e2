"""The token tree of one running episode: finds the round that a new prompt continues, token by token.

Used by whoever turns generations into `Round`s. Invariant: a round's parent is a round whose prompt + sampled ids are
an exact prefix of its own prompt, so that storing only the rest loses nothing. Not thread-safe; nothing is stored.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from buffers.records import Float32, Int32, Round
from buffers.rows import ABORTED


class TokenTree:
    """Grows by `add`, or is rebuilt from stored rounds."""

    def __init__(self, episode_id: str, *, rounds: Iterable[Round] = ()) -> None:
        self._episode_id = episode_id
        self._next_index = 0
        self._ids: dict[int, Int32] = {}
        """Prompt + sampled ids of each round that was not aborted, in order."""
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
    ) -> Round:
        """The next round. Its parent is the longest earlier round that the prompt starts with, the latest of equals."""
        parent = self.find_parent(prompt_ids)
        shared = 0 if parent is None else len(self._ids[parent])
        round_ = Round(
            episode_id=self._episode_id,
            round_index=self._next_index,
            parent=parent,
            tail_ids=np.array(prompt_ids[shared:], dtype=np.int32),
            sampled_ids=np.asarray(sampled_ids, dtype=np.int32),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            versions=np.asarray(versions, dtype=np.int32),
            finish_reason=finish_reason,
        )
        self._keep(round_)
        return round_

    def find_parent(self, prompt_ids: Int32) -> int | None:
        """`round_index` of the round that a prompt with these ids continues."""
        best = None
        for index, ids in self._ids.items():
            longest = best is None or len(ids) >= len(self._ids[best])
            if longest and len(ids) <= len(prompt_ids) and np.array_equal(prompt_ids[: len(ids)], ids):
                best = index
        return best

    def _keep(self, round_: Round) -> None:
        self._next_index = round_.round_index + 1
        if round_.finish_reason == ABORTED:
            return
        shared = [] if round_.parent is None else [self._ids[round_.parent]]
        self._ids[round_.round_index] = np.concatenate([*shared, round_.tail_ids, round_.sampled_ids])
