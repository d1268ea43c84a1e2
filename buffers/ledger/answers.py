"""What the model answered, as text: an episode's question, its last words and its score, for people.

Called by `learner.evaluate`, by `learner.session` at the end of a run, and by `buffers.ledger.cli`. Functions over a
connection of `LedgerReader`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from buffers.ledger.batches import read_rounds
from buffers.ledger.episodes import read_task
from buffers.records import Task
from buffers.training_rows import ABORTED

Decode = Callable[[list[int]], str]
"""Token ids -> text."""
LONGEST = 160
"""Characters of a text in a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One ended episode."""

    episode_id: str
    task: Task | None
    answer: str
    """What the policy said last, without control tokens; empty: nothing."""
    score: float | None
    reason: str | None
    """Why it has no score."""
    group_state: str
    version: int | None
    """That of the weights that answered first."""

    @property
    def question(self) -> str:
        """The last message of the task's prompt."""
        content = self.task.prompt[-1].get("content") if self.task is not None and self.task.prompt else None
        parts = content if isinstance(content, list) else [content]
        return " ".join(str(part.get("text", "") if isinstance(part, dict) else part or "") for part in parts)

    def record(self) -> dict[str, Any]:
        """It as JSON."""
        task = self.task
        return {
            "episode_id": self.episode_id,
            "task_id": task and task.task_id,
            "data_source": task and task.data_source,
            "question": self.question,
            "answer": self.answer,
            "truth": task and task.ground_truth,
            "score": self.score,
            "reason": self.reason,
            "version": self.version,
        }


def answers(db: sqlite3.Connection, *, decode: Decode, tasks_of: str = "") -> Iterator[Answer]:
    """Those of all ended episodes, in the order in which these were opened; `tasks_of`: of tasks whose id begins so."""
    found = db.execute(
        "SELECT episode_id FROM episode JOIN grp USING (group_id) WHERE episode.state IN ('scored', 'failed') "
        "AND substr(coalesce(task_id, ''), 1, ?) = ? ORDER BY seq",
        (len(tasks_of), tasks_of),
    ).fetchall()
    for (episode_id,) in found:
        yield answer_of(db, episode_id=episode_id, decode=decode)


def answer_of(db: sqlite3.Connection, *, episode_id: str, decode: Decode) -> Answer:
    """That of one episode of the ledger."""
    task_id, score, reason, group_state, version = db.execute(
        "SELECT task_id, score, episode.reason, grp.state, version FROM episode JOIN grp USING (group_id) WHERE episode_id = ?",
        (episode_id,),
    ).fetchone()
    rounds = [each for each in read_rounds(db, episode_id=episode_id) if each.finish_reason != ABORTED]
    return Answer(
        episode_id=episode_id,
        task=None if task_id is None else read_task(db, task_id=task_id),
        answer=decode(rounds[-1].sampled_ids.tolist()) if rounds else "",
        score=score,
        reason=reason,
        group_state=group_state,
        version=version,
    )


def best_episodes(db: sqlite3.Connection) -> list[str]:
    """The episode of each task that scored most, the first of several; none where that is 0 or less."""
    found = db.execute(
        "SELECT episode_id FROM (SELECT episode_id, score, "
        "row_number() OVER (PARTITION BY task_id ORDER BY score DESC, seq) AS place "
        "FROM episode JOIN grp USING (group_id) WHERE episode.state = 'scored') WHERE place = 1 AND score > 0"
    )
    return [episode_id for (episode_id,) in found]


def samples(scored: Sequence[tuple[float, str, str]], *, number: int) -> list[tuple[str, str]]:
    """(why it is shown, episode id) of some of these (score, task id, episode id): the best, the worst, and some in between, each
    of another task."""
    ranked = sorted(scored, key=lambda each: -each[0])
    places = [round(place * (len(ranked) - 1) / max(1, number - 1)) for place in range(number)] if ranked else []
    chosen: dict[str, tuple[str, str]] = {}
    for place in dict.fromkeys(places):
        _, task_id, episode_id = ranked[place]
        name = "best" if place == 0 else "worst" if place == len(ranked) - 1 else "drawn"
        chosen.setdefault(task_id, (name, episode_id))
    return list(chosen.values())


def first_and_last(
    db: sqlite3.Connection, *, decode: Decode, tasks_of: str, number: int
) -> list[tuple[Answer, Answer]]:
    """The answers of the first and the last group of some tasks whose ids begin so, those first whose score has changed most."""
    found = db.execute(
        "WITH said AS (SELECT seq, group_id, task_id FROM episode JOIN grp USING (group_id) "
        "WHERE episode.state = 'scored' AND substr(task_id, 1, ?) = ?), "
        "ends AS (SELECT min(seq) AS first, max(seq) AS last FROM said GROUP BY task_id HAVING min(group_id) < max(group_id)) "
        "SELECT one.episode_id, other.episode_id FROM ends JOIN episode AS one ON one.seq = first "
        "JOIN episode AS other ON other.seq = last ORDER BY abs(other.score - one.score) DESC, first LIMIT ?",
        (len(tasks_of), tasks_of, number),
    ).fetchall()
    return [
        (answer_of(db, episode_id=one, decode=decode), answer_of(db, episode_id=other, decode=decode))
        for one, other in found
    ]


def in_a_line(text: str) -> str:
    """The text in one line that is not too long, its end kept: there the answer is."""
    words = " ".join(text.split())
    return words if len(words) <= LONGEST else f"{words[: LONGEST // 3]} ... {words[-2 * LONGEST // 3 :]}"
