"""`EpisodeIndex`: a few numbers of every episode in memory, so that 10^5 of them are filtered and sorted in milliseconds.

Used by `learner.page`. It follows a ledger that is being written: a group in a final state is read once, all others again.
Invariant: after `refresh` it is what one commit of the ledger says, but for what `breaks` adds later. It writes nothing.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from buffers.records import EpisodeState, GroupState

Columns = npt.NDArray[np.void]
Places = npt.NDArray[np.int64]
"""Numbers of episodes (`seq`)."""
EPISODE_STATES = [str(state) for state in EpisodeState]
GROUP_STATES = [str(state) for state in GroupState]
FINAL_GROUPS = [GROUP_STATES.index(state) for state in ("trained", "evicted", "validated")]
_IN_QUERY = 500
_NONE = -1
_EPISODE = np.dtype(
    [
        ("group", "i8"), ("sample", "i4"), ("state", "u1"), ("reason", "i4"), ("score", "f8"), ("tokens", "i8"),
        ("rounds", "i4"), ("there", "?"), ("looked", "?"), ("cut", "?"), ("causes", "u4"),
    ]
)  # fmt: skip
_GROUP = np.dtype([("task", "i8"), ("state", "u1"), ("reason", "i4"), ("step", "i8"), ("there", "?")])
_KIND = "substr({0}, 1, instr({0} || ':', ':') - 1)"
_EPISODES = (
    f"SELECT seq, group_id, sample_index, state, {_KIND.format('reason')}, score, num_tokens, num_rounds FROM episode "
)
_GROUPS = f"SELECT group_id, task_id, state, {_KIND.format('reason')} FROM grp "


class Names:
    """Texts as numbers, in first-seen order; None is -1."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int:
        """Its number, a new one if need be."""
        if text is None:
            return _NONE
        found = self._numbers.setdefault(text, len(self.texts))
        if found == len(self.texts):
            self.texts.append(text)
        return found

    def find(self, text: str) -> int | None:
        """Its number; None: never seen."""
        return self._numbers.get(text)

    def text(self, number: int) -> str | None:
        """The opposite of `number`."""
        return None if number < 0 else self.texts[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """How far the ledger was read: at a change of `life` (a process took it over, or it went back) all is read again."""

    life: tuple[Any, ...] = ()
    seq: int = 0
    group: int = 0
    step: int = 0


class EpisodeIndex:
    """Not thread-safe: its owner has a lock."""

    def __init__(self) -> None:
        self._seen = _Seen()
        self.episodes: Columns = np.zeros(1, _EPISODE)
        """Row `seq` is that episode."""
        self.groups: Columns = np.zeros(1, _GROUP)
        """Row n is group n."""
        self.reasons, self.tasks, self.agents = Names(), Names(), Names()
        self.agent_of: list[int] = []
        """Agent of each task, by the task's number; -1: none is named."""
        self._tasks_read = 0

    def refresh(self, db: sqlite3.Connection) -> bool:
        """Read what changed; whether anything may have. `db`: in a transaction."""
        life = db.execute(
            "SELECT (SELECT value FROM meta WHERE key = 'run_id'), (SELECT value FROM meta WHERE key = 'epoch'), "
            "(SELECT max(lineage) FROM lineage)"
        ).fetchone()
        if life != self._seen.life:
            self._seen = _Seen(life=life)
        seen = self._seen
        moving = self._moving(before=seen.group)
        groups = db.execute(_GROUPS + "WHERE group_id > ?", (seen.group,)).fetchall()
        episodes = db.execute(_EPISODES + "WHERE seq > ?", (seen.seq,)).fetchall()
        groups += _of_groups(db, _GROUPS, moving)
        episodes += _of_groups(db, _EPISODES, moving)
        steps = db.execute(
            "SELECT group_id, step, step_id FROM trained JOIN step USING (step_id) WHERE step_id > ? ORDER BY step_id",
            (seen.step,),
        ).fetchall()
        if not (groups or episodes or steps):
            return False
        self._take_groups(groups)
        self._take_episodes(episodes)
        for group_id, step, _ in steps:
            self.groups["step"][group_id] = step
        self._seen = _Seen(
            life=life,
            seq=_top(episodes, seen.seq),
            group=_top(groups, seen.group),
            step=steps[-1][2] if steps else seen.step,
        )
        return True

    def read_agents(self, db: sqlite3.Connection, *, limit: int = 2000) -> bool:
        """Which agent the next tasks name; False: all are known."""
        found = db.execute(
            "SELECT rowid, task_id, json_extract(payload, '$.agent_name') FROM task WHERE rowid > ? ORDER BY rowid LIMIT ?",
            (self._tasks_read, limit),
        ).fetchall()
        for _, task_id, agent in found:
            number = self.tasks.number(task_id)
            self.agent_of += [_NONE] * (number + 1 - len(self.agent_of))
            self.agent_of[number] = self.agents.number(agent if isinstance(agent, str) else None)
        self._tasks_read = found[-1][0] if found else self._tasks_read
        return bool(found)

    def _moving(self, *, before: int) -> list[int]:
        """Groups that were read and can still change."""
        known = self.groups[: before + 1]
        return [int(number) for number in np.flatnonzero(known["there"] & ~np.isin(known["state"], FINAL_GROUPS))]

    def _take_groups(self, rows: list[tuple[Any, ...]]) -> None:
        self.groups = _with_room(self.groups, _top(rows, 0))
        for group_id, task_id, state, reason in rows:
            before = self.groups[group_id]
            step = before["step"] if before["there"] else _NONE
            self.groups[group_id] = (
                self.tasks.number(task_id), GROUP_STATES.index(state), self.reasons.number(reason), step, True,
            )  # fmt: skip

    def _take_episodes(self, rows: list[tuple[Any, ...]]) -> None:
        self.episodes = _with_room(self.episodes, _top(rows, 0))
        table = self.episodes
        for seq, group_id, sample, state, reason, score, tokens, rounds in rows:
            old = table[seq]
            looked = bool(old["looked"]) and old["rounds"] == rounds and old["there"]
            table[seq] = (
                group_id, sample, EPISODE_STATES.index(state), self.reasons.number(reason),
                np.nan if score is None else score, tokens, rounds, True, looked, old["cut"], old["causes"],
            )  # fmt: skip


def _top(rows: list[tuple[Any, ...]], least: int) -> int:
    """The largest number that rows begin with, or `least`."""
    return max(least, max((int(row[0]) for row in rows), default=least))


def _with_room(table: Columns, top: int) -> Columns:
    if top < len(table):
        return table
    grown = np.zeros(max(top + 1, 2 * len(table)), table.dtype)
    grown[: len(table)] = table
    return grown


def _of_groups(db: sqlite3.Connection, query: str, group_ids: list[int]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for start in range(0, len(group_ids), _IN_QUERY):
        some = group_ids[start : start + _IN_QUERY]
        found += db.execute(query + f"WHERE group_id IN ({', '.join('?' * len(some))})", some).fetchall()
    return found
