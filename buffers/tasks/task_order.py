"""The order in which a run takes the rows of its task files, also after it was interrupted.

Built by `learner.pipeline`, read by the task pool in a thread. The order follows from files, weights and seed alone:

1. *Within a file*, epoch after epoch: its row groups in an order drawn from (seed, file name, epoch), cut into windows of at
   least `WINDOW_ROWS` rows; the rows of a window in an order drawn after it. So at most a window and one row group more are in
   memory, as arrow columns; a file that is no larger is shuffled as a whole.
2. *Between files*, the next row comes from the file that is furthest behind its share by weight (the first such one).

Invariant: a run that is resumed takes the rows that it had not taken, from how often each task was opened before. That costs a
pass over the task ids: no other column of a row that was taken is read. Rows without ids are known by their file's name and
number; another file of that name has other rows, and begins at its start.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from buffers.disk import replacing
from buffers.records import Task
from buffers.tasks.curriculum import Curriculum, id_hash
from buffers.tasks.parquet import TaskFile, read_tasks

WINDOW_ROWS = 16_384


def task_list(path: Path, *, agent_name: str | None = None) -> list[Task]:
    """The rows of a file; those without an agent's name get `agent_name`. Raises TaskError."""
    return [_played_by(task, agent_name) for task in read_tasks(path)]


def endless_tasks(
    files: Mapping[Path, float],
    *,
    seed: int,
    opened: Mapping[str, int],
    agent_name: str | None = None,
    known: Path | None = None,
    curriculum: Curriculum | None = None,
    warn: Callable[[str], object] = lambda _: None,
) -> Iterator[Task]:
    """The rows in endless turns, without the first `opened[task_id]` turns of each task. `files`: path -> weight.

    With several files, whose names must differ, a row's task id is preceded by the file's name: `name::id`. `known`: a file that
    keeps the content with which the run began of each name; `warn` gets a line for another one, whose rows have ids of their own.
    `curriculum`: draws each file's rows, instead of the order of the module.
    """
    began: dict[str, str] = json.loads(known.read_text(encoding="utf-8")) if known and known.is_file() else {}
    streams = []
    for path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()[:8]
        is_same = began.setdefault(path.stem, content) == content
        stream = _Stream(path, seed=seed, opened=opened, alone=len(files) == 1, mark="" if is_same else content)
        if curriculum is not None:
            stream.follow(curriculum)
        streams.append(stream)
        if streams[-1].mark:
            warn(f"data.tasks={path} has other content than the file of that name before: it begins at its start")
    if known and (not known.is_file() or json.loads(known.read_text(encoding="utf-8")) != began):
        with replacing(known) as scratch:
            scratch.write_text(json.dumps(began) + "\n", encoding="utf-8")
    weights = [weight / sum(files.values()) for weight in files.values()]
    while True:
        turn = 1 + sum(stream.num_taken for stream in streams)
        behind = [weight * turn - stream.num_taken for weight, stream in zip(weights, streams, strict=True)]
        yield _played_by(next(streams[behind.index(max(behind))]), agent_name)


class _Stream:
    """The rows of one file in endless turns. `num_taken` counts those of earlier processes too. `mark`: of other content than the
    run began with; empty: it has not changed."""

    def __init__(self, path: Path, *, seed: int, opened: Mapping[str, int], alone: bool, mark: str) -> None:
        self._file = TaskFile(path)
        self._seed = f"{seed} {path.stem}"
        self.mark = "" if self._file.has_ids else mark
        """What tells rows without ids from those of an earlier file of this name."""
        self._prefix = f"{path.stem}@{self.mark}::" if self.mark else "" if alone else f"{path.stem}::"
        self._own = f"{path.stem}:"
        self._left: Counter[str] = Counter()
        """Turns of each task that were taken before and are to come in this order."""
        self.num_taken = 0
        self._first_epoch = self._look_back(opened) if opened else 0
        self._rows = self._in_order()

    def __next__(self) -> Task:
        self.num_taken += 1
        return next(self._rows)

    def follow(self, curriculum: Curriculum) -> None:
        """Have the rows drawn. All ids are read now, and nothing of them is kept but their hashes."""
        groups = range(len(self._file.group_sizes))
        hashes = (id_hash(task_id) for group in groups for task_id in self._ids([group]))
        rates = curriculum.add_file(self._own, np.fromiter(hashes, np.uint64))
        self._rows = (
            self._named(self._file.task(curriculum.draw(rates, number=self.num_taken))) for _ in itertools.count()
        )

    def _look_back(self, opened: Mapping[str, int]) -> int:
        """Find what was taken; returns how many epochs were taken whole."""
        in_an_epoch: Counter[str] = Counter()
        is_whole = True
        for group in range(len(self._file.group_sizes)):
            known = [task_id for task_id in self._ids([group]) if task_id in opened]
            in_an_epoch.update(known)
            is_whole = is_whole and len(known) == self._file.group_sizes[group]
        whole = min(opened[task_id] // times for task_id, times in in_an_epoch.items()) if is_whole else 0
        for task_id, times in in_an_epoch.items():
            self.num_taken += opened[task_id]
            if (left := opened[task_id] - whole * times) > 0:
                self._left[task_id] = left
        return whole

    def _in_order(self) -> Iterator[Task]:
        for epoch in itertools.count(self._first_epoch):
            draw = random.Random(f"{self._seed} {epoch}")
            for groups in self._windows(draw):
                places = list(range(sum(self._file.group_sizes[group] for group in groups)))
                draw.shuffle(places)
                if self._left:
                    ids = self._ids(groups)
                    places = [place for place in places if not self._was_taken(ids[place])]
                if places:
                    yield from (self._named(task) for task in self._file.tasks(groups, places=places))

    def _windows(self, draw: random.Random) -> list[list[int]]:
        order = list(range(len(self._file.group_sizes)))
        draw.shuffle(order)
        windows: list[list[int]] = [[]]
        rows = 0
        for group in order:
            if rows >= WINDOW_ROWS:
                windows.append([])
                rows = 0
            windows[-1].append(group)
            rows += self._file.group_sizes[group]
        return windows

    def _was_taken(self, task_id: str) -> bool:
        if task_id not in self._left:
            return False
        self._left[task_id] -= 1
        if self._left[task_id] == 0:
            del self._left[task_id]
        return True

    def _ids(self, groups: list[int]) -> list[str]:
        return [self._name(task_id) for task_id in self._file.ids(groups)]

    def _named(self, task: Task) -> Task:
        name = self._name(task.task_id)
        return task if name == task.task_id else replace(task, task_id=name)

    def _name(self, task_id: str) -> str:
        """Default ids (`name:row`) hold the file's name already."""
        is_default = task_id.startswith(self._own) and task_id[len(self._own) :].isdecimal()
        return task_id if is_default and not self.mark else self._prefix + task_id


def _played_by(task: Task, agent_name: str | None) -> Task:
    return task if task.agent_name or agent_name is None else replace(task, agent_name=agent_name)
