"""Operations on validation tasks: their groups, and what these scored. Functions over the ledger's connection.

Called by `Ledger`, one at a time. Invariant: a group that is opened here is validating until all its members are
scored, and then validated; no state of it leads to a batch, and it takes none of the room of training groups.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from buffers.ledger.episodes import open_group
from buffers.ledger.group_commit import operation
from buffers.records import GroupState, Validated


def open_validation(
    db: sqlite3.Connection, *, task_ids: Sequence[str], group_size: int, min_size: int, greedy: bool
) -> tuple[int, ...]:
    """A new group of pending episodes for each stored task; their ids. `min_size`: members that must score, else the group is given
    up."""
    group_ids = []
    for task_id in task_ids:
        (instance,) = db.execute(
            "SELECT coalesce(max(instance) + 1, 0) FROM grp WHERE task_id = ?", (task_id,)
        ).fetchone()
        members = open_group(
            db, task_id=task_id, instance=instance, group_size=group_size, min_size=min_size,
            num_greedy=group_size if greedy else 0,
        )  # fmt: skip
        group_id = members[0].group_id
        db.execute("UPDATE grp SET state = ? WHERE group_id = ?", (GroupState.VALIDATING, group_id))
        group_ids.append(group_id)
    return tuple(group_ids)


@operation(repeatable=True)
def validated(db: sqlite3.Connection, group_ids: Sequence[int]) -> list[Validated]:
    """The groups' scores by sample; groups that were given up, or are not done, are not among them."""
    found = []
    for group_id in group_ids:
        row = db.execute(
            "SELECT task_id, json_extract(payload, '$.data_source'), num_lost FROM grp JOIN task USING (task_id) "
            "WHERE group_id = ? AND state = 'validated'",
            (group_id,),
        ).fetchone()
        if row is not None:
            scores = db.execute(
                "SELECT score, episode_id FROM episode WHERE group_id = ? AND state = 'scored' ORDER BY sample_index",
                (group_id,),
            ).fetchall()
            task_id, data_source, num_failed = row
            kept, episodes = tuple(score for score, _ in scores), tuple(name for _, name in scores)
            found.append(
                Validated(
                    task_id=task_id, data_source=data_source, scores=kept, num_failed=num_failed, episodes=episodes
                )
            )
    return found
