"""Looks for what could be wrong in a ledger: the file, its references, every round's checksum, and the counts.

Called by `tools.cli` and by the fault tests, with a connection that only reads. Invariant: a ledger without findings
holds what was acknowledged, bit for bit, and its counts are those of its rows. It repairs nothing.
"""

from __future__ import annotations

import sqlite3

from buffers.errors import UnderstudyError
from buffers.ledger.round_codec import decode

_COUNTED = """
SELECT 'groups/' || state, count(*) FROM grp GROUP BY state UNION ALL
SELECT 'scored/' || state, sum(num_scored) FROM grp GROUP BY state UNION ALL
SELECT 'episodes/' || state, count(*) FROM episode GROUP BY state UNION ALL
SELECT 'rounds', count(*) FROM round UNION ALL
SELECT 'tokens', coalesce(sum(num_sampled), 0) FROM round
"""
_NEVER = {
    "a group counts other scored members than it has": """
        SELECT grp.group_id FROM grp LEFT JOIN episode ON episode.group_id = grp.group_id AND episode.state = 'scored'
        GROUP BY grp.group_id HAVING count(episode.seq) != num_scored""",
    "a group was trained more than once in the surviving lineage": """
        WITH RECURSIVE chain(lineage, last) AS (
            SELECT max(lineage), 1 << 60 FROM lineage UNION ALL
            SELECT own.parent, min(own.step, chain.last) FROM lineage AS own JOIN chain ON own.lineage = chain.lineage
            WHERE own.parent IS NOT NULL)
        SELECT group_id FROM trained JOIN step USING (step_id) JOIN grp USING (group_id)
        JOIN chain ON chain.lineage = step.lineage AND step.step <= chain.last
        GROUP BY group_id HAVING count(*) > 1""",
    "two members of a group have the same place": """
        SELECT group_id FROM episode WHERE state = 'scored' GROUP BY group_id, sample_index HAVING count(*) > 1""",
    "an episode's score is not the mean of its judges'": """
        SELECT episode_id FROM episode WHERE state = 'scored' AND abs(score - (
            SELECT avg(value) FROM score WHERE score_id IN (
                SELECT max(score_id) FROM score WHERE score.episode_id = episode.episode_id AND part = 'whole'
                AND verdict IN ('stored', 'revised') GROUP BY judge))) > 1e-9 * (1 + abs(score))""",
    "a leased group has no active lease": """
        SELECT group_id FROM grp JOIN lease USING (lease_id) WHERE grp.state = 'leased' AND lease.state != 'active'""",
}


def findings(db: sqlite3.Connection) -> list[str]:
    """One line for each thing that is wrong."""
    lines = [f"file: {line}" for (line,) in db.execute("PRAGMA quick_check") if line != "ok"]
    if lines:
        return lines  # the rest would be read through pages that lead anywhere
    lines += [
        f"reference: row {row[1]} of {row[0]} names no {row[2]}" for row in db.execute("PRAGMA foreign_key_check")
    ]
    return lines + _checksums(db) + _books(db)


def _checksums(db: sqlite3.Connection) -> list[str]:
    lines = []
    for episode_id, index, body in db.execute("SELECT episode_id, round_index, body FROM round"):
        try:
            decode(body)
        except UnderstudyError as error:
            lines.append(f"checksum: round {index} of episode {episode_id}: {error}")
    return lines


def _books(db: sqlite3.Connection) -> list[str]:
    counts = dict(db.execute("SELECT name, n FROM counter").fetchall())
    counted = dict(db.execute(_COUNTED).fetchall())
    kinds = ("groups/", "scored/", "episodes/", "rounds", "tokens")
    lines = [
        f"counts: {name} is {n}, counted {counted.get(name, 0)}"
        for name, n in counts.items()
        if name.startswith(kinds) and n != counted.get(name, 0)
    ]
    scored = sum(n for name, n in counts.items() if name.startswith("scored/"))
    if scored != counts.get("episodes/scored"):
        lines.append(f"counts: {counts.get('episodes/scored')} episodes are scored, {scored} are counted with a group")
    for what, query in _NEVER.items():
        lines += [f"counts: {what}: {name}" for (name, *_) in db.execute(query)]
    return lines
