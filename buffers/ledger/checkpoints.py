"""Operations that tie the ledger to checkpoints: its position, and going back to a checkpoint.

Called by `Ledger`, one at a time. A checkpoint is named by (run id, lineage, step). Going back to it starts a new
lineage: what its own steps trained stays trained, every other trained group is ready again, in the order in which it was
first trained; a validation under way is given up. Invariant: within a lineage and those it came from, a group is trained as
often as it says. It restores no weights.
"""

from __future__ import annotations

import sqlite3

from buffers.errors import UnderstudyError
from buffers.ledger.batches import current_lineage
from buffers.ledger.episodes import RESTART, evict_group
from buffers.ledger.group_commit import operation
from buffers.records import EpisodeState, GroupOutcome, Position


@operation(repeatable=True)
def position(db: sqlite3.Connection) -> Position:
    """The ledger's present position; a checkpoint stores it."""
    lineage = current_lineage(db)
    (run_id,) = db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
    (start,) = db.execute("SELECT step FROM lineage WHERE lineage = ?", (lineage,)).fetchone()
    (last,) = db.execute("SELECT max(step) FROM step WHERE lineage = ?", (lineage,)).fetchone()
    return Position(run_id=run_id, lineage=lineage, step=start if last is None else last)


def restore(db: sqlite3.Connection, target: Position) -> int:
    """Go back to a checkpoint, in a new lineage: groups trained after it are ready again, in the order in which they were trained.
    Returns how many batches that were given back will be claimed first.

    Raises UnderstudyError when this is the ledger of another run, or lack a step of the target.
    """
    here = position(db)
    if target.run_id != here.run_id:
        raise UnderstudyError(
            f"checkpoint must belong to this ledger (run {here.run_id}), got one of run {target.run_id}; "
            f"resume it in its own run's folder"
        )
    _keep_steps(db, lineage=target.lineage, step=target.step)
    (num_kept,) = db.execute("SELECT count(*) FROM temp.kept").fetchone()
    if num_kept != target.step:
        raise UnderstudyError(
            f"ledger must hold the {target.step} steps of lineage {target.lineage} that lead to the checkpoint, got "
            f"{num_kept}; resume from an earlier checkpoint"
        )
    db.execute(
        "INSERT INTO lineage VALUES (?, ?, ?)",
        (here.lineage + 1, target.lineage, target.step),
    )
    _restore_groups(db)
    for (group_id,) in db.execute("SELECT group_id FROM grp WHERE state = 'validating'").fetchall():
        evict_group(db, group_id=group_id, reason=RESTART, member_state=EpisodeState.FAILED, member_reason=RESTART)
    (num_batches,) = db.execute("SELECT count(DISTINCT first_lease) FROM grp WHERE state = 'ready'").fetchone()
    return int(num_batches)


@operation(repeatable=True)
def times_opened(db: sqlite3.Connection) -> dict[str, int]:
    """How many groups of each task were opened: the position in the task files."""
    found = db.execute("SELECT task_id, max(instance) + 1 FROM grp WHERE task_id IS NOT NULL GROUP BY task_id")
    return dict(found.fetchall())


@operation(repeatable=True)
def group_outcomes(db: sqlite3.Connection, since: int) -> list[GroupOutcome]:
    """The groups of tasks from this id on, in order, without those of validations."""
    found = db.execute(
        "SELECT group_id, task_id, grp.state, count(score), total(min(max(score, 0.0), 1.0)), coalesce(max(version), 0) "
        "FROM grp LEFT JOIN episode USING (group_id) WHERE group_id >= ? AND task_id IS NOT NULL "
        "AND grp.state NOT IN ('validating', 'validated') AND coalesce(sample_index >= greedy, 1) GROUP BY group_id",
        (since,),
    )
    names = ("group_id", "task_id", "state", "num_scored", "passes", "version")
    return [GroupOutcome(**dict(zip(names, values, strict=True))) for values in found]


def _restore_groups(db: sqlite3.Connection) -> None:
    """Groups that the kept steps trained are trained, as often as they did, and no others."""
    db.execute("CREATE TEMP TABLE IF NOT EXISTS kept_group(group_id INTEGER PRIMARY KEY, lease_id INTEGER, n INTEGER)")
    db.execute("DELETE FROM temp.kept_group")
    db.execute(
        "INSERT INTO temp.kept_group SELECT group_id, min(lease_id), count(*) "
        "FROM trained JOIN temp.kept USING (step_id) JOIN step USING (step_id) GROUP BY group_id"
    )
    db.execute(
        "UPDATE grp SET state = 'ready', lease_id = NULL, num_trained = 0 "
        "WHERE state = 'trained' AND group_id NOT IN (SELECT group_id FROM temp.kept_group)"
    )
    db.execute(  # some were given back by a later lineage, or trained again
        "UPDATE grp SET state = 'trained', lease_id = kept_group.lease_id, num_trained = n "
        "FROM temp.kept_group WHERE grp.group_id = kept_group.group_id AND grp.state IN ('ready', 'trained')"
    )


def _keep_steps(db: sqlite3.Connection, *, lineage: int, step: int) -> None:
    """temp.kept: the steps of this lineage up to `step`, and those of the lineages that it came from."""
    db.execute("CREATE TEMP TABLE IF NOT EXISTS kept(step_id INTEGER PRIMARY KEY)")
    db.execute("DELETE FROM temp.kept")
    at: int | None = lineage
    while at is not None:
        db.execute("INSERT INTO temp.kept SELECT step_id FROM step WHERE lineage = ? AND step <= ?", (at, step))
        row = db.execute("SELECT parent, step FROM lineage WHERE lineage = ?", (at,)).fetchone()
        if row is None:
            return
        at, start = row
        step = min(step, start)
