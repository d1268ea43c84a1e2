"""Operations on tasks, groups, episodes and rounds: functions over the ledger's connection, run inside its transaction.

Called by `Ledger`, one at a time. Invariants: a group is READY exactly when all its members are scored, or lost
beyond their last attempt and enough are left; an ended episode never runs again; a failed member is replaced by a new
attempt while it has one.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from buffers.errors import EpisodeClosed, EpisodeError, TaskError, UnknownEpisode
from buffers.ledger.group_commit import operation
from buffers.records import Episode, EpisodeState, GroupState, Task
from buffers.training_rows import ABORTED, is_trainable

RESTART = "restart"
GIVEN_UP = "group given up"
NO_VARIANCE = "no variance"
"""All episodes of the group have the same score: there is nothing to learn from comparing them."""
_ENDED = (EpisodeState.SCORED, EpisodeState.FAILED)
_COLUMNS = "episode_id, group_id, sample_index, attempt, state, reason, score, num_rounds"


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """An episode as the table has it."""

    episode_id: str
    group_id: int
    sample_index: int
    attempt: int
    state: str
    reason: str | None
    score: float | None
    num_rounds: int


MAX_REASON = 100
"""Characters of why a round ended."""
MAX_NUMBER = 2**31 - 1
Number = Annotated[int, msgspec.Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]


class StoredRound(NamedTuple):
    """A round on its way into the table, also from another process: its columns, but `max_version` is the episode's."""

    episode_id: str
    round_index: Number
    parent: Number | None
    num_sampled: int
    max_version: int | None
    finish_reason: Name
    body: bytes
    memo: bytes | None
    trained: bytes | None = None
    """A byte for each sampled token, 0: not to be trained. None: all are."""
    role: Name = ""

    @property
    def num_trained(self) -> int:
        """Sampled tokens that are to be trained."""
        return self.num_sampled if self.trained is None else self.num_sampled - self.trained.count(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedEpisode:
    """An episode that ended."""

    episode_id: str
    state: EpisodeState
    reason: str | None


def put_tasks(db: sqlite3.Connection, *, rows: Sequence[tuple[str, str]]) -> int:
    """Store (task_id, payload) pairs; returns how many were new. The same id with another payload is refused."""
    num_new = 0
    for task_id, payload in rows:
        cursor = db.execute("INSERT INTO task VALUES (?, ?) ON CONFLICT (task_id) DO NOTHING", (task_id, payload))
        num_new += cursor.rowcount
        if cursor.rowcount == 0:
            (stored,) = db.execute("SELECT payload FROM task WHERE task_id = ?", (task_id,)).fetchone()
            if stored != payload:
                raise TaskError(f"task_id {task_id!r} must name one task, got two different ones; rename one of them")
    return num_new


def open_group(
    db: sqlite3.Connection, *, task_id: str, instance: int, group_size: int, min_size: int, num_greedy: int = 0
) -> list[Episode]:
    """The pending episodes of a new group; none when this instance of the task was opened before. The first `num_greedy` of them
    are sampled at temperature 0."""
    task = read_task(db, task_id=task_id)
    if db.execute("SELECT 1 FROM grp WHERE task_id = ? AND instance = ?", (task_id, instance)).fetchone():
        return []
    cursor = db.execute(
        "INSERT INTO grp(task_id, instance, size, min_size, greedy) VALUES (?, ?, ?, ?, ?)",
        (task_id, instance, group_size, min_size, num_greedy),
    )
    group_id = int(cursor.lastrowid or 0)
    return [
        _open_episode(db, task=task, group_id=group_id, sample_index=index, attempt=0) for index in range(group_size)
    ]


def adopt_episode(db: sqlite3.Connection, episode_id: str) -> bool:
    """Open and start an episode without a task, in a group of one, under the caller's id; False when the id is known already."""
    if db.execute("SELECT 1 FROM episode WHERE episode_id = ?", (episode_id,)).fetchone():
        return False
    group_id = db.execute("INSERT INTO grp(task_id, instance, size, min_size) VALUES (NULL, 0, 1, 1)").lastrowid
    db.execute(
        "INSERT INTO episode(episode_id, group_id, sample_index, attempt, state) VALUES (?, ?, 0, 0, ?)",
        (episode_id, group_id, EpisodeState.RUNNING),
    )
    return True


def start_episode(db: sqlite3.Connection, episode_id: str, *, version: int) -> None:
    """PENDING -> RUNNING, under policy `version`."""
    row = read_episode(db, episode_id=episode_id)
    if row.state != EpisodeState.PENDING:
        raise refusal(row, verb="start")
    _start(db, episode_id=episode_id, version=version)


def start_pending(db: sqlite3.Connection, *, limit: int, version: int) -> list[Episode]:
    """Start up to `limit` pending episodes, retries first, then the oldest."""
    found = db.execute(
        f"SELECT {_COLUMNS} FROM episode WHERE state = 'pending' ORDER BY attempt DESC, seq LIMIT ?", (limit,)
    ).fetchall()
    rows = [EpisodeRow(*values) for values in found]
    for row in rows:
        _start(db, episode_id=row.episode_id, version=version)
    return [as_episode(db, row=row) for row in rows]


@operation(repeatable=True)
def running_episodes(db: sqlite3.Connection) -> list[Episode]:
    """The episodes of tasks that are under way, the oldest first; after `resume_episodes` those of the process before."""
    found = db.execute(
        f"SELECT {_COLUMNS} FROM episode WHERE state = 'running' "
        "AND group_id IN (SELECT group_id FROM grp WHERE state IN ('open', 'validating') AND task_id IS NOT NULL) ORDER BY seq"
    )
    return [as_episode(db, row=EpisodeRow(*values)) for values in found.fetchall()]


@operation(repeatable=True)
def failure_details(db: sqlite3.Connection) -> dict[str, str]:
    """Kind of failure, as in `Ledger.counts` -> the most frequent reason of that kind, with its detail."""
    found = db.execute("SELECT reason FROM episode WHERE state = 'failed' GROUP BY reason ORDER BY count(*)")
    return {reason.partition(":")[0]: reason for (reason,) in found}


@operation(repeatable=True)
def ended(db: sqlite3.Connection, episode_ids: Sequence[str]) -> list[ClosedEpisode]:
    """Those of these episodes that have ended."""
    rows = [read_episode(db, episode_id=episode_id) for episode_id in episode_ids]
    return [
        ClosedEpisode(episode_id=row.episode_id, state=EpisodeState(row.state), reason=row.reason)
        for row in rows
        if row.state in _ENDED
    ]


def mask_tokens(db: sqlite3.Connection, *, episode_id: str, trained: Mapping[int, bytes]) -> None:
    """Marks the tokens of a running episode's rounds that are trained: a byte for each sampled token, 0 or 1."""
    row = read_episode(db, episode_id=episode_id)
    if row.state != EpisodeState.RUNNING:
        raise refusal(row, verb="change what is trained of")
    for index, flags in trained.items():
        found = db.execute(
            "SELECT trained FROM round WHERE episode_id = ? AND round_index = ? AND num_sampled = ?",
            (episode_id, index, len(flags)),
        ).fetchone()
        if found is None:
            raise EpisodeError(
                f"trained of episode {episode_id} must have a flag for each sampled token of its rounds, got {len(flags)} for "
                f"round {index}; count them again"
            )
        # What was not the policy's own choice when it was sampled stays so.
        both = flags if found[0] is None else bytes(map(min, flags, found[0]))
        db.execute("UPDATE round SET trained = ? WHERE episode_id = ? AND round_index = ?", (both, episode_id, index))


_INSERT = "INSERT INTO round VALUES (?1, ?2, ?3, ?4, ?6, ?7, ?8, ?9, ?10)"
"""Its placeholders are the fields of a StoredRound, in order."""
# max(x, NULL) is NULL in SQLite.
_GROW = (
    "UPDATE episode SET num_rounds = num_rounds + 1, num_tokens = num_tokens + ?3, "
    "max_version = max(coalesce(max_version, ?1), ?1) WHERE episode_id = ?2 AND state = 'running'"
)


def put_round(db: sqlite3.Connection, *, stored: StoredRound) -> None:
    row = read_episode(db, episode_id=stored.episode_id)
    if row.state != EpisodeState.RUNNING:
        raise refusal(row, verb="add a round to")
    if stored.parent is not None:
        _check_parent(db, stored=stored)
    try:
        _insert(db, [stored])
    except sqlite3.IntegrityError as error:
        raise EpisodeError(
            f"round_index of episode {stored.episode_id} must be >= 0, new, and above its parent, got "
            f"{stored.round_index} with parent {stored.parent} ({error}); count rounds as generations end"
        ) from error


@operation(inline=True)
def put_rounds(db: sqlite3.Connection, rounds: Sequence[StoredRound]) -> list[EpisodeError | None]:
    """Store rounds of running episodes in one go: why each was refused, None for those that are stored. A round that is there
    already, bit for bit, counts as stored: a caller that got no answer may send it again. For threads that wait: unless this is
    the main one, they may be stored when it returns."""
    if _put_together(db, rounds=rounds):
        return [None] * len(rounds)
    outcomes: list[EpisodeError | None] = []
    for stored in rounds:
        try:
            put_round(db, stored=stored)  # refusals come before anything of the round is written
            outcomes.append(None)
        except EpisodeError as error:
            again = "SELECT 1 FROM round WHERE episode_id = ? AND round_index = ? AND body = ?"
            there = db.execute(again, (stored.episode_id, stored.round_index, stored.body)).fetchone()
            outcomes.append(None if there else error)
    return outcomes


def _put_together(db: sqlite3.Connection, *, rounds: Sequence[StoredRound]) -> bool:
    """Store first rounds of different running episodes in a third of the time; False, and nothing is stored, when they are
    others."""
    if len({stored.episode_id for stored in rounds}) < len(rounds) or any(one.parent is not None for one in rounds):
        return False
    db.execute("SAVEPOINT together")
    stored = False
    try:
        stored = _insert(db, rounds) == len(rounds)
    except sqlite3.IntegrityError:
        pass
    finally:
        if not stored:
            db.execute("ROLLBACK TO together")
        db.execute("RELEASE together")
    return stored


def _insert(db: sqlite3.Connection, rounds: Sequence[StoredRound]) -> int:
    """Inserts rounds and adds to the figures of their episodes; returns how many were of running episodes and can be trained."""
    db.executemany(_INSERT, map(tuple, rounds))  # exact tuples are bound faster
    trainable = (one for one in rounds if is_trainable(one.finish_reason, num_trained=one.num_trained))
    grown = db.executemany(_GROW, ((one.max_version, one.episode_id, one.num_trained) for one in trainable))
    tokens = sum(one.num_sampled for one in rounds)
    db.execute(
        "UPDATE counter SET n = n + iif(name = 'rounds', ?, ?) WHERE name IN ('rounds', 'tokens')",
        (len(rounds), tokens),
    )
    return grown.rowcount


def fail_episode(
    db: sqlite3.Connection, *, episode_id: str, reason: str, max_attempts: int, drop_zero_variance: bool = False
) -> Episode | None:
    """End an episode as failed: its next attempt, or None when it has none left. Then its group is trained without it, or is given
    up with it when too few members would be left."""
    row = read_episode(db, episode_id=episode_id)
    if row.state in _ENDED:
        raise refusal(row, verb="fail")
    _end(db, episode_id=episode_id, state=EpisodeState.FAILED, reason=reason)
    task_id, spare, greedy = db.execute(
        "SELECT task_id, size - num_lost - min_size, greedy FROM grp WHERE group_id = ?", (row.group_id,)
    ).fetchone()
    if task_id is None or row.attempt + 1 >= max_attempts:
        if spare > 0 and row.sample_index >= greedy:  # without their baseline the others cannot be trained
            db.execute("UPDATE grp SET num_lost = num_lost + 1 WHERE group_id = ?", (row.group_id,))
            complete_group(db, group_id=row.group_id, drop_zero_variance=drop_zero_variance)
        else:
            evict_group(
                db,
                group_id=row.group_id,
                reason=f"failed: {reason}",
                member_state=EpisodeState.FAILED,
                member_reason=GIVEN_UP,
            )
        return None
    return _open_episode(
        db,
        task=read_task(db, task_id=task_id),
        group_id=row.group_id,
        sample_index=row.sample_index,
        attempt=row.attempt + 1,
    )


def evict_group(
    db: sqlite3.Connection, *, group_id: int, reason: str, member_state: EpisodeState, member_reason: str
) -> list[str]:
    """Give a group up; returns its members that were still pending or running."""
    db.execute(
        "UPDATE grp SET state = ?, reason = ?, lease_id = NULL, first_lease = NULL WHERE group_id = ?",
        (GroupState.EVICTED, reason, group_id),
    )
    members = db.execute(
        "SELECT episode_id FROM episode WHERE group_id = ? AND state IN ('pending', 'running') ORDER BY seq",
        (group_id,),
    ).fetchall()
    for (episode_id,) in members:
        _end(db, episode_id=episode_id, state=member_state, reason=member_reason)
    return [episode_id for (episode_id,) in members]


def complete_group(db: sqlite3.Connection, *, group_id: int, drop_zero_variance: bool = False) -> None:
    """A group whose members are all scored or lost is ready, validated, or dropped; others stay as they are."""
    missing, state = db.execute(
        "SELECT size - num_scored - num_lost, state FROM grp WHERE group_id = ?", (group_id,)
    ).fetchone()
    if missing > 0:
        return
    (max_version,) = db.execute(
        "SELECT max(max_version) FROM episode WHERE group_id = ? AND state = 'scored'", (group_id,)
    ).fetchone()
    if state == GroupState.VALIDATING:
        db.execute("UPDATE grp SET state = 'validated' WHERE group_id = ?", (group_id,))
    elif drop_zero_variance and _all_alike(db, group_id=group_id):
        evict_group(
            db, group_id=group_id, reason=NO_VARIANCE, member_state=EpisodeState.FAILED, member_reason=NO_VARIANCE
        )
    else:
        db.execute("UPDATE grp SET state = 'ready', max_version = ? WHERE group_id = ?", (max_version, group_id))


def _all_alike(db: sqlite3.Connection, *, group_id: int) -> bool:
    """Whether several episodes of the group have one and the same score, and none has a score of a branch or of a round."""
    number, low, high = db.execute(
        "SELECT count(*), min(score), max(score) FROM episode WHERE group_id = ? AND state = 'scored'", (group_id,)
    ).fetchone()
    parts = (
        "SELECT 1 FROM score JOIN episode USING (episode_id) WHERE group_id = ? AND state = 'scored' AND part != 'whole' "
        "AND verdict IN ('stored', 'revised') LIMIT 1"
    )
    return number > 1 and low == high and db.execute(parts, (group_id,)).fetchone() is None


def recover(db: sqlite3.Connection, *, resume_episodes: bool, keep_leases: bool = False) -> None:
    """Cleans up after a process that died: leased groups are ready again or, with `keep_leases`, stay with their learner, which
    lives. Running episodes fail and are retried or, with `resume_episodes`, stay running, because their agents live."""
    db.execute("UPDATE meta SET value = value + 1 WHERE key = 'epoch'")
    if not keep_leases:
        db.execute("UPDATE lease SET state = 'superseded' WHERE state = 'active'")
        db.execute("UPDATE grp SET state = 'ready', lease_id = NULL WHERE state = 'leased'")
    if resume_episodes:
        return
    interrupted = db.execute(
        f"SELECT {_COLUMNS} FROM episode WHERE state IN ('pending', 'running') ORDER BY seq"
    ).fetchall()
    for values in interrupted:
        row = EpisodeRow(*values)
        # A restart uses up no attempt: it never gives a group up.
        fail_episode(db, episode_id=row.episode_id, reason=RESTART, max_attempts=row.attempt + 2)


def read_episode(db: sqlite3.Connection, *, episode_id: str) -> EpisodeRow:
    values = db.execute(f"SELECT {_COLUMNS} FROM episode WHERE episode_id = ?", (episode_id,)).fetchone()
    if values is None:
        raise UnknownEpisode(f"episode_id must name an episode of this run, got {episode_id!r}; lease a task first")
    return EpisodeRow(*values)


def refusal(row: EpisodeRow, *, verb: str) -> EpisodeError:
    """Why an episode cannot take what the caller wants."""
    if row.state in _ENDED:
        because = f" ({row.reason})" if row.reason else ""
        return EpisodeClosed(
            f"cannot {verb} episode {row.episode_id}: it ended as {row.state}{because}; lease a new one"
        )
    return EpisodeError(
        f"cannot {verb} episode {row.episode_id}: it is {row.state}; start it once, before anything else"
    )


def _open_episode(db: sqlite3.Connection, *, task: Task, group_id: int, sample_index: int, attempt: int) -> Episode:
    episode_id = f"{group_id}-{sample_index}-{attempt}"
    db.execute(
        "INSERT INTO episode(episode_id, group_id, sample_index, attempt) VALUES (?, ?, ?, ?)",
        (episode_id, group_id, sample_index, attempt),
    )
    return Episode(episode_id=episode_id, task=task, group_id=group_id, sample_index=sample_index, attempt=attempt)


def as_episode(db: sqlite3.Connection, *, row: EpisodeRow) -> Episode:
    """The record of an episode."""
    task_id, greedy = db.execute("SELECT task_id, greedy FROM grp WHERE group_id = ?", (row.group_id,)).fetchone()
    return Episode(
        episode_id=row.episode_id,
        task=read_task(db, task_id=task_id),
        greedy=row.sample_index < greedy,
        group_id=row.group_id,
        sample_index=row.sample_index,
        attempt=row.attempt,
    )


def _start(db: sqlite3.Connection, *, episode_id: str, version: int) -> None:
    db.execute(
        "UPDATE episode SET state = 'running', version = ?, started_at = (julianday('now') - 2440587.5) * 86400.0 "
        "WHERE episode_id = ?",
        (version, episode_id),
    )


def _end(db: sqlite3.Connection, *, episode_id: str, state: EpisodeState, reason: str) -> None:
    db.execute("UPDATE episode SET state = ?, reason = ? WHERE episode_id = ?", (state, reason, episode_id))


def _check_parent(db: sqlite3.Connection, *, stored: StoredRound) -> None:
    row = db.execute(
        "SELECT finish_reason FROM round WHERE episode_id = ? AND round_index = ?", (stored.episode_id, stored.parent)
    ).fetchone()
    if row is None or row[0] == ABORTED:
        found = "no such round" if row is None else "an aborted round"
        raise EpisodeError(
            f"parent of round {stored.round_index} of episode {stored.episode_id} must be a recorded round that was "
            f"not aborted, got {stored.parent} ({found}); record it as a root (parent None)"
        )


def read_task(db: sqlite3.Connection, *, task_id: str) -> Task:
    row = db.execute("SELECT payload FROM task WHERE task_id = ?", (task_id,)).fetchone()
    if row is None:
        raise TaskError(f"task_id must name a stored task, got {task_id!r}; put it first")
    try:
        return Task(task_id=task_id, **json.loads(row[0]))
    except (ValueError, TypeError, RecursionError) as error:
        raise TaskError(
            f"task {task_id!r:.60} must be stored as a run stores it, got {row[0]!r:.60} ({error})"
        ) from None
