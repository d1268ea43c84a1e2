"""Operations on batches: claim, commit, release, eviction. Functions over the ledger's connection, in its transaction.

Called by `Ledger`, one at a time. Invariants: a batch holds complete groups only, all of them fresh enough; a
group is trained once in a lineage, or with `Replay` as often as that says; a lease that was superseded or released cannot commit.
A stored group stays trained while it is in another batch, and joins it in a table of its own.
"""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import numpy as np

from buffers.errors import LeaseError, UnderstudyError
from buffers.ledger.encode import FORGOTTEN, RoundBody, decode
from buffers.ledger.episodes import evict_group, read_episode
from buffers.ledger.group_commit import operation
from buffers.ledger.scores import scores_of
from buffers.ledger.sessions import scored_before, user_of
from buffers.records import EpisodeState, Replay, Round, Row, TrainBatch
from buffers.training_rows import episode_rows

STALE, WAS_FORGOTTEN = "stale", "forgotten"
_NOTHING = RoundBody(
    tail_ids=np.zeros(0, np.int32), sampled_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32),
    versions=np.zeros(0, np.int32),
)  # fmt: skip
_HAS_FORGOTTEN = "SELECT 1 FROM episode JOIN round USING (episode_id) WHERE group_id = ? AND body = ? LIMIT 1"


@operation(transient=True)
def claim(
    db: sqlite3.Connection,
    *,
    num_groups: int,
    min_version: int,
    replay: Replay | None = None,
    fewest: int | None = None,
) -> TrainBatch | None:
    """Lease `num_groups` groups: stored ones by `replay`, as many as there are, and ready ones, those that were given back first,
    then the oldest; before that, evict ready groups whose tokens are all older than `min_version`. A batch that was given back
    whole is claimed as it was, with its stored groups. `fewest`: with so many ready ones a smaller batch will do, of which no
    larger part is stored."""
    evict_stale(db, min_version=min_version)
    while True:
        ready, stored = _next_groups(db, num_groups=num_groups, replay=replay)
        if len(ready) + len(stored) < num_groups:
            if fewest is None or len(ready) < fewest:
                return None
            if replay is not None:
                most = len(ready) * replay.num_groups // max(1, num_groups - replay.num_groups)
                stored = _stored_groups(db, replay=replace(replay, num_groups=most))
        group_ids = ready + stored
        rows = {group_id: group_rows(db, group_id=group_id) for group_id in group_ids}
        # Tokens may have been left out since they were counted.
        stale = [group_id for group_id in ready if not _is_fresh(rows[group_id], min_version=min_version)]
        # A group that is given back may have been forgotten since it was trained.
        forgotten = [group_id for group_id in group_ids if db.execute(_HAS_FORGOTTEN, (group_id, FORGOTTEN)).fetchone()]
        if not stale and not forgotten:
            break
        for group_id in {*stale, *forgotten}:
            _evict(db, group_id=group_id, reason=WAS_FORGOTTEN if group_id in forgotten else STALE)
    most = 1 if replay is None else replay.times
    lease_id = int(db.execute("INSERT INTO lease(state, max_trained) VALUES ('active', ?)", (most,)).lastrowid or 0)
    db.executemany(
        "UPDATE grp SET state = 'leased', lease_id = ?1, first_lease = coalesce(first_lease, ?1) WHERE group_id = ?2",
        [(lease_id, group_id) for group_id in ready],
    )
    db.executemany("INSERT INTO joined VALUES (?, ?)", [(lease_id, group_id) for group_id in stored])
    return TrainBatch(
        rows=[row for group_id in group_ids for row in rows[group_id]], lease_id=lease_id, group_ids=group_ids
    )


@operation(repeatable=True)
def commit_step(db: sqlite3.Connection, *, lease_id: int, step: int, version: int) -> int:
    """The lease's groups are trained; returns how many. The same (lease, step) again gives the same answer."""
    row = db.execute("SELECT step, num_groups FROM step WHERE lease_id = ?", (lease_id,)).fetchone()
    if row is not None:
        if row[0] != step:
            raise LeaseError(f"lease {lease_id} is committed with step {row[0]}, got step {step}; claim a new batch")
        return int(row[1])
    lineage = current_lineage(db)
    other = db.execute("SELECT lease_id FROM step WHERE lineage = ? AND step = ?", (lineage, step)).fetchone()
    if other is not None:
        raise LeaseError(
            f"step {step} is committed by lease {other[0]}, got lease {lease_id}; use the next step number"
        )
    _check_active(db, lease_id=lease_id)
    cursor = db.execute(
        "INSERT INTO step(lineage, step, lease_id, version, num_groups) "
        f"SELECT ?2, ?3, ?1, ?4, count(*) FROM ({_LEASED})",
        (lease_id, lineage, step, version),
    )
    trained = db.execute(f"INSERT INTO trained SELECT ?2, group_id FROM ({_LEASED})", (lease_id, cursor.lastrowid))
    db.execute("UPDATE lease SET state = 'committed' WHERE lease_id = ?", (lease_id,))
    return trained.rowcount


@operation(repeatable=True)
def commit_lesson(db: sqlite3.Connection, *, step: int, version: int) -> None:
    """A step that learned demonstrations, and no groups."""
    lineage = current_lineage(db)
    if (
        db.execute("SELECT 1 FROM step WHERE lineage = ? AND step = ? AND num_groups = 0", (lineage, step)).fetchone()
        is None
    ):
        lease_id = db.execute("INSERT INTO lease(state) VALUES ('committed')").lastrowid
        db.execute(
            "INSERT INTO step(lineage, step, lease_id, version, num_groups) VALUES (?, ?, ?, ?, 0)",
            (lineage, step, lease_id, version),
        )


def release(db: sqlite3.Connection, lease_id: int) -> int:
    """Give a batch back untrained: its groups are ready again; returns how many. Raises LeaseError."""
    _check_active(db, lease_id=lease_id)
    return _give_back(db, lease_id=lease_id, state="released")


def evict_stale(db: sqlite3.Connection, min_version: int) -> int:
    """Evict ready groups whose tokens are all older than `min_version`; returns how many. Open groups stay: what their running
    members sample from now on is fresh."""
    found = db.execute(  # named: the planner would walk all ready groups instead
        "SELECT group_id FROM grp INDEXED BY grp_ready_by_version "
        "WHERE state = 'ready' AND max_version < ? ORDER BY group_id",
        (min_version,),
    ).fetchall()
    for (group_id,) in found:
        _evict(db, group_id=group_id)
    return len(found)


@operation(repeatable=True)
def read_rounds(db: sqlite3.Connection, episode_id: str) -> list[Round]:
    """All rounds of an episode, in order."""
    read_episode(db, episode_id=episode_id)
    found = db.execute(
        "SELECT CAST(round_index AS INTEGER), CAST(parent AS INTEGER), CAST(finish_reason AS TEXT), CAST(body AS BLOB), "
        "CAST(memo AS BLOB), CAST(trained AS BLOB), CAST(role AS TEXT) FROM round WHERE episode_id = ? ORDER BY round_index",
        (episode_id,),
    )
    rounds: list[Round] = []
    for index, parent, reason, body, memo, trained, role in found:
        round_ = replace(
            _decoded(episode_id, round_index=index, parent=parent, finish_reason=reason, body=body, memo=memo),
            trained=None if trained is None or body == FORGOTTEN else np.frombuffer(trained, np.uint8),
            role=role,
        )
        if round_.trained is not None and len(round_.trained) != len(round_.sampled_ids):
            raise UnderstudyError(
                f"round {index} of episode {episode_id} must say of each of {len(round_.sampled_ids)} tokens whether it is "
                f"trained, got {len(round_.trained)}; it is damaged"
            )
        rounds.append(round_)
    return rounds


def current_lineage(db: sqlite3.Connection) -> int:
    (lineage,) = db.execute("SELECT max(lineage) FROM lineage").fetchone()
    return int(lineage)


@operation(repeatable=True)
def count_stored(db: sqlite3.Connection, replay: Replay) -> int:
    """Stored groups that a batch would have now."""
    return len(_stored_groups(db, replay=replay))


_GIVEN_BACK = "FROM grp INDEXED BY grp_given_back WHERE state = 'ready' AND first_lease IS NOT NULL"
"""Named: the planner would walk all ready groups instead."""
_LEASED = (
    "SELECT group_id FROM grp WHERE lease_id = ?1 UNION ALL SELECT group_id FROM joined WHERE lease_id = ?1 ORDER BY 1"
)
IN_BATCH = (
    "EXISTS (SELECT 1 FROM joined JOIN lease USING (lease_id) "
    "WHERE joined.group_id = grp.group_id AND lease.state = 'active')"
)
"""A stored group is in a batch that is trained now."""
_CAN_JOIN = (
    f"state = 'trained' AND num_trained < :times AND NOT {IN_BATCH} "
    f"AND NOT EXISTS (SELECT 1 FROM episode WHERE group_id = grp.group_id AND reason = '{WAS_FORGOTTEN}')"
)
_MEMBERS = "FROM episode WHERE episode.group_id = grp.group_id AND state = 'scored' AND sample_index >= greedy"
_ELIGIBLE = {
    "all": "1",
    "mixed": f"(SELECT min(score) < max(score) {_MEMBERS})",
    "solved": f"(SELECT max(score) > 0 {_MEMBERS})",
}
"""`Replay.only` -> the condition."""


def _next_groups(
    db: sqlite3.Connection, *, num_groups: int, replay: Replay | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Up to `num_groups` groups in the order of training: ready ones and stored ones."""
    (lease,) = db.execute(f"SELECT min(first_lease) {_GIVEN_BACK}").fetchone()
    if lease is not None and replay is not None:
        again = _ids(db, f"SELECT group_id {_GIVEN_BACK} AND first_lease = ? ORDER BY group_id", (lease,))
        joined = "SELECT group_id FROM joined WHERE lease_id = :lease"
        stored = _ids(db, f"{joined} ORDER BY group_id", {"lease": lease})
        (able,) = db.execute(
            f"SELECT count(*) FROM grp WHERE group_id IN ({joined}) AND {_CAN_JOIN}",
            {"lease": lease, "times": replay.times},
        ).fetchone()
        if able == len(stored) and len(again) + len(stored) == num_groups:
            return again, stored
    stored = ()
    if replay is not None:  # a batch has a fresh group
        stored = _stored_groups(db, replay=replace(replay, num_groups=min(replay.num_groups, num_groups - 1)))
    wanted = num_groups - len(stored)
    ready = _ids(db, f"SELECT group_id {_GIVEN_BACK} ORDER BY first_lease, group_id LIMIT ?", (wanted,))
    new = "SELECT group_id FROM grp WHERE state = 'ready' AND first_lease IS NULL ORDER BY group_id LIMIT ?"
    return ready + _ids(db, new, (wanted - len(ready),)), stored


def _stored_groups(db: sqlite3.Connection, *, replay: Replay) -> tuple[int, ...]:
    """The stored groups that a batch has by `replay`: those that were trained least often, of these the newest. By id."""
    found = _ids(
        db,
        f"SELECT group_id FROM grp INDEXED BY grp_trained_by_version WHERE max_version >= :least AND {_CAN_JOIN} "
        f"AND {_ELIGIBLE[replay.only]} ORDER BY num_trained, max_version DESC, group_id DESC LIMIT :number",
        {"least": replay.min_version, "times": replay.times, "number": replay.num_groups},
    )
    return tuple(sorted(found))


def _ids(db: sqlite3.Connection, query: str, values: tuple[int, ...] | dict[str, int]) -> tuple[int, ...]:
    return tuple(group_id for (group_id,) in db.execute(query, values))


def _give_back(db: sqlite3.Connection, *, lease_id: int, state: str) -> int:
    cursor = db.execute("UPDATE grp SET state = 'ready', lease_id = NULL WHERE lease_id = ?", (lease_id,))
    db.execute("UPDATE lease SET state = ? WHERE lease_id = ?", (state, lease_id))
    return cursor.rowcount


def _is_fresh(rows: list[Row], *, min_version: int) -> bool:
    return any(bool((row.versions >= min_version).any()) for row in rows if not row.greedy)


def _evict(db: sqlite3.Connection, *, group_id: int, reason: str = STALE) -> None:
    evict_group(db, group_id=group_id, reason=reason, member_state=EpisodeState.FAILED, member_reason=reason)


def _check_active(db: sqlite3.Connection, *, lease_id: int) -> None:
    row = db.execute("SELECT state FROM lease WHERE lease_id = ?", (lease_id,)).fetchone()
    state = "unknown" if row is None else row[0]
    if state != "active":
        raise LeaseError(f"lease {lease_id} must be active, got {state}; drop this update and claim a new batch")


def group_rows(db: sqlite3.Connection, *, group_id: int) -> list[Row]:
    """The rows of a group's scored members, with the hint of the task or of a judge."""
    greedy, times, hint = db.execute(
        "SELECT greedy, num_trained, json_extract(payload, '$.extra_info.hint') FROM grp LEFT JOIN task USING (task_id) "
        "WHERE group_id = ?",
        (group_id,),
    ).fetchone()
    members = db.execute(
        "SELECT episode_id, sample_index FROM episode WHERE group_id = ? AND state = 'scored' ORDER BY sample_index",
        (group_id,),
    ).fetchall()
    rows: list[Row] = []
    for episode_id, sample_index in members:
        rounds, scores = read_rounds(db, episode_id=episode_id), scores_of(db, episode_id=episode_id)
        scores = replace(scores, hint=scores.hint or (hint if isinstance(hint, str) and hint else None))
        user = user_of(db, episode_id=episode_id)
        if user is not None:  # its score is the mean of what is said of its rounds, which add what they differ by
            scores = replace(scores, rounds={index: value - scores.whole for index, value in scores.rounds.items()})
        baseline = None if user is None else scored_before(db, user=user)
        try:
            made = episode_rows(rounds, group_id=group_id, scores=scores, greedy=sample_index < greedy)
            rows += made if baseline is None else [replace(row, baseline=baseline) for row in made]
        except ValueError as error:
            raise UnderstudyError(str(error)) from error
    return [replace(row, times_trained=times) for row in rows] if times else rows


def _decoded(
    episode_id: str, *, round_index: int, parent: int | None, finish_reason: str, body: bytes, memo: bytes | None
) -> Round:
    try:
        arrays = _NOTHING if body == FORGOTTEN else decode(body)
    except UnderstudyError as error:
        raise UnderstudyError(f"round {round_index} of episode {episode_id}: {error}") from error
    return Round(
        episode_id=episode_id,
        round_index=round_index,
        parent=parent,
        tail_ids=arrays.tail_ids,
        sampled_ids=arrays.sampled_ids,
        logprobs=arrays.logprobs,
        versions=arrays.versions,
        finish_reason=finish_reason,
        memo=memo or b"",
        experts=arrays.experts,
    )
