"""Looks for what could be wrong in a ledger: the file, its references, every round's checksum, and the counts; and gives its
figures.

`findings` is called by `buffers.ledger.cli` and by the fault tests, with a connection that only reads. Invariant: a ledger without
findings holds what was acknowledged, bit for bit, and its counts are those of its rows. It repairs nothing.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from buffers.errors import UnderstudyError
from buffers.ledger.encode import FORGOTTEN, decode
from buffers.ledger.reader import LedgerReader, counts
from buffers.ledger.schema import is_owned
from buffers.training_rows import CUT

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
    "a group was trained more often in the surviving lineage than its leases allow, or than it says": """
        WITH RECURSIVE chain(lineage, last) AS (
            SELECT max(lineage), 1 << 60 FROM lineage UNION ALL
            SELECT own.parent, min(own.step, chain.last) FROM lineage AS own JOIN chain ON own.lineage = chain.lineage
            WHERE own.parent IS NOT NULL)
        SELECT group_id FROM trained JOIN step USING (step_id) JOIN grp USING (group_id)
        JOIN lease ON lease.lease_id = step.lease_id JOIN chain ON chain.lineage = step.lineage AND step.step <= chain.last
        GROUP BY group_id HAVING count(*) > max(max_trained) OR count(*) != num_trained""",
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
    found = db.execute("SELECT episode_id, round_index, body FROM round WHERE body != ?", (FORGOTTEN,))
    for episode_id, index, body in found:
        try:
            decode(body)
        except UnderstudyError as error:
            lines.append(f"checksum: round {index} of episode {episode_id}: {error}")
    return lines


def _books(db: sqlite3.Connection) -> list[str]:
    kept = counts(db)
    counted = dict(db.execute(_COUNTED).fetchall())
    kinds = ("groups/", "scored/", "episodes/", "rounds", "tokens")
    lines = [
        f"counts: {name} is {n}, counted {counted.get(name, 0)}"
        for name, n in kept.items()
        if name.startswith(kinds) and n != counted.get(name, 0)
    ]
    scored = sum(n for name, n in kept.items() if name.startswith("scored/"))
    if scored != kept.get("episodes/scored"):
        lines.append(f"counts: {kept.get('episodes/scored')} episodes are scored, {scored} are counted with a group")
    for what, query in _NEVER.items():
        lines += [f"counts: {what}: {name}" for (name, *_) in db.execute(query)]
    return lines


# A ledger in figures: failures by reason, what groups scored, which answers were cut, tasks, judges. For a diagnosis of its run
# (`learner.diagnosis`), also while that lives. It sees one commit, and looks at the newest groups only in detail, so that its time
# does not grow with the rounds of a run. It judges nothing.

NEWEST_GROUPS = 256
"""Groups with scores that are looked at in detail."""
NEWEST_EPISODES = 512
"""Scored episodes of these whose rounds are looked at."""
_OPEN_SESSIONS = (
    "SELECT count(*) FROM session JOIN episode USING (episode_id) WHERE state = 'running' "
    "AND is_side = 0 AND is_watched = 0"
)
_NEWEST_GROUPS = (
    "SELECT json_group_array(group_id) FROM (SELECT group_id FROM grp WHERE num_scored > 0 "
    "AND state NOT IN ('validating', 'validated') ORDER BY group_id DESC LIMIT ?)"
)
"""Their ids, as the JSON list that `json_each` reads."""
_GROUP_SCORES = (
    "SELECT coalesce(task_id, ''), count(*), min(score), max(score), sum(num_tokens) FROM episode JOIN grp USING (group_id) "
    "WHERE group_id IN (SELECT value FROM json_each(?)) AND episode.state = 'scored' GROUP BY group_id ORDER BY group_id DESC"
)
_ANSWERS = (
    "SELECT coalesce(sum(rounds), 0), coalesce(sum(cut), 0), coalesce(max(longest), 0), avg(iif(cut, score, NULL)), "
    "avg(iif(cut, NULL, score)) FROM (SELECT score, count(*) AS rounds, sum(finish_reason = :cut) AS cut, "
    "max(iif(finish_reason = :cut, CAST(num_sampled AS INTEGER), 0)) AS longest FROM "
    "(SELECT episode_id, score FROM episode WHERE group_id IN (SELECT value FROM json_each(:groups)) AND state = 'scored' "
    "ORDER BY seq DESC LIMIT :most) JOIN round USING (episode_id) GROUP BY episode_id)"
)
"""Read of what a round says before its body."""
_REFUSED = (
    "SELECT verdict, count(*) FROM score WHERE verdict NOT IN ('stored', 'revised') AND part = 'whole' GROUP BY verdict"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failed episodes of one kind."""

    kind: str
    """The reason, up to its colon."""
    number: int
    example: str
    """The most frequent reason of this kind, with its detail."""


class GroupScores(NamedTuple):
    """What the scored members of one group have."""

    task_id: str
    """Empty: an episode without a task."""
    number: int
    lowest: float
    highest: float
    tokens: int
    """Trainable tokens of all of them."""


class Answers(NamedTuple):
    """The rounds of the newest scored episodes."""

    rounds: int = 0
    cut: int = 0
    """Rounds that ended at their largest number of tokens."""
    cut_tokens: int = 0
    """Tokens of the longest of these."""
    score_of_cut: float | None = None
    """Mean score of episodes with such a round; None: there is none."""
    score_of_whole: float | None = None
    """Mean score of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSurvey:
    """One commit of a ledger."""

    counts: Mapping[str, int]
    """What `Ledger.counts` says."""
    failures: tuple[Failures, ...] = ()
    """The most frequent kind first."""
    groups: tuple[GroupScores, ...] = ()
    """The newest groups that have scores, the newest first; without validation."""
    answers: Answers = field(default_factory=Answers)
    refused_scores: Mapping[str, int] = field(default_factory=dict)
    """Why (`closed`, `conflict`, `no rounds`) -> scores that were reported and not stored."""
    missing_judges: Mapping[str, int] = field(default_factory=dict)
    """Judge -> scored episodes that have no score of it, though others of their group do."""
    episodes_judged: int = 0
    """Scored episodes in which judges were looked for."""
    running_without_rounds: int = 0
    """Running episodes of which no model call has ended."""
    open_sessions: int = 0
    """Sessions of users that nothing has ended, of those that may be trained: no side calls, none that another model answers."""
    is_here: bool = True
    """False: the ledger is on another node, and these are the counts that its run left elsewhere."""
    is_alive: bool = False
    """A process has the ledger open for writing: the run lives."""

    def count(self, name: str) -> int:
        """0 for what was never counted."""
        return self.counts.get(name, 0)


def survey(path: Path) -> LedgerSurvey:
    """Raises UnderstudyError for what is no ledger of this version."""
    with closing(LedgerReader(path, leave_no_trace=True)) as reader, reader.read() as db:
        (newest,) = db.execute(_NEWEST_GROUPS, (NEWEST_GROUPS,)).fetchone()
        missing, judged = _missing_judges(db, groups=newest)
        (silent,) = db.execute("SELECT count(*) FROM episode WHERE state = 'running' AND num_rounds = 0").fetchone()
        (unsaid,) = db.execute(_OPEN_SESSIONS).fetchone()
        return LedgerSurvey(
            counts=counts(db),
            failures=_failures(db),
            groups=tuple(GroupScores(*row) for row in db.execute(_GROUP_SCORES, (newest,))),
            answers=Answers(*db.execute(_ANSWERS, {"groups": newest, "cut": CUT, "most": NEWEST_EPISODES}).fetchone()),
            refused_scores=dict(db.execute(_REFUSED).fetchall()),
            missing_judges=missing,
            episodes_judged=judged,
            running_without_rounds=silent,
            open_sessions=unsaid,
            is_alive=is_owned(path),
        )


def _failures(db: sqlite3.Connection) -> tuple[Failures, ...]:
    """Counts failures, without those whose next attempt has not started: the end of a run ends its agents and their episodes."""
    numbers: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for reason, number in db.execute(
        "SELECT coalesce(reason, ''), count(*) FROM episode WHERE state = 'failed' GROUP BY reason ORDER BY 2 DESC"
    ):
        kind = reason.partition(":")[0]
        numbers[kind] += number
        examples.setdefault(kind, reason)
    for (reason,) in db.execute(
        "SELECT coalesce(failed.reason, '') FROM episode AS next JOIN episode AS failed ON failed.group_id = next.group_id "
        "AND failed.sample_index = next.sample_index AND failed.attempt = next.attempt - 1 WHERE next.state = 'pending'"
    ):
        numbers[reason.partition(":")[0]] -= 1
    return tuple(Failures(kind=kind, number=n, example=examples[kind]) for kind, n in numbers.most_common() if n)


def _missing_judges(db: sqlite3.Connection, *, groups: str) -> tuple[dict[str, int], int]:
    """Judge -> episodes without its score in groups of which it judged another episode; episodes that were looked at."""
    found = db.execute(
        "SELECT group_id, episode_id, judge FROM episode JOIN score USING (episode_id) WHERE group_id IN "
        "(SELECT value FROM json_each(?)) AND state = 'scored' AND part = 'whole' AND verdict IN ('stored', 'revised')",
        (groups,),
    )
    by_group: dict[int, dict[str, set[str]]] = {}
    for group_id, episode_id, judge in found:
        by_group.setdefault(group_id, {}).setdefault(judge, set()).add(episode_id)
    missing: Counter[str] = Counter()
    judged = 0
    for judges in by_group.values():
        members = set().union(*judges.values())
        judged += len(members)
        for judge, episodes in judges.items():
            missing[judge] += len(members - episodes)
    return {judge: number for judge, number in missing.items() if number}, judged
