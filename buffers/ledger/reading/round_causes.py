"""Why the rounds of an episode start branches, from what the ledger has of them.

Used by `learner.page` and `reading.episodes`. The server stores the cause that it found with the round
(`mocked_server.conversation.live_episodes`); a round that is a second one after the same round without such a cause was meant,
and is named here by the same rule as the server's. Ledgers of earlier releases hold no causes: their breaks are only told apart as
far as the rounds show it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from buffers.training_rows import ABORTED

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
