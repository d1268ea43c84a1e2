"""Operations that forget: what was said in an episode, to it and of it is overwritten; what was counted stays.

Called by `Ledger`, inside its transaction. Invariants: counts balance, and the ledger says which steps trained what is forgotten;
what was not trained yet never is; an episode in a batch is forgotten once that was trained. Overwritten are rounds (ids,
log-probabilities, digests), words of feedback, the names that clients gave sessions and answers, and details of failures. Bytes
that SQLite has left in its file are another matter: `Ledger.overwrite`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from buffers.errors import UnknownEpisode
from buffers.ledger.batches import IN_BATCH, WAS_FORGOTTEN
from buffers.ledger.encode import FORGOTTEN
from buffers.ledger.episodes import evict_group, read_episode
from buffers.ledger.group_commit import operation
from buffers.records import EpisodeState, GroupState


class Forgotten(NamedTuple):
    """What was overwritten."""

    episodes: tuple[str, ...] = ()
    in_batch: tuple[str, ...] = ()
    """Those that are trained just now: nothing of them was overwritten."""
    rounds: int = 0
    tokens: int = 0
    """That were sampled."""
    num_bytes: int = 0
    words: int = 0
    """Hints and words of feedback."""
    untrained: int = 0
    """Episodes that no step has trained, and none will."""
    steps: tuple[int, ...] = ()
    """Those that trained one of them, in any lineage."""

    def plus(self, other: Forgotten) -> Forgotten:
        """Both together."""
        pairs = zip(self, other, strict=True)
        both = Forgotten(*(one + two for one, two in pairs))  # type: ignore[operator]
        return both._replace(steps=tuple(sorted(set(both.steps))))


@operation(repeatable=True)
def episodes_of(db: sqlite3.Connection, *, user: str, session: str) -> list[str]:
    """The episodes of a user's sessions (empty: of everybody's), all of them or those of one (its client's name for it, or its
    id), the oldest first; without those that were forgotten."""
    found = db.execute(
        "SELECT episode_id FROM session JOIN episode USING (episode_id) WHERE heard_at IS NOT NULL "
        "AND (:user = '' OR user = :user) AND (:session = '' OR name = :session OR episode_id = :session) ORDER BY seq",
        {"user": user, "session": session},
    )
    return [episode_id for (episode_id,) in found.fetchall()]


@operation(repeatable=True)
def expired_sessions(db: sqlite3.Connection, *, age_s: float | None, limit: int) -> list[str]:
    """Episodes of sessions that do not wait to be trained: those of which nothing was stored for `age_s` by this machine's
    clock (None: no age is too old), and those that were in a batch when they were to be forgotten."""
    found = db.execute(
        "SELECT episode_id FROM session JOIN episode USING (episode_id) JOIN grp USING (group_id) "
        "WHERE heard_at < coalesce((julianday('now') - 2440587.5) * 86400.0 - ?, 1.0) "
        f"AND grp.state NOT IN ('ready', 'leased') AND NOT {IN_BATCH} ORDER BY heard_at LIMIT ?",
        (age_s, limit),
    )
    return [episode_id for (episode_id,) in found.fetchall()]


@operation(repeatable=True)
def forget_episodes(db: sqlite3.Connection, *, episode_ids: Sequence[str]) -> Forgotten:
    """Overwrite these episodes. Those that wait to be trained are given up, with their groups; those in a batch are left, and
    sessions among them marked, so that a run forgets them after it. Raises UnknownEpisode."""
    taken = Forgotten()
    for episode_id in episode_ids:
        taken = taken.plus(_forget(db, episode_id=episode_id))
    return taken


def _forget(db: sqlite3.Connection, *, episode_id: str) -> Forgotten:
    row = read_episode(db, episode_id=episode_id)
    state, joins = db.execute(f"SELECT state, {IN_BATCH} FROM grp WHERE group_id = ?", (row.group_id,)).fetchone()
    if state == GroupState.LEASED or joins:
        db.execute("UPDATE session SET heard_at = 0 WHERE episode_id = ? AND heard_at IS NOT NULL", (episode_id,))
        return Forgotten(in_batch=(episode_id,))
    if state in (GroupState.OPEN, GroupState.READY, GroupState.VALIDATING):
        evict_group(
            db,
            group_id=row.group_id,
            reason=WAS_FORGOTTEN,
            member_state=EpisodeState.FAILED,
            member_reason=WAS_FORGOTTEN,
        )
    steps = db.execute(
        "SELECT DISTINCT step FROM trained JOIN step USING (step_id) WHERE group_id = ? ORDER BY step", (row.group_id,)
    ).fetchall()
    rounds, tokens, num_bytes = db.execute(
        "SELECT count(*), coalesce(sum(num_sampled), 0), coalesce(sum(length(body) + coalesce(length(memo), 0)), 0) "
        "FROM round WHERE episode_id = ? AND body != ?",
        (episode_id, FORGOTTEN),
    ).fetchone()
    db.execute(
        "UPDATE round SET body = ?1, memo = NULL, trained = iif("
        "(SELECT is_watched FROM session WHERE session.episode_id = ?2), trained, NULL) WHERE episode_id = ?2 AND body != ?1",
        (FORGOTTEN, episode_id),
    )
    words = db.execute("UPDATE score SET hint = NULL WHERE episode_id = ? AND hint IS NOT NULL", (episode_id,)).rowcount
    db.execute(
        "UPDATE episode SET reason = iif(state = 'scored', ?, substr(reason, 1, instr(reason || ':', ':') - 1)) "
        "WHERE episode_id = ?",
        (WAS_FORGOTTEN, episode_id),
    )
    db.execute("DELETE FROM answer WHERE episode_id = ?", (episode_id,))
    db.execute("UPDATE session SET name = '', client = '', heard_at = NULL WHERE episode_id = ?", (episode_id,))
    return Forgotten(
        (episode_id,), (), rounds, tokens, num_bytes, words, int(not steps), tuple(step for (step,) in steps)
    )  # fmt: skip


def require_some(episode_ids: Sequence[str], *, user: str, session: str) -> None:
    """Raises UnknownEpisode where there is nothing to forget."""
    if not episode_ids:
        what = " and ".join(f"{kind} {name!r:.200}" for kind, name in (("user", user), ("session", session)) if name)
        raise UnknownEpisode(
            f"{what} must have sessions that are stored, got none; `understudy ledger episodes` lists all"
        )
