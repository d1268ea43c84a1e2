"""An operation whose answer may be lost with its process, and that is sent again then: it runs once and answers twice.

Called by `buffers.remote.ledger_server`, one at a time. The answer is stored in the operation's own transaction, as names of what
the tables hold; a call is known by (caller, number, place). Invariant: a call that was stored never runs again. An operation that
was refused stored nothing: it is refused again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from typing import Any

from buffers.errors import UnderstudyError
from buffers.ledger.batches import group_rows
from buffers.ledger.episodes import as_episode, read_episode
from buffers.records import Episode, TrainBatch

_KEY = "call:"


def idempotent(
    db: sqlite3.Connection, *, caller: str, number: int, oldest: int, place: int,
    operation: Callable[[sqlite3.Connection], Any],
) -> Any:  # fmt: skip
    """Runs `operation`, or returns the stored answer if this call ran before. The caller has the answers to calls before `oldest`,
    which are kept no longer."""
    calls = f"{_KEY}{caller}:"
    db.execute("DELETE FROM meta WHERE key BETWEEN ? AND ?", (calls, f"{calls}{oldest:012}"))
    key = f"{calls}{number:012}:{place}"
    found = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    if found is not None:
        told = json.loads(found[0])
        batch = told["kind"] == "batch"
        if not batch or _is_active(db, lease_id=told["answer"][0]):
            return _read(db, kind=told["kind"], answer=told["answer"])
    outcome = operation(db)
    if not isinstance(outcome, UnderstudyError):
        kind, answer = _written(outcome)
        told = json.dumps({"kind": kind, "answer": answer})
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, told))
    return outcome


def forget(db: sqlite3.Connection, *, caller: str) -> None:
    """This caller has all its answers."""
    db.execute("DELETE FROM meta WHERE key GLOB ?", (f"{_KEY}{caller}:*",))


def _written(outcome: Any) -> tuple[str, Any]:
    """(kind, JSON)."""
    match outcome:
        case TrainBatch():
            return "batch", [outcome.lease_id, list(outcome.group_ids)]
        case Episode():
            return "episode", outcome.episode_id
        case [Episode(), *_]:
            return "episodes", [episode.episode_id for episode in outcome]
        case tuple():
            return "tuple", list(outcome)
    return "plain", outcome


def _read(db: sqlite3.Connection, *, kind: str, answer: Any) -> Any:
    match kind:
        case "batch":
            lease_id, group_ids = answer
            rows = [row for group_id in group_ids for row in group_rows(db, group_id=group_id)]
            return TrainBatch(rows=rows, lease_id=lease_id, group_ids=tuple(group_ids))
        case "episode":
            return _episode(db, answer)
        case "episodes":
            return [_episode(db, episode_id) for episode_id in answer]
        case "tuple":
            return tuple(answer)
    return answer


def _episode(db: sqlite3.Connection, episode_id: str) -> Episode:
    return as_episode(db, row=read_episode(db, episode_id=episode_id))


def _is_active(db: sqlite3.Connection, *, lease_id: int) -> bool:
    """Whether the lease still holds; a batch whose lease has ended belongs to no learner, and another one is claimed."""
    return db.execute("SELECT 1 FROM lease WHERE lease_id = ? AND state = 'active'", (lease_id,)).fetchone() is not None
