"""Converts a ledger file of the schema version before, in one transaction.

Called by `schema` when it opens one. Invariant: a file is either converted whole, with every task, group, episode,
round and score that it held, or left as it was. It knows that one version only.
"""

from __future__ import annotations

import re
import sqlite3

FROM = "2"
_CHANGED = ("grp", "episode", "score", "lease")
_TRIGGERS_THEN = (
    "grp_opened", "grp_moved", "grp_evicted", "episode_opened", "episode_moved", "episode_failed", "round_put",
)  # fmt: skip
_INDEXES_THEN = ("grp_by_state", "grp_ready_by_version", "grp_by_lease", "grp_replay", "episode_pending")
_COPY = """
ALTER TABLE round ADD COLUMN memo BLOB;
ALTER TABLE round ADD COLUMN trained BLOB;
INSERT INTO lease(lease_id, state) SELECT lease_id, state FROM old_lease;
INSERT INTO grp(group_id, task_id, instance, size, min_size, num_scored, uses, min_version, state, reason, lease_id, replay,
                greedy, opened_at)
    SELECT group_id, task_id, instance, size, size, num_scored, state = 'trained', min_version, state, reason, lease_id,
           replay, greedy, NULL FROM old_grp;
INSERT INTO episode(seq, episode_id, group_id, sample_index, attempt, state, reason, score, version, min_version, num_rounds,
                    num_tokens)
    SELECT seq, episode_id, group_id, sample_index, attempt, state, reason, score, version, min_version, num_rounds,
           (SELECT coalesce(sum(num_sampled), 0) FROM round
            WHERE round.episode_id = old_episode.episode_id AND finish_reason != 'abort') FROM old_episode;
INSERT INTO score(score_id, episode_id, value, verdict, told_at) SELECT score_id, episode_id, value, verdict, NULL FROM old_score;
INSERT INTO tally SELECT 'lost/' || substr(reason, 1, instr(reason || ':', ':') - 1), sum(num_scored) FROM old_grp
    WHERE state = 'evicted' GROUP BY 1;
"""


def convert(db: sqlite3.Connection, *, tables: str, triggers: str, version: int) -> None:
    """Bring the file at `db` to `version`, whose tables and triggers these are."""
    missing_only = re.sub(r"^CREATE (TABLE|INDEX) ", r"CREATE \1 IF NOT EXISTS ", tables, flags=re.MULTILINE)
    # References in other tables go on naming the table that takes the place of the old one.
    before = "PRAGMA foreign_keys = OFF; PRAGMA legacy_alter_table = ON; BEGIN IMMEDIATE;"
    drops = [f"DROP TRIGGER IF EXISTS {name};" for name in _TRIGGERS_THEN]
    drops += [f"DROP INDEX IF EXISTS {name};" for name in _INDEXES_THEN]
    aside = [f"ALTER TABLE {name} RENAME TO old_{name};" for name in _CHANGED]
    done = [f"DROP TABLE old_{name};" for name in reversed(_CHANGED)]
    stamp = f"UPDATE meta SET value = '{version}' WHERE key = 'schema_version';"
    try:
        db.executescript("\n".join([before, *drops, *aside, missing_only, _COPY, *done, triggers, stamp, "COMMIT;"]))
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")
        db.execute("PRAGMA legacy_alter_table = OFF")
        db.execute("PRAGMA foreign_keys = ON")
