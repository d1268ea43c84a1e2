"""Operations on sessions: episodes of agents that nobody starts, which are opened by their first request and scored by what people
say of them, whenever they do.

Called by `Ledger`, inside its transaction. Invariants: a session is one running episode at a time; once feedback has ended it,
what its agent says next is another episode of the same name; feedback is of the user whose key opened the session.
"""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

from buffers.errors import EpisodeClosed, ScoreConflict, UnderstudyError, UnknownEpisode
from buffers.ledger.episodes import adopt_episode, read_episode
from buffers.ledger.group_commit import operation
from buffers.ledger.scores import notify_score, say, settle
from buffers.records import EpisodeState, ScoreDetail

SAID = "f.verdict != 'no rounds'"
"""A row `f` of `score` is feedback: a score, words or both, also one that came too late to train anything."""
SETTLED = (
    "f.part = 'whole' AND f.judge = '' AND f.verdict = 'stored' AND f.hint IS NULL AND EXISTS (SELECT 1 FROM score AS b "
    "WHERE b.episode_id = f.episode_id AND b.score_id < f.score_id) AND f.value = coalesce((SELECT avg(value) FROM score "
    "WHERE score_id IN (SELECT max(b.score_id) FROM score AS b WHERE b.episode_id = f.episode_id AND b.score_id < f.score_id "
    "AND b.part = 'round' AND b.verdict IN ('stored', 'revised') GROUP BY b.round_index, b.judge)), 0.0)"
)
"""A row `f` of `score`, of a session, is what `settle_session` made of its rounds' scores, and nobody's feedback."""
REMEMBERED = 64
"""Sessions of a user that the next ones are compared with."""


class Session(NamedTuple):
    """A session's running episode."""

    episode_id: str
    group_id: int
    name: str
    is_side: bool
    is_watched: bool = False
    """Another model answers it: `serve.upstream`."""
    version: int = 0
    """The one that it was opened with."""


class SessionScore(NamedTuple):
    """What people thought of a session: the mean of what was said of the whole, else of its rounds."""

    episode_id: str
    is_watched: bool
    version: int
    """The one that it was opened with."""
    score: float


class FeedbackTaken(NamedTuple):
    """What came of feedback."""

    episode_id: str
    round_index: int | None
    is_new: bool
    """False: the same was said before."""
    trains: bool
    """False: the session was trained already, has ended otherwise, or another model answers it; it is recorded only."""


@operation(repeatable=True)
def open_session(
    db: sqlite3.Connection,
    *,
    episode_id: str,
    user: str,
    name: str,
    is_side: bool,
    version: int,
    is_watched: bool = False,
    client: str = "",
) -> Session:
    """Open and start an episode for a session, under the caller's id. `client`: the program that asks."""
    if adopt_episode(db, episode_id):
        db.execute(
            "UPDATE episode SET version = ?, started_at = (julianday('now') - 2440587.5) * 86400.0 WHERE episode_id = ?",
            (version, episode_id),
        )
        db.execute(
            "INSERT INTO session(episode_id, user, name, is_side, is_watched, client) VALUES (?, ?, ?, ?, ?, ?)",
            (episode_id, user, name, is_side, is_watched, client),
        )
    row = read_episode(db, episode_id=episode_id)
    return Session(episode_id, row.group_id, name, is_side, is_watched, version)


@operation(repeatable=True)
def running_sessions(
    db: sqlite3.Connection, *, user: str, name: str, is_side: bool = False, limit: int = 1, episode_id: str = ""
) -> list[Session]:
    """The running episodes of a user's sessions of this name, the newest first. `episode_id`: only this one."""
    found = db.execute(
        "SELECT episode_id, group_id, name, is_side, is_watched, version FROM session JOIN episode USING (episode_id) "
        "WHERE user = ? AND name = ? AND is_side = ? AND state = 'running' AND ? IN ('', episode_id) ORDER BY seq DESC LIMIT ?",
        (user, name, is_side, episode_id, limit),
    )
    return [
        Session(episode, group, called, bool(side), bool(watched), version)
        for episode, group, called, side, watched, version in found.fetchall()
    ]


@operation(repeatable=True)
def take_over(db: sqlite3.Connection, *, episode_id: str) -> bool:
    """The policy answers a session that another model was to answer. False: that one has answered, so it continues."""
    nothing = "NOT EXISTS (SELECT 1 FROM round WHERE round.episode_id = session.episode_id)"
    return (
        db.execute(f"UPDATE session SET is_watched = 0 WHERE episode_id = ? AND {nothing}", (episode_id,)).rowcount > 0
    )


@operation(repeatable=True)
def session_scores(db: sqlite3.Connection, *, episode_id: str = "", since: float = 0.0) -> list[SessionScore]:
    """Those of all sessions that people gave a score, or of one. `since`: of those that began after that time."""
    found = db.execute(
        "SELECT session.episode_id, is_watched, version, coalesce(avg(CASE part WHEN 'whole' THEN value END), avg(value)) FROM "
        "(SELECT max(score_id) AS latest FROM score WHERE part IN ('whole', 'round') AND verdict IN ('stored', 'revised') "
        "AND ? IN ('', episode_id) GROUP BY episode_id, part, round_index, judge) JOIN score ON score_id = latest "
        "JOIN session USING (episode_id) JOIN episode USING (episode_id) WHERE is_side = 0 AND started_at >= ? "
        "GROUP BY session.episode_id",
        (episode_id, since),
    )
    return [SessionScore(name, bool(watched), version, score) for name, watched, version, score in found.fetchall()]


def name_answer(db: sqlite3.Connection, *, request_id: str, episode_id: str, round_index: int) -> None:
    """The client has read this id in the answer that is this round."""
    db.execute(
        "INSERT INTO answer VALUES (?, ?, ?) ON CONFLICT (request_id) DO NOTHING", (request_id, episode_id, round_index)
    )
    _heard(db, episode_id=episode_id)


@operation(refusable=True)
def give_feedback(
    db: sqlite3.Connection,
    *,
    user: str | None,
    session: str = "",
    response_id: str = "",
    round_index: int | None = None,
    score: float | None = None,
    text: str = "",
    source: str = "",
) -> FeedbackTaken | UnderstudyError:
    """Feedback on a session (its name or its episode's id), on a round of it, or on an answer by its id. `user`: None may speak of
    everybody's sessions. A later score of the same source takes the place of the one before. Raises UnknownEpisode."""
    episode_id, index = _meant(db, user=user, session=session, response_id=response_id, round_index=round_index)
    row = read_episode(db, episode_id=episode_id)
    _heard(db, episode_id=episode_id)
    (is_watched,) = db.execute("SELECT is_watched FROM session WHERE episode_id = ?", (episode_id,)).fetchone()
    detail = ScoreDetail(round_index=index, judge=source, final=False, revise=True, hint=text)
    if score is None:
        is_new = say(db, row=row, detail=detail)
        return FeedbackTaken(episode_id, index, is_new, row.state == EpisodeState.RUNNING and not is_watched)
    taken = notify_score(
        db, episode_id=episode_id, score=score, detail=detail, max_attempts=1, drop_zero_variance=False
    )
    if isinstance(taken, EpisodeClosed | ScoreConflict):
        return FeedbackTaken(episode_id, index, True, False)
    if isinstance(taken, UnderstudyError):
        return taken
    return FeedbackTaken(episode_id, index, taken, not is_watched)


@operation(repeatable=True)
def settle_session(db: sqlite3.Connection, *, episode_id: str, words_count: bool) -> bool:
    """End a session that has feedback, and is no side call: its score is the mean of what was said of the whole, else of its
    rounds. False: nothing was said of it. `words_count`: a session of which only words were said is trained, too, with a score of
    0."""
    row = read_episode(db, episode_id=episode_id)
    is_side = "SELECT 1 FROM session WHERE episode_id = ? AND is_side"
    if row.state != EpisodeState.RUNNING or db.execute(is_side, (episode_id,)).fetchone():
        return False
    counts = "SELECT avg(value) FROM score WHERE episode_id = ? AND part = ? AND verdict IN ('stored', 'revised')"
    (whole,) = db.execute(counts, (episode_id, "whole")).fetchone()
    if whole is None:
        latest = (
            "SELECT avg(value) FROM score WHERE score_id IN (SELECT max(score_id) FROM score WHERE episode_id = ? "
            "AND part = 'round' AND verdict IN ('stored', 'revised') GROUP BY round_index, judge)"
        )
        (mean,) = db.execute(latest, (episode_id,)).fetchone()
        said = "SELECT 1 FROM score WHERE episode_id = ? AND verdict = 'words' LIMIT 1"
        if mean is None and words_count and db.execute(said, (episode_id,)).fetchone():
            mean = 0.0
        if mean is None:
            return False
        notify_score(
            db,
            episode_id=episode_id,
            score=mean,
            detail=ScoreDetail(final=False),
            max_attempts=1,
            drop_zero_variance=False,
        )
    return settle(db, episode_id=episode_id, drop_zero_variance=False)


def user_of(db: sqlite3.Connection, *, episode_id: str) -> str | None:
    """Whose session it is; None: it is none."""
    row = db.execute("SELECT user FROM session WHERE episode_id = ?", (episode_id,)).fetchone()
    return None if row is None else str(row[0])


def scored_before(db: sqlite3.Connection, *, user: str) -> float | None:
    """The mean score of the newest `REMEMBERED` sessions of a user that were trained; None: there is none."""
    (mean,) = db.execute(
        "SELECT avg(score) FROM (SELECT score FROM session JOIN episode USING (episode_id) JOIN grp USING (group_id) "
        "WHERE user = ? AND grp.state = 'trained' AND episode.state = 'scored' ORDER BY seq DESC LIMIT ?)",
        (user, REMEMBERED),
    ).fetchone()
    return None if mean is None else float(mean)


def _heard(db: sqlite3.Connection, *, episode_id: str) -> None:
    db.execute(
        "UPDATE session SET heard_at = (julianday('now') - 2440587.5) * 86400.0 WHERE episode_id = ? AND heard_at > 0",
        (episode_id,),
    )


def _meant(
    db: sqlite3.Connection, *, user: str | None, session: str, response_id: str, round_index: int | None
) -> tuple[str, int | None]:
    """(episode, round) that feedback is of."""
    mine = "" if user is None else " AND user = :user"
    if response_id:
        found = db.execute(
            f"SELECT episode_id, round_index FROM answer JOIN session USING (episode_id) WHERE request_id = :id{mine}",
            {"id": response_id, "user": user},
        ).fetchone()
        what = f"response_id must be of an answer that was given to this key, got {response_id!r:.200}"
    else:
        found = db.execute(
            "SELECT episode_id, NULL FROM session JOIN episode USING (episode_id) WHERE (name = :id OR episode_id = :id) "
            f"AND is_side = 0 AND heard_at > 0{mine} ORDER BY seq DESC LIMIT 1",
            {"id": session, "user": user},
        ).fetchone()
        what = (
            f"session must be one of this key's, by the name that its client gave it or by its id, got {session!r:.200}"
        )
    if found is None:
        raise UnknownEpisode(f"{what}; nothing is stored of it")
    return found[0], found[1] if round_index is None else round_index
