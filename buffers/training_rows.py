"""Rounds of an episode -> training rows: one row per branch, each sampled token trained once.

The ledger calls it when the learner claims a batch. Pure functions, no state, no I/O.

A branch is a root-to-leaf path of the token tree (`Round.parent`). Branches are taken in the order in which their
leaves arrived; a sampled token is trained (mask 1) in the first of them that contains it, and is context (mask 0) in
the others. Aborted rounds are left out. Invariant: over the rows of an episode every sampled token of its other rounds
has mask 1 exactly once, and `ids` is the exact concatenation of tail and sampled ids along the branch. A row trains the rounds of
one role: a branch in which several spoke is a row for each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from buffers.records import UNKNOWN_EXPERT, EpisodeScores, Int32, Round, Row

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
