"""The order in which a run takes the rows of its task files, also after it was interrupted.

Built by `learner.pipeline`, read by the task pool in a thread. Invariant: the order follows from file and seed alone, so a
run that goes on finds its place from how often each task was opened before.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from buffers.parquet import read_tasks
from buffers.records import Task


def task_list(path: Path, *, agent_name: str | None = None) -> list[Task]:
    """The rows of a file; those without an agent's name get `agent_name`. Raises TaskError."""
    tasks = read_tasks(path)
    return [task if task.agent_name or agent_name is None else replace(task, agent_name=agent_name) for task in tasks]


def endless_tasks(path: Path, *, seed: int, opened: Mapping[str, int], agent_name: str | None = None) -> Iterator[Task]:
    """The rows for ever, shuffled anew in each epoch; without the first `opened[task_id]` turns of each task."""
    left = Counter(opened)
    for epoch in itertools.count():
        tasks = task_list(path, agent_name=agent_name)
        random.Random(seed * 1_000_003 + epoch).shuffle(tasks)
        for task in tasks:
            if left[task.task_id] > 0:
                left[task.task_id] -= 1
            else:
                yield task
