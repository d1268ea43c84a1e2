"""Operations on scores: of an episode, of a branch or round of it, by one judge or several. Functions over the ledger's
connection, run inside its transaction.

Called by `Ledger`, one at a time. Invariants: what a judge said of one thing stays, unless that judge revises it
while the episode's group is in no batch and was in none; every score that was ever reported is a record, with its verdict;
an episode's score is the mean of its judges'; an episode has at most `MAX_REPORTS` records, and one more that ends it. It
decides nothing about batches.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from buffers.errors import EpisodeClosed, EpisodeError, ScoreConflict, ScoreError, UnderstudyError
from buffers.ledger.episodes import EpisodeRow, complete_group, fail_episode, read_episode, refusal
from buffers.ledger.group_commit import operation
from buffers.records import EpisodeScores, EpisodeState, ScoreDetail

NO_ROUNDS = "no rounds"
CONSTRAINED = "all rounds constrained"
MAX_REPORTS = 4096
_COUNTS = "verdict IN ('stored', 'revised')"


@operation(refusable=True)
def notify_score(
    db: sqlite3.Connection,
    *,
    episode_id: str,
    score: float,
    detail: ScoreDetail,
    max_attempts: int,
    drop_zero_variance: bool,
) -> bool | UnderstudyError:
    """True: stored; False: this value was stored before. Refusals are recorded, then raised in the caller."""
    row = read_episode(db, episode_id=episode_id)
    if row.state == EpisodeState.PENDING:
        raise refusal(row, verb="score")
    _check_part(db, row=row, detail=detail)
    before = _latest(db, episode_id=episode_id, detail=detail)
    ends = _part(detail)[0] == "whole" and detail.final and row.state == EpisodeState.RUNNING
    if before == score and not ends:
        return False
    conflicts = before not in (None, score) and not detail.revise
    if conflicts or not ends:
        _check_room(db, episode_id=episode_id)
    if row.state != EpisodeState.RUNNING and (closed := _closed(db, row=row, before=before, score=score)) is not None:
        _record(db, row=row, score=score, detail=detail, verdict="conflict" if before is not None else "closed")
        return closed
    if ends and row.num_rounds == 0:
        _record(db, row=row, score=score, detail=detail, verdict=NO_ROUNDS)
        sampled = "SELECT 1 FROM round WHERE episode_id = ? AND num_sampled > 0 AND trained IS NOT NULL"
        is_constrained = db.execute(sampled, (episode_id,)).fetchone() is not None
        reason = CONSTRAINED if is_constrained else NO_ROUNDS
        fail_episode(
            db, episode_id=episode_id, reason=reason, max_attempts=max_attempts, drop_zero_variance=drop_zero_variance
        )
        return EpisodeClosed(
            f"episode {episode_id} must have sampled at least one token that can be trained to be scored, got none: it failed; "
            + (
                "each of its model calls constrained what was sampled (response_format, logit_bias, ...), which is not the "
                "policy's own choice, or asked a role that it does not play: leave that out of some calls"
                if is_constrained
                else "check that its agent reached the model"
            )
        )
    if conflicts:
        assert before is not None
        _record(db, row=row, score=score, detail=detail, verdict="conflict")
        return _conflict(row, before=before, score=score)
    if before != score:
        _record(db, row=row, score=score, detail=detail, verdict="stored" if before is None else "revised")
    _apply(db, row=row, ends=ends, drop_zero_variance=drop_zero_variance)
    return True


def settle(db: sqlite3.Connection, *, episode_id: str, drop_zero_variance: bool) -> bool:
    """End a running episode with the scores that its judges gave so far; False: none gave one, or it cannot be trained."""
    row = read_episode(db, episode_id=episode_id)
    said = f"SELECT 1 FROM score WHERE episode_id = ? AND part = 'whole' AND {_COUNTS} LIMIT 1"
    if row.state != EpisodeState.RUNNING or row.num_rounds == 0 or not db.execute(said, (episode_id,)).fetchone():
        return False
    _apply(db, row=row, ends=True, drop_zero_variance=drop_zero_variance)
    return True


def scores_of(db: sqlite3.Connection, *, episode_id: str) -> EpisodeScores:
    """What counts for the rows of a scored episode."""
    (whole,) = db.execute("SELECT score FROM episode WHERE episode_id = ?", (episode_id,)).fetchone()
    parts: dict[str, dict[int, float]] = {"branch": {}, "round": {}}
    found = db.execute(
        "SELECT part, round_index, avg(value) FROM score WHERE score_id IN (SELECT max(score_id) FROM score "
        f"WHERE episode_id = ? AND part IN ('branch', 'round') AND {_COUNTS} GROUP BY part, round_index, judge) "
        "GROUP BY part, round_index",
        (episode_id,),
    )
    for part, round_index, value in found:
        parts[part][round_index] = value
    roles = db.execute(
        "SELECT role, avg(value) FROM score WHERE score_id IN (SELECT max(score_id) FROM score "
        f"WHERE episode_id = ? AND part = 'role' AND {_COUNTS} GROUP BY role, judge) GROUP BY role",
        (episode_id,),
    ).fetchall()
    judges = db.execute(
        "SELECT judge, value FROM score WHERE score_id IN (SELECT max(score_id) FROM score "
        f"WHERE episode_id = ? AND part = 'whole' AND {_COUNTS} GROUP BY judge) ORDER BY judge",
        (episode_id,),
    ).fetchall()
    hint = db.execute(
        f"SELECT hint FROM score WHERE episode_id = ? AND hint IS NOT NULL AND {_COUNTS} ORDER BY score_id DESC LIMIT 1",
        (episode_id,),
    ).fetchone()
    return EpisodeScores(
        whole=whole, branches=parts["branch"], rounds=parts["round"], roles=dict(roles), judges=dict(judges),
        hint=hint and hint[0],
    )  # fmt: skip


@operation(repeatable=True)
def score_history(db: sqlite3.Connection, episode_id: str) -> list[dict[str, Any]]:
    """Every score that was reported of an episode, in order: part, round_index, role, judge, value, verdict, told_at."""
    read_episode(db, episode_id=episode_id)
    columns = ("part", "round_index", "role", "judge", "value", "verdict", "told_at")
    found = db.execute(f"SELECT {', '.join(columns)} FROM score WHERE episode_id = ? ORDER BY score_id", (episode_id,))
    return [dict(zip(columns, values, strict=True)) for values in found]


def _apply(db: sqlite3.Connection, *, row: EpisodeRow, ends: bool, drop_zero_variance: bool) -> None:
    """Bring the episode's score up to what its judges say; the one that ends it may complete its group."""
    if ends:
        state: str = EpisodeState.SCORED
    elif row.state == EpisodeState.SCORED:
        state = row.state
    else:
        return
    (mean,) = db.execute(
        "SELECT avg(value) FROM score WHERE score_id IN (SELECT max(score_id) FROM score "
        f"WHERE episode_id = ? AND part = 'whole' AND {_COUNTS} GROUP BY judge)",
        (row.episode_id,),
    ).fetchone()
    if mean != row.score:  # None before the episode is scored
        db.execute("UPDATE episode SET state = ?, score = ? WHERE episode_id = ?", (state, mean, row.episode_id))
    if ends:
        db.execute("UPDATE grp SET num_scored = num_scored + 1 WHERE group_id = ?", (row.group_id,))
        complete_group(db, group_id=row.group_id, drop_zero_variance=drop_zero_variance)


def _closed(db: sqlite3.Connection, *, row: EpisodeRow, before: float | None, score: float) -> EpisodeError | None:
    """Why an ended episode takes no score; None while it takes late ones and revisions: until its group is in a batch."""
    if row.state != EpisodeState.SCORED:
        return refusal(row, verb="score")
    state, lease = db.execute("SELECT state, first_lease FROM grp WHERE group_id = ?", (row.group_id,)).fetchone()
    if state in ("open", "ready", "validating") and lease is None:
        return None
    if before is not None:
        return _conflict(row, before=before, score=score)
    return EpisodeClosed(
        f"cannot score episode {row.episode_id}: its group {'was in a batch' if state == 'ready' else 'is ' + state}; "
        f"report scores before it is trained"
    )


def _conflict(row: EpisodeRow, *, before: float | None, score: float) -> ScoreConflict:
    return ScoreConflict(
        f"score of episode {row.episode_id} is {before} and stays, got {score}; score it once, or revise it before its "
        f"group is in a batch"
    )


def _check_part(db: sqlite3.Connection, *, row: EpisodeRow, detail: ScoreDetail) -> None:
    part, round_index = _part(detail)
    if round_index is None:
        return
    found = db.execute(
        "SELECT 1 FROM round WHERE episode_id = ? AND round_index = ? AND finish_reason != 'abort' AND num_sampled > 0",
        (row.episode_id, round_index),
    ).fetchone()
    if found is None:
        raise EpisodeError(
            f"score of a {part} of episode {row.episode_id} must name a round that it sampled, got round {round_index}; "
            f"rounds are counted from 0 as they end"
        )


def _check_room(db: sqlite3.Connection, *, episode_id: str) -> None:
    (number,) = db.execute("SELECT count(*) FROM score WHERE episode_id = ?", (episode_id,)).fetchone()
    if number >= MAX_REPORTS:
        raise ScoreError(
            f"scores of episode {episode_id} must be at most {MAX_REPORTS} reports, got one more; report its final score, "
            f"or that it failed"
        )


def _part(detail: ScoreDetail) -> tuple[str, int | None]:
    if detail.role:
        return "role", None
    if detail.round_index is not None:
        return "round", detail.round_index
    return ("whole", None) if detail.branch is None else ("branch", detail.branch)


def _latest(db: sqlite3.Connection, *, episode_id: str, detail: ScoreDetail) -> float | None:
    """What this judge said of this before."""
    part, round_index = _part(detail)
    row = db.execute(
        f"SELECT value FROM score WHERE episode_id = ? AND part = ? AND round_index IS ? AND role = ? AND judge = ? AND {_COUNTS} "
        "ORDER BY score_id DESC LIMIT 1",
        (episode_id, part, round_index, detail.role, detail.judge),
    ).fetchone()
    return None if row is None else float(row[0])


def _record(db: sqlite3.Connection, *, row: EpisodeRow, score: float, detail: ScoreDetail, verdict: str) -> None:
    part, round_index = _part(detail)
    db.execute(
        "INSERT INTO score(episode_id, part, round_index, role, judge, value, verdict, hint) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (row.episode_id, part, round_index, detail.role, detail.judge, score, verdict, detail.hint or None),
    )
