"""Episodes, groups and tasks as a reader sees them: records for display, each read by its key.

Used by `learner.page`. Functions over a connection that only reads; nothing here walks a table.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from buffers.errors import UnderstudyError
from buffers.ledger.episodes import read_task

_IN_QUERY = 500
_EPISODE = (
    "SELECT seq, episode_id, group_id, sample_index, attempt, episode.state, episode.reason, score, num_rounds, num_tokens, "
    "version, episode.max_version, started_at, task_id, grp.state, grp.reason, greedy, "
    "json_extract(payload, '$.agent_name'), "
    "CASE grp.state WHEN 'trained' THEN (SELECT step FROM step WHERE step.lease_id = grp.lease_id) END "
    "FROM episode JOIN grp USING (group_id) LEFT JOIN task USING (task_id) "
)
_GROUP = (
    "SELECT group_id, task_id, json_extract(payload, '$.agent_name'), state, reason, size, num_scored, num_lost, opened_at, "
    "max_version, CASE state WHEN 'trained' THEN (SELECT step FROM step WHERE step.lease_id = grp.lease_id) END, greedy "
    "FROM grp LEFT JOIN task USING (task_id) "
)


class Unknown(UnderstudyError):
    """There is no such episode or group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeView:
    """One episode with what its group says of it."""

    seq: int
    episode_id: str
    group_id: int
    sample: int
    attempt: int
    state: str
    reason: str | None
    score: float | None
    rounds: int
    tokens: int
    version: int | None
    max_version: int | None
    started_at: float | None
    task_id: str | None
    group_state: str
    group_reason: str | None
    greedy: bool
    agent: str | None
    step: int | None
    """The step that trained it."""
    breaks: list[str] = field(default_factory=list)
    cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One group, with the mean and the spread of its scores."""

    group_id: int
    task_id: str | None
    agent: str | None
    state: str
    reason: str | None
    size: int
    num_scored: int
    num_lost: int
    opened_at: float | None
    max_version: int | None
    step: int | None
    mean: float | None
    std: float | None


def episodes_at(db: sqlite3.Connection, places: Sequence[int]) -> list[EpisodeView]:
    """Those with these numbers, in this order."""
    found: dict[int, EpisodeView] = {}
    for start in range(0, len(places), _IN_QUERY):
        some = places[start : start + _IN_QUERY]
        for row in db.execute(_EPISODE + f"WHERE seq IN ({', '.join('?' * len(some))})", some):
            found[row[0]] = _episode(row)
    return [found[place] for place in places if place in found]


def episodes_of(db: sqlite3.Connection, *, group_id: int) -> list[EpisodeView]:
    """All attempts of a group, by sample, then attempt."""
    rows = db.execute(_EPISODE + "WHERE group_id = ? ORDER BY sample_index, attempt", (group_id,))
    return [_episode(row) for row in rows]


def episode(db: sqlite3.Connection, *, episode_id: str) -> EpisodeView:
    """Raises Unknown."""
    row = db.execute(_EPISODE + "WHERE episode_id = ?", (episode_id,)).fetchone()
    if row is None:
        raise Unknown(f"an episode of this run is needed, got {episode_id!r:.60}; ids are GROUP-SAMPLE-ATTEMPT")
    return _episode(row)


def group(db: sqlite3.Connection, *, group_id: int) -> GroupView:
    """Raises Unknown."""
    row = db.execute(_GROUP + "WHERE group_id = ?", (group_id,)).fetchone()
    if row is None:
        raise Unknown(f"a group of this run is needed, got {group_id}; they are numbered from 1")
    return _group(db, row)


def groups(db: sqlite3.Connection, *, states: Sequence[str], after: int, limit: int) -> list[GroupView]:
    """Groups in these states from the newest down, beginning below the id `after`."""
    found: list[tuple[Any, ...]] = []
    for state in states:
        found += db.execute(
            _GROUP + "WHERE state = ? AND group_id < ? ORDER BY group_id DESC LIMIT ?", (state, after, limit)
        ).fetchall()
    return [_group(db, row) for row in sorted(found, key=lambda row: -int(row[0]))[:limit]]


def task_of(db: sqlite3.Connection, *, task_id: str | None) -> dict[str, Any] | None:
    """The task as it was given, answer and all; None: there is none."""
    if db.execute("SELECT 1 FROM task WHERE task_id = ?", (task_id,)).fetchone() is None:
        return None
    found = read_task(db, task_id=str(task_id))
    return {
        "task_id": task_id,
        "prompt": found.prompt,
        "ground_truth": found.ground_truth,
        "data_source": found.data_source,
        "agent": found.agent_name,
        "extra_info": found.extra_info,
    }


def evictions(db: sqlite3.Connection) -> list[tuple[str, int]]:
    """(kind of reason, number of groups) of those that were given up."""
    return db.execute(
        "SELECT substr(reason, 1, instr(reason || ':', ':') - 1), count(*) FROM grp WHERE state = 'evicted' "
        "GROUP BY 1 ORDER BY 2 DESC"
    ).fetchall()


def _episode(row: tuple[Any, ...]) -> EpisodeView:
    return EpisodeView(
        seq=row[0], episode_id=row[1], group_id=row[2], sample=row[3], attempt=row[4], state=row[5], reason=row[6],
        score=row[7], rounds=row[8], tokens=row[9], version=row[10], max_version=row[11], started_at=row[12], task_id=row[13],
        group_state=row[14], group_reason=row[15], greedy=row[3] < row[16], agent=row[17], step=row[18],
    )  # fmt: skip


def _group(db: sqlite3.Connection, row: tuple[Any, ...]) -> GroupView:
    scores = [
        float(score)
        for (score,) in db.execute("SELECT score FROM episode WHERE group_id = ? AND state = 'scored'", (row[0],))
    ]
    mean = sum(scores) / len(scores) if scores else None
    std = None if mean is None else math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores))
    return GroupView(
        group_id=row[0], task_id=row[1], agent=row[2], state=row[3], reason=row[4], size=row[5], num_scored=row[6],
        num_lost=row[7], opened_at=row[8], max_version=row[9], step=row[10], mean=mean, std=std,
    )  # fmt: skip
