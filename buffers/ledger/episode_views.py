"""Episodes, groups and tasks as a reader sees them: filters, orders and counts over all of them, and records for display.

Used by `learner.page`. Functions over a connection of `LedgerReader`, which also holds what was found out beside the ledger: the
agents of tasks, and the causes of breaks (`look_at`). A place in a list that grows is a cursor, never a number of rows to skip.
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from buffers.errors import UnderstudyError
from buffers.ledger.branches import causes_in, names_of
from buffers.ledger.episodes import read_task
from buffers.ledger.sessions import SAID, SETTLED
from buffers.records import EpisodeState, GroupState
from buffers.training_rows import CUT

EPISODE_STATES = [str(state) for state in EpisodeState]
GROUP_STATES = [str(state) for state in GroupState]
ORDERS: dict[str, tuple[str, bool]] = {
    "newest": ("e.seq", True),
    "oldest": ("e.seq", False),
    "score": ("coalesce(e.score, 9e999)", False),
    "-score": ("coalesce(e.score, -9e999)", True),
    "tokens": ("e.num_tokens", False),
    "-tokens": ("e.num_tokens", True),
    "rounds": ("e.num_rounds", False),
    "-rounds": ("e.num_rounds", True),
    "heard": ("coalesce(s.heard_at, 0)", True),
}
"""Name -> column, and whether the largest comes first."""
_KIND = "substr({0}, 1, instr({0} || ':', ':') - 1)"
"""What stands before the colon of a reason."""
_STEP = "CASE g.state WHEN 'trained' THEN (SELECT step FROM step WHERE step.lease_id = g.lease_id) END"
_FROM = (
    "FROM episode AS e JOIN grp AS g USING (group_id) "
    "LEFT JOIN temp.looked AS l ON l.seq = e.seq AND l.num_rounds = e.num_rounds LEFT JOIN session AS s USING (episode_id) "
)
SESSION_STATES = ("open", "waiting", "trained", "forgotten", "given up")
"""States of a session's episode: it may continue; it waits for its batch, or is in it; or how it ended."""
_SESSION_STATE = (
    "CASE WHEN s.user IS NULL THEN NULL WHEN coalesce(s.heard_at, 0) = 0 THEN 'forgotten' WHEN g.state = 'trained' THEN g.state "
    "WHEN g.state IN ('ready', 'leased') THEN 'waiting' WHEN e.state = 'running' THEN 'open' ELSE 'given up' END"
)
_FEEDBACK = f"SELECT count(*) FROM score AS f WHERE f.episode_id = e.episode_id AND {SAID} AND NOT ({SETTLED})"
_UNKNOWN = "l.is_final IS NOT 1"
_EPISODE = (
    "SELECT e.seq, episode_id, group_id, sample_index, attempt, e.state, e.reason, score, e.num_rounds, num_tokens, "
    "version, e.max_version, started_at, task_id, g.state, g.reason, sample_index < greedy, "
    f"json_extract(payload, '$.agent_name'), {_STEP}, l.causes, l.cut, s.user, s.name, s.client, s.is_side, s.is_watched, "
    f"s.heard_at, {_SESSION_STATE}, iif(s.user IS NULL, 0, ({_FEEDBACK})) {_FROM} LEFT JOIN task USING (task_id) "
)
_GROUP = (
    "SELECT group_id, task_id, json_extract(payload, '$.agent_name'), state, reason, size, num_scored, num_lost, opened_at, "
    f"max_version, {_STEP} FROM grp AS g LEFT JOIN task USING (task_id) "
)
NEWEST = 1 << 62
"""Above all numbers of episodes."""


class FilterError(UnderstudyError):
    """A filter that says nothing, or names what there is not."""


class Unknown(UnderstudyError):
    """There is no such episode or group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFilter:
    """What episodes must be; None or empty: anything."""

    steps: tuple[int, int] | None = None
    """First and last."""
    task: str | None = None
    text: str = ""
    """A part of the task's id or of what a session is called, or the beginning of the episode's."""
    group: int | None = None
    states: tuple[str, ...] = ()
    group_states: tuple[str, ...] = ()
    score: tuple[float | None, float | None] = (None, None)
    reason: str | None = None
    """The kind, of the episode or of its group."""
    agent: str | None = None
    tokens: tuple[int | None, int | None] = (None, None)
    rounds: tuple[int | None, int | None] = (None, None)
    causes: int = 0
    """Bits of `branches.CAUSES`: at least one of them."""
    untrained: bool = False
    """It ended, or its group did, and it was not trained and will not be."""
    user: str | None = None
    """Whose session it is."""
    session_states: tuple[str, ...] = ()
    """States, as in SESSION_STATES."""
    feedback: bool | None = None
    """Whether anything was said of it."""


@dataclass(frozen=True, slots=True)
class SessionView:
    """What an episode is that is a session of a user's agent, or a stretch of one."""

    user: str
    name: str
    client: str
    is_side: bool
    is_watched: bool
    heard_at: float | None
    state: str
    feedback: int
    """Scores and words."""


@dataclass(frozen=True, slots=True)
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
    breaks: list[str]
    cut: bool
    session: SessionView | None
    """None: a task's."""


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A part of the episodes that match, in order."""

    episodes: Sequence[EpisodeView]
    """Those whose causes were not known have been looked at."""
    next: str | None
    """Cursor of the rest; None: there is none."""
    total: int
    facets: dict[str, dict[str, int]] = field(default_factory=dict)


def search(db: sqlite3.Connection, wanted: EpisodeFilter, *, order: str, limit: int, cursor: str | None) -> Found:
    """The first `limit` after the cursor. Raises FilterError for an order or cursor that is none."""
    key, direction, sign = _order(order)
    where, values = _where(wanted)
    after = f" AND ({key}, e.seq) {sign} (?, ?)" if cursor else ""
    rows = db.execute(
        f"SELECT e.seq, {key} {_FROM} WHERE {where}{after} ORDER BY 2 {direction}, 1 {direction} LIMIT ?",
        (*values, *(_read_cursor(cursor) if cursor else ()), limit + 1),
    ).fetchall()
    shown = rows[:limit]
    places = [seq for seq, _ in shown]
    query = f"SELECT e.seq {_FROM} WHERE {_UNKNOWN} AND e.seq IN ({_marks(places)})"
    keep(db, look_at(db, [seq for (seq,) in db.execute(query, places)]))
    facets = {} if cursor else _facets(db, where, values)
    total = sum(facets["state"].values()) if facets else _count(db, where, values)
    return Found(
        episodes=episodes_at(db, places),
        total=total,
        next=f"{float(shown[-1][1])!r}_{shown[-1][0]}" if shown and len(rows) > limit else None,
        facets=facets,
    )


def ordered(db: sqlite3.Connection, wanted: EpisodeFilter, *, order: str) -> list[int]:
    """The numbers of all that match, in order. Raises FilterError for an order that is none."""
    key, direction, _ = _order(order)
    where, values = _where(wanted)
    query = f"SELECT e.seq {_FROM} WHERE {where} ORDER BY {key} {direction}, e.seq {direction}"
    return [seq for (seq,) in db.execute(query, values)]


def trained_scores(db: sqlite3.Connection, *, first: int, last: int) -> list[tuple[int, float]]:
    """(step, score) of each episode that these steps trained, by step."""
    return db.execute(
        "SELECT s.step, e.score FROM step AS s JOIN grp AS g USING (lease_id) JOIN episode AS e USING (group_id) "
        "WHERE s.step BETWEEN ? AND ? AND g.state = 'trained' AND e.state = 'scored' ORDER BY s.step",
        (first, last),
    ).fetchall()


def _order(name: str) -> tuple[str, str, str]:
    """Column, direction, and the comparison of what comes later."""
    if name not in ORDERS:
        raise FilterError(f"sort must be one of {', '.join(ORDERS)}, got {name!r:.40}; leave it out for newest")
    key, descends = ORDERS[name]
    return (key, "DESC", "<") if descends else (key, "ASC", ">")


def _read_cursor(cursor: str) -> tuple[float, int]:
    value, _, seq = cursor.rpartition("_")
    try:
        place = float(value), int(seq)
        if abs(place[1]) >= NEWEST:
            raise ValueError
        return place
    except ValueError:
        raise FilterError(f"cursor must be that of an answer before, got {cursor!r:.40}; leave it out") from None


def _where(wanted: EpisodeFilter) -> tuple[str, list[Any]]:
    """The condition of SQL, and the values in it."""
    conditions, values = ["1"], list[Any]()

    def need(condition: str, *given: Any) -> None:
        conditions.append(condition)
        values.extend(given)

    if wanted.group is not None:
        need("group_id = ?", wanted.group)
    for name, column, states, known in (
        ("state", "e.state", wanted.states, EPISODE_STATES),
        ("group_state", "g.state", wanted.group_states, GROUP_STATES),
        ("session_state", _SESSION_STATE, wanted.session_states, SESSION_STATES),
    ):
        if unknown := set(states) - set(known):
            raise FilterError(f"{name} must be of {', '.join(known)}, got {min(unknown)!r:.40}; leave it out for all")
        if states:
            need(f"{column} IN ({_marks(states)})", *states)
    if wanted.steps is not None:
        need(
            "g.state = 'trained' AND lease_id IN (SELECT lease_id FROM step WHERE step BETWEEN ? AND ?)", *wanted.steps
        )
    for column, (low, high) in (("score", wanted.score), ("num_tokens", wanted.tokens), ("num_rounds", wanted.rounds)):
        if low is not None:
            need(f"e.{column} >= ?", low)
        if high is not None:
            need(f"e.{column} <= ?", high)
    if wanted.reason is not None:
        need(f"? IN ({_KIND.format('e.reason')}, {_KIND.format('g.reason')})", wanted.reason)
    if wanted.causes:
        need("l.causes & ?", wanted.causes)
    if wanted.untrained:
        need("(e.state = 'failed' OR g.state = 'evicted')")
    if wanted.task is not None:
        need("task_id = ?", wanted.task)
    if wanted.agent is not None:
        need("task_id IN (SELECT task_id FROM temp.agent WHERE name = ?)", wanted.agent)
    if wanted.user is not None:
        need("s.user = ?", wanted.user)
    if wanted.feedback is not None:
        said = f"EXISTS (SELECT 1 FROM score AS f WHERE f.episode_id = e.episode_id AND {SAID})"
        need(said if wanted.feedback else f"NOT {said}")
    if wanted.text:
        group, sample = _beginning(wanted.text)
        need(
            "(instr(coalesce(task_id, s.name || ' ' || s.client || ' ' || episode_id), ?) OR (group_id = ? "
            "AND sample_index = coalesce(?, sample_index)))",
            wanted.text,
            group,
            sample,
        )
    return " AND ".join(conditions), values


def _beginning(text: str) -> tuple[int | None, int | None]:
    """The group and the sample that an episode's id begins with; None: the text does not say."""
    first, *rest = text.split("-")
    parts = [first, *filter(None, rest)]
    if len(first) >= 16 or not all(part.isascii() and part.isdigit() for part in parts):
        return None, None
    return int(first), int(rest[0][:9]) if rest and rest[0] else None


def _count(db: sqlite3.Connection, where: str, values: Sequence[Any]) -> int:
    (number,) = db.execute(f"SELECT count(*) {_FROM} WHERE {where}", values).fetchone()
    return int(number)


def _facets(db: sqlite3.Connection, where: str, values: Sequence[Any]) -> dict[str, dict[str, int]]:
    """How many of these there are of each state, reason and agent."""
    found = db.execute(
        f"WITH part AS (SELECT group_id, e.state AS state, {_KIND.format('e.reason')} AS kind, count(*) AS number {_FROM} "
        f"WHERE {where} GROUP BY 1, 2, 3) "
        f"SELECT part.state, g.state, coalesce(kind, {_KIND.format('g.reason')}), a.name, sum(number) FROM part "
        "JOIN grp AS g USING (group_id) LEFT JOIN temp.agent AS a USING (task_id) GROUP BY 1, 2, 3, 4",
        values,
    ).fetchall()
    numbers: dict[str, Counter[str]] = {name: Counter() for name in ("state", "group_state", "reason", "agent")}
    for *texts, number in found:
        for counter, text in zip(numbers.values(), texts):
            if text is not None:
                counter[text] += number
    if db.execute("SELECT 1 FROM session LIMIT 1").fetchone():
        numbers |= {"user": Counter(), "session_state": Counter()}
        query = f"SELECT s.user, {_SESSION_STATE}, count(*) {_FROM} WHERE {where} AND s.user IS NOT NULL GROUP BY 1, 2"
        for user, state, number in db.execute(query, values).fetchall():
            numbers["user"][user] += number
            numbers["session_state"][state] += number
    return {name: dict(counter.most_common()) for name, counter in numbers.items()}


def served_sessions(db: sqlite3.Connection) -> list[tuple[int, str, int, float]]:
    """(version that answered last, user, number, when one was heard last) of the sessions that are open, but for side calls."""
    return db.execute(
        f"SELECT coalesce(e.max_version, e.version), s.user, count(*), max(s.heard_at) {_FROM} "
        f"WHERE {_SESSION_STATE} = 'open' AND NOT s.is_side AND NOT s.is_watched GROUP BY 1, 2 ORDER BY 1, 2"
    ).fetchall()


def read_agents(db: sqlite3.Connection, *, limit: int = 2000) -> bool:
    """Find out which agent the next tasks name; False: all are known."""
    return (
        db.execute(
            "INSERT INTO temp.agent SELECT rowid, task_id, CASE json_type(payload, '$.agent_name') WHEN 'text' "
            "THEN json_extract(payload, '$.agent_name') END FROM task "
            "WHERE rowid > (SELECT coalesce(max(task), 0) FROM temp.agent) ORDER BY rowid LIMIT ?",
            (limit,),
        ).rowcount
        > 0
    )


def to_look_at(db: sqlite3.Connection, *, before: int, limit: int) -> list[int]:
    """The newest ended episodes below the number `before` whose causes are not known."""
    query = f"SELECT e.seq {_FROM} WHERE e.seq < ? AND e.state IN ('scored', 'failed') AND {_UNKNOWN} ORDER BY 1 DESC LIMIT ?"
    return [seq for (seq,) in db.execute(query, (before, limit))]


def looked_share(db: sqlite3.Connection) -> float:
    """How many of the ended episodes have been looked at, as a share."""
    ended = "SELECT sum(n) FROM counter WHERE name IN ('episodes/scored', 'episodes/failed')"
    (share,) = db.execute(f"SELECT 1.0 * (SELECT sum(is_final) FROM temp.looked) / max(({ended}), 1)").fetchone()
    return min(share or 0.0, 1.0)


def look_at(db: sqlite3.Connection, places: Sequence[int]) -> list[tuple[Any, ...]]:
    """What `keep` keeps of these episodes: the causes of their breaks. It may be another connection's."""
    found = []
    for seq in places:
        episode_id, *known = db.execute(
            "SELECT episode_id, num_rounds, state IN ('scored', 'failed') FROM episode WHERE seq = ?", (seq,)
        ).fetchone()
        causes, finish_reasons = causes_in(db, episode_id=episode_id)
        found.append((seq, *known, causes, CUT in finish_reasons))
    return found


def keep(db: sqlite3.Connection, looked: Sequence[tuple[Any, ...]]) -> None:
    """Keep what was found out. Of an episode that still samples it holds until its next round."""
    db.executemany("INSERT OR REPLACE INTO temp.looked VALUES (?, ?, ?, ?, ?)", looked)


def episodes_at(db: sqlite3.Connection, places: Sequence[int]) -> list[EpisodeView]:
    """Those with these numbers, in this order."""
    query = _EPISODE + f"WHERE e.seq IN ({_marks(places)})"
    found = {row[0]: _episode(row) for row in db.execute(query, places)}
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
    query = _GROUP + f"WHERE state IN ({_marks(states)}) AND group_id < ? ORDER BY group_id DESC LIMIT ?"
    return [_group(db, row) for row in db.execute(query, (*states, after, limit)).fetchall()]


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
        f"SELECT {_KIND.format('reason')}, count(*) FROM grp WHERE state = 'evicted' GROUP BY 1 ORDER BY 2 DESC"
    ).fetchall()


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def _episode(row: tuple[Any, ...]) -> EpisodeView:
    *before, is_greedy, agent, step, causes, cut = row[:-8]
    user, name, client, is_side, is_watched, *rest = row[-8:]
    session = None if user is None else SessionView(user, name, client, bool(is_side), bool(is_watched), *rest)
    return EpisodeView(*[*before, bool(is_greedy), agent, step, names_of(causes or 0), bool(cut), session])


def _group(db: sqlite3.Connection, row: tuple[Any, ...]) -> GroupView:
    scores = [
        float(score)
        for (score,) in db.execute("SELECT score FROM episode WHERE group_id = ? AND state = 'scored'", (row[0],))
    ]
    mean = sum(scores) / len(scores) if scores else None
    std = None if mean is None else math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores))
    return GroupView(*[*row, mean, std])
