"""The branches of an episode's token tree as the learner sees them, and the ids, masks and versions along one of them;
and why its rounds start branches.

Used by `learner.page` and `episode_views`. Invariant: a branch that is trained has the ids and the mask of its training row
(`buffers.training_rows`), id for id; the branches of aborted rounds come after those, and train nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from buffers.errors import UnderstudyError
from buffers.records import Float32, Int32, Round, UInt8
from buffers.training_rows import ABORTED

NOT_SAMPLED = -1


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A path from a root to a leaf."""

    number: int
    path: tuple[Round, ...]
    fresh: frozenset[int]
    """Rounds that are trained here, and in no earlier branch."""
    aborted: bool

    @property
    def leaf(self) -> int:
        return self.path[-1].round_index

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(each.tail_ids) + len(each.sampled_ids) for each in self.path)

    @cached_property
    def num_trained(self) -> int:
        return sum(num_trained(each) for each in self.path if each.round_index in self.fresh)

    def borders(self) -> list[tuple[int, int, int]]:
        """(start, start of what was sampled, end) of each round of the path."""
        found: list[tuple[int, int, int]] = []
        start = 0
        for each in self.path:
            middle = start + len(each.tail_ids)
            found.append((start, middle, middle + len(each.sampled_ids)))
            start = found[-1][2]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """[n] each: the tokens of a branch from `start` on."""

    start: int
    ids: Int32
    sampled: UInt8
    mask: UInt8
    version: Int32
    """-1: not sampled."""
    round_index: Int32
    """The round that brought the token, in its prompt or as a sample."""
    logprob: Float32
    """nan: not sampled."""
    order: Int32
    """Which of its round's trained tokens it is, from 0; -1: none."""


_NOTHING: dict[str, npt.NDArray[Any]] = {
    "ids": np.zeros(0, np.int32), "sampled": np.zeros(0, np.uint8), "mask": np.zeros(0, np.uint8),
    "version": np.zeros(0, np.int32), "round_index": np.zeros(0, np.int32), "logprob": np.zeros(0, np.float32),
    "order": np.zeros(0, np.int32),
}  # fmt: skip


def num_trained(round_: Round) -> int:
    """Tokens of a round that may be trained."""
    if round_.finish_reason == ABORTED:
        return 0
    return len(round_.sampled_ids) if round_.trained is None else int(np.count_nonzero(round_.trained))


def branches_of(rounds: Sequence[Round]) -> list[Branch]:
    """All branches in the order of the training rows; then those that end in an aborted round."""
    known = {each.round_index: each for each in rounds}
    kept = {index: each for index, each in known.items() if each.finish_reason != ABORTED}
    parents = {each.parent for each in kept.values()}
    leaves = [index for index in sorted(kept) if index not in parents]
    lost = sorted(index for index in known if index not in kept)
    taken: set[int] = set()
    found: list[Branch] = []
    for leaf in [*leaves, *lost]:
        path = _path(leaf, known=known)
        fresh = {each.round_index for each in path if leaf in kept and num_trained(each)} - taken
        taken |= fresh
        found.append(Branch(number=len(found), path=path, fresh=frozenset(fresh), aborted=leaf not in kept))
    return found


def _path(leaf: int, *, known: dict[int, Round]) -> tuple[Round, ...]:
    path = [known[leaf]]
    while (parent := path[-1].parent) is not None:
        if parent not in known or parent >= path[-1].round_index:
            raise UnderstudyError(
                f"round {path[-1].round_index} of episode {path[0].episode_id}: its parent must be an earlier round, got {parent}; "
                f"check the ledger with `understudy ledger doctor`"
            )
        path.append(known[parent])
    return tuple(path[::-1])


def window_of(branch: Branch, *, start: int, count: int) -> Window:
    """At most `count` tokens; only the rounds within are put together."""
    end, first = start + count, start
    parts: list[dict[str, npt.NDArray[Any]]] = []
    for round_, (begins, _, ends) in zip(branch.path, branch.borders(), strict=True):
        if ends > start and begins < end:
            first = begins if not parts else first
            parts.append(_columns(round_, is_fresh=round_.round_index in branch.fresh))
    within = slice(start - first, end - first)
    return Window(
        start=start, **{name: np.concatenate([part[name] for part in parts or [_NOTHING]])[within] for name in _NOTHING}
    )


def _columns(round_: Round, *, is_fresh: bool) -> dict[str, npt.NDArray[Any]]:
    """What a window has of all tokens of a round."""
    prompt, sampled = len(round_.tail_ids), len(round_.sampled_ids)
    if is_fresh:
        chosen = np.ones(sampled, bool) if round_.trained is None else round_.trained.astype(bool)
    else:
        chosen = np.zeros(sampled, bool)
    unsampled = np.full(prompt, NOT_SAMPLED, np.int32)
    return {
        "ids": np.concatenate([round_.tail_ids, round_.sampled_ids]),
        "sampled": np.repeat(np.array([0, 1], np.uint8), [prompt, sampled]),
        "mask": np.concatenate([np.zeros(prompt, np.uint8), chosen.astype(np.uint8)]),
        "version": np.concatenate([unsampled, round_.versions]),
        "round_index": np.full(prompt + sampled, round_.round_index, np.int32),
        "logprob": np.concatenate([np.full(prompt, np.nan, np.float32), round_.logprobs]),
        "order": np.concatenate([unsampled, np.where(chosen, np.cumsum(chosen) - 1, NOT_SAMPLED).astype(np.int32)]),
    }


# Why rounds start branches, from what the ledger has of them. The server stores the cause that it found with the round
# (`mocked_server.conversation.live_episodes`); a round that is a second one after the same round without such a cause was meant,
# and is named here by the same rule as the server's. Ledgers of earlier releases hold no causes: their breaks are only told apart
# as far as the rounds show it.

MEMO_BYTES = 64
"""Bytes of a chat's memo before the cause."""
HISTORY_BYTES = 16
MEANT = ("new_conversation", "resampled", "forked")
"""Branches that an agent means to have."""
BROKEN = (
    "reply_dropped", "content_edited", "reasoning_edited", "tool_args_rewritten", "tool_calls_changed", "history_compacted",
    "history_edited", "system_changed", "tools_changed", "template_strips_thinking", "template_rewrites_history", "retokenized",
    "prompt_differs",
)  # fmt: skip
CAUSES = (*MEANT, *BROKEN)
"""Bit number k of an episode's causes is CAUSES[k]."""
ANY_BREAK = sum(1 << CAUSES.index(name) for name in BROKEN)
_QUERY = (
    "SELECT CAST(round_index AS INTEGER), CAST(parent AS INTEGER), CAST(finish_reason AS TEXT), CAST(memo AS BLOB) FROM round "
    "WHERE episode_id = ? ORDER BY round_index"
)


def causes_of(rounds: Sequence[tuple[int, int | None, str, bytes | None]]) -> dict[int, str]:
    """Round -> its cause, of (index, parent, finish reason, memo) in order; aborted rounds have none."""
    found: dict[int, str] = {}
    parents: set[int | None] = set()
    histories: set[bytes] = set()
    for index, parent, finish, memo in rounds:
        if finish == ABORTED:
            continue
        memo = memo or b""
        stored = memo[MEMO_BYTES:].decode("ascii", errors="replace")
        if stored in CAUSES:
            found[index] = stored
        elif parent in parents:
            found[index] = _why_beside(parent, memo, again=memo[:HISTORY_BYTES] in histories)
        parents.add(parent)
        if memo:
            histories.add(memo[:HISTORY_BYTES])
    return found


def _why_beside(parent: int | None, memo: bytes, *, again: bool) -> str:
    if memo and again:
        return "resampled"
    if parent is not None:
        return "forked"
    return "new_conversation" if memo else "prompt_differs"


def causes_in(db: sqlite3.Connection, *, episode_id: str) -> tuple[int, set[str]]:
    """The causes in an episode, as bits, and how its rounds finished."""
    rounds: list[tuple[Any, ...]] = db.execute(_QUERY, (episode_id,)).fetchall()
    bits = sum({1 << CAUSES.index(cause) for cause in causes_of(rounds).values()})
    return bits, {finish_reason for _, _, finish_reason, _ in rounds}


def names_of(bits: int) -> list[str]:
    """The causes that bits stand for."""
    return [cause for number, cause in enumerate(CAUSES) if bits & (1 << number)]
