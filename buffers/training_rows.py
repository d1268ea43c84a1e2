"""The token tree of an episode: how it grows round by round, and the training rows that come of it.

`TokenTree` verifies, token by token, which round a new prompt continues: who made the prompt says it, this is the independent
check. Invariant: a round's parent is a round whose prompt + sampled ids are an exact prefix of its own prompt, so that storing only
the rest loses nothing. It keeps a digest of each round's new ids, not the ids. Not thread-safe; nothing is stored.

`episode_rows`: one row per branch, each sampled token trained once. The ledger calls it when the learner claims a batch.

A branch is a root-to-leaf path of the token tree (`Round.parent`). Branches are taken in the order in which their
leaves arrived; a sampled token is trained (mask 1) in the first of them that contains it, and is context (mask 0) in
the others. Aborted rounds are left out. Invariant: over the rows of an episode every sampled token of its other rounds
has mask 1 exactly once, and `ids` is the exact concatenation of tail and sampled ids along the branch. A row trains the rounds of
one role: a branch in which several spoke is a row for each of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from buffers.errors import UnderstudyError
from buffers.prompt_queue import Response
from buffers.records import UNKNOWN_EXPERT, EpisodeScores, Int32, Round, Row, UInt8

ABORTED = "abort"
CUT = "length"
"""The answer reached its largest number of tokens."""
ABANDONED = "abandoned"
"""The agent hung up after it had read some of the answer: what was sampled is trained, as an answer that ended there."""


def is_trainable(finish_reason: str, *, num_trained: int) -> bool:
    """Whether a round adds something to train: at least one token, and generation was not cut off."""
    return finish_reason != ABORTED and num_trained > 0


def episode_rows(rounds: Sequence[Round], *, group_id: int, scores: EpisodeScores, greedy: bool = False) -> list[Row]:
    """The training rows of one episode, in order of arrival of their leaves; rows that train nothing are dropped.

    `rounds`: all rounds of the episode in any order. Raises ValueError when a parent is missing or was aborted.
    """
    kept = {round_.round_index: round_ for round_ in rounds if round_.finish_reason != ABORTED}
    trained: set[int] = set()
    branches: list[tuple[list[Round], set[int], str]] = []
    for leaf in _leaves(kept):
        path = _path(leaf, rounds=kept)
        fresh = {round_.round_index: round_.role for round_ in path if _trains(round_)}
        fresh = {index: role for index, role in fresh.items() if index not in trained}
        trained |= fresh.keys()
        branches += [
            (path, {index for index in fresh if fresh[index] == role}, role) for role in dict.fromkeys(fresh.values())
        ]
    shares = Counter(role for _, _, role in branches)
    return [
        replace(
            _row(path, fresh=own, group_id=group_id, scores=scores),
            loss_weight=1.0 / shares[role],
            greedy=greedy,
            role=role,
            role_score=scores.roles.get(role),
        )
        for path, own, role in branches
    ]


def _trains(round_: Round) -> bool:
    """Whether the round trains at least one token."""
    return len(round_.sampled_ids) > 0 if round_.trained is None else bool(round_.trained.any())


def _leaves(rounds: dict[int, Round]) -> list[Round]:
    parents = {round_.parent for round_ in rounds.values()}
    return [rounds[index] for index in sorted(rounds) if index not in parents]


def _path(leaf: Round, *, rounds: dict[int, Round]) -> list[Round]:
    """Root first."""
    path = [leaf]
    while (parent := path[-1].parent) is not None:
        if parent not in rounds or parent >= path[-1].round_index:
            raise ValueError(
                f"round {path[-1].round_index} of episode {leaf.episode_id}: parent must be an earlier round that was "
                f"not aborted, got {parent}; record it as a root (parent None)"
            )
        path.append(rounds[parent])
    return path[::-1]


def _row(path: list[Round], *, fresh: set[int], group_id: int, scores: EpisodeScores) -> Row:
    num_tokens = sum(len(round_.tail_ids) + len(round_.sampled_ids) for round_ in path)
    ids = np.empty(num_tokens, dtype=np.int32)
    mask = np.zeros(num_tokens, dtype=np.uint8)
    logprobs = np.zeros(num_tokens, dtype=np.float32)
    versions = np.full(num_tokens, -1, dtype=np.int32)
    indices = np.full(num_tokens, -1, dtype=np.int32)
    recorded = [round_.experts for round_ in path if round_.experts is not None]
    experts = np.full((num_tokens, *recorded[0].shape[1:]), UNKNOWN_EXPERT, dtype=np.uint16) if recorded else None
    sampling = np.full(num_tokens, -1, dtype=np.int32)
    start = 0
    for round_ in path:
        middle = start + len(round_.tail_ids)
        end = middle + len(round_.sampled_ids)
        ids[start:middle] = round_.tail_ids
        ids[middle:end] = round_.sampled_ids
        if round_.round_index in fresh:
            chosen = np.ones(end - middle, bool) if round_.trained is None else round_.trained.astype(bool)
            mask[middle:end] = chosen
            logprobs[middle:end] = np.where(chosen, round_.logprobs, 0.0)
            versions[middle:end] = np.where(chosen, round_.versions, -1)
            indices[middle:end] = np.where(chosen, round_.round_index, -1)
        if experts is not None and round_.experts is not None:
            experts[end - 1 - len(round_.experts) : end - 1] = round_.experts
        sampling[middle:end] = round_.versions
        start = end
    return Row(
        episode_id=path[0].episode_id,
        group_id=group_id,
        score=scores.whole,
        ids=ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        rounds=indices,
        branch_score=next(
            (scores.branches[index] for index in sorted(fresh, reverse=True) if index in scores.branches), None
        ),
        round_scores={index: scores.rounds[index] for index in sorted(fresh) if index in scores.rounds},
        hint=scores.hint,
        judges=scores.judges or None,
        truncated=tuple(r.round_index for r in path if r.round_index in fresh and r.finish_reason == CUT),
        experts=experts,
        expert_versions=None if experts is None else _next_known(sampling),
    )


def _next_known(versions: Int32) -> Int32:
    """[T] that of the next sampled token: a token meets the routers in the pass that samples what comes after it."""
    sampled = np.append(np.flatnonzero(versions >= 0), len(versions) - 1)
    following = sampled[np.searchsorted(sampled[:-1], np.arange(len(versions)), side="right")]
    return np.asarray(versions[following], dtype=np.int32)


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
            if digest_of(prompt_ids[start:end]) != part.digest:
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
        self._nodes[round_.round_index] = _Node(parent, digest_of(ids), len(ids))


def digest_of(ids: Int32) -> bytes:
    """16 bytes that only these ids have."""
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype=np.int32).tobytes(), digest_size=16).digest()
