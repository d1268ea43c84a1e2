"""The token tree of one running episode: verifies, token by token, which round a new prompt continues.

Every generation becomes a `Round` here. Who made the prompt says which round it continues; this is the independent check.
Invariant: a round's parent is a round whose prompt + sampled ids are an exact prefix of its own prompt, so that storing only
the rest loses nothing. It keeps a digest of each round's new ids, not the ids: a long conversation costs no memory here. Not
thread-safe; nothing is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from buffers.errors import UnderstudyError
from buffers.prompt_queue import Response
from buffers.records import Int32, Round, UInt8
from buffers.training_rows import ABORTED


@dataclass(slots=True)
class _Node:
    """A round that was not aborted: digest and number of its new ids (tail, then sampled), and the round that it continues."""

    parent: _Node | None
    digest: bytes
    num_ids: int


class TokenTree:
    """Grows by `add`, or is rebuilt from stored rounds."""

    def __init__(self, episode_id: str, *, rounds: Iterable[Round] = ()) -> None:
        self._episode_id = episode_id
        self._next_index = 0
        self._nodes: dict[int, _Node] = {}
        for round_ in rounds:
            self._keep(round_)

    def add(
        self,
        response: Response,
        *,
        prompt_ids: Int32,
        parent: int | None = None,
        memo: bytes = b"",
        trained: UInt8 | None = None,
        role: str = "",
    ) -> Round:
        """The next round: what was sampled after `prompt_ids`. Raises UnderstudyError unless these start with all ids of the round
        `parent`."""
        shared = self._shared(prompt_ids, parent)
        if (experts := response.experts) is not None:  # what comes before the parent's last token is the parent's
            num_own = len(prompt_ids) + len(response.sampled_ids) - shared
            experts = experts[max(0, len(experts) - num_own) :].astype(np.uint16)
        round_ = Round(
            episode_id=self._episode_id,
            round_index=self._next_index,
            parent=parent,
            tail_ids=np.array(prompt_ids[shared:], dtype=np.int32),
            sampled_ids=np.asarray(response.sampled_ids, dtype=np.int32),
            logprobs=np.asarray(response.logprobs, dtype=np.float32),
            versions=np.asarray(response.versions, dtype=np.int32),
            finish_reason=response.finish_reason,
            memo=memo,
            trained=trained,
            role=role,
            experts=experts,
        )
        self._keep(round_)
        return round_

    def num_ids(self, parent: int | None) -> int:
        """How many ids the round `parent` has, those of the rounds before it among them."""
        total, node = 0, None if parent is None else self._nodes.get(parent)
        while node is not None:
            total, node = total + node.num_ids, node.parent
        return total

    def _shared(self, prompt_ids: Int32, parent: int | None) -> int:
        """How many ids of the prompt are those of its parent and of the rounds before it."""
        if parent is None:
            return 0
        path, node = [], self._nodes.get(parent)
        while node is not None:
            path.append(node)
            node = node.parent
        end = 0
        for part in reversed(path):
            start, end = end, end + part.num_ids
            if _digest(prompt_ids[start:end]) != part.digest:
                path.clear()
        if not path:
            raise UnderstudyError(
                f"a prompt of episode {self._episode_id} must start with the ids of the round that it continues, but it does not "
                f"start with those of round {parent}; give parent=None for a prompt that starts a branch"
            )
        return end

    def _keep(self, round_: Round) -> None:
        self._next_index = round_.round_index + 1
        if round_.finish_reason == ABORTED:
            return
        ids = np.concatenate([round_.tail_ids, round_.sampled_ids])
        parent = None if round_.parent is None else self._nodes[round_.parent]
        self._nodes[round_.round_index] = _Node(parent, _digest(ids), len(ids))


def _digest(ids: Int32) -> bytes:
    """16 bytes that only these ids have."""
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype=np.int32).tobytes(), digest_size=16).digest()
