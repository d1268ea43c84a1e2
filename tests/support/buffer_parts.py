"""Records for the buffer tests: tasks, rounds with recognisable ids, and groups driven to a state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from buffers.ledger.ledger import Ledger
from buffers.records import Episode, Round, Task


def make_task(number: int) -> Task:
    return Task(task_id=f"t:{number}", prompt=[{"role": "user", "content": f"task {number}"}], ground_truth=number)


def make_round(
    episode_id: str,
    *,
    index: int = 0,
    parent: int | None = None,
    tail: Sequence[int] | np.ndarray = (1, 2),
    sampled: Sequence[int] | np.ndarray = (7, 8, 9),
    version: int = 0,
    finish_reason: str = "stop",
    role: str = "",
) -> Round:
    return Round(
        episode_id=episode_id,
        round_index=index,
        parent=parent,
        tail_ids=np.array(tail, dtype=np.int32),
        sampled_ids=np.array(sampled, dtype=np.int32),
        logprobs=-np.arange(1, len(sampled) + 1, dtype=np.float32) / 8,
        versions=np.full(len(sampled), version, dtype=np.int32),
        finish_reason=finish_reason,
        role=role,
    )


def open_running(
    ledger: Ledger, *, task: int, group_size: int = 1, version: int = 0, min_size: int | None = None
) -> list[Episode]:
    """A group whose members run."""
    ledger.put_tasks([make_task(task)])
    episodes = ledger.open_group(f"t:{task}", instance=0, group_size=group_size, min_size=min_size).result()
    for episode in episodes:
        ledger.start_episode(episode.episode_id, version=version).result()
    return episodes


def make_ready(ledger: Ledger, *, task: int, group_size: int = 1, version: int = 0, score: float = 1.0) -> int:
    """A group whose members are scored; returns its id."""
    episodes = open_running(ledger, task=task, group_size=group_size, version=version)
    for episode in episodes:
        ledger.put_round(make_round(episode.episode_id, version=version))
        assert ledger.notify_score(episode.episode_id, score).result() is True
    return episodes[0].group_id


def scored_by_group_state(ledger: Ledger) -> int:
    """The right-hand side of the balance: scored episodes, by what became of their group."""
    counts = ledger.counts()
    return sum(n for name, n in counts.items() if name.startswith("scored/"))
