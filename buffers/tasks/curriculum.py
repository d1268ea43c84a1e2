"""Draws the rows of task files by what their own groups scored: `data.sampler=thompson` and `pass_rate`.

`Curriculum` is made with a run's buffers; the pool tells it which groups are over, `buffers.tasks.task_order` asks it for rows. A
task's pass rate has a Beta posterior, whose counts of passes and fails lose `FORGOTTEN` of themselves with each policy version, as
the policy that earned them is gone. A score of 0.3 is 0.3 of a pass.

- *thompson*: a pass rate is drawn from each posterior, and the task whose rate is nearest 1/2 is taken (MoPPS, arXiv:2507.04632).
- *pass_rate*: a task is drawn in proportion to p (1 - p), p the posterior's mean (learnability, arXiv:2502.12272).

Invariants: a draw follows from the seed, its number within the file, and the groups that were over when the newest policy version
came into place. All of this stands in the ledger, at the position that a checkpoint names, so that a run that is resumed draws as
if it had not been interrupted. A task under way is drawn again only where all are. 35 bytes of memory a task; at most `CANDIDATES`
tasks are looked at for a draw. It reads no file and no ledger.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from buffers.records import GroupOutcome, GroupState

Rule = Literal["thompson", "pass_rate"]
FORGOTTEN = 0.05
CANDIDATES = 16_384
"""A file of more tasks has so many of them drawn first, with equal chances."""


class Curriculum:
    """`history`: all groups that earlier processes of this run opened, in order; `version`: the policy's. `learn` and `figures` are
    called on one thread, all else on another."""

    def __init__(self, rule: Rule, *, seed: int, history: Sequence[GroupOutcome] = (), version: int = 0) -> None:
        self._rule = rule
        self._seed = seed
        self._version = version
        self._files: list[PassRates] = []
        self._learned: set[int] = set()
        self._newest_trained = 0
        self.since = 0
        """The first group that is not over: what came before it is known."""
        self._news: deque[tuple[int, list[GroupOutcome]]] = deque()
        self._drawn: deque[tuple[float, bool]] = deque()
        self._figures: dict[str, float] = {}
        self.learn(history, version=version)
        over = {group.group_id for _, groups in self._news for group in groups}
        self._under_way = [group.task_id for group in history if group.group_id not in over]
        self._history = self._news.popleft()[1]

    def learn(self, groups: Sequence[GroupOutcome], *, version: int) -> None:
        """A new policy version is in place. `groups`: all from `since` on, in order. Over is what was trained, and what was given
        up before the newest such: the same in two runs whose steps trained the same groups."""
        trained = (group.group_id for group in groups if group.state == GroupState.TRAINED)
        self._newest_trained = max(trained, default=self._newest_trained)
        over, left = [], []
        for group in groups:
            is_past = group.state == GroupState.EVICTED and group.group_id < self._newest_trained
            if group.state == GroupState.TRAINED or is_past:
                if group.group_id not in self._learned:
                    over.append(group)
            elif group.group_id not in self._learned:  # trained, and given back to be trained again
                left.append(group.group_id)
        self._learned.update(group.group_id for group in over)
        self.since = left[0] if left else max(self._learned, default=self.since - 1) + 1
        self._learned = {group_id for group_id in self._learned if group_id >= self.since}
        self._news.append((version, over))
        drawn = [self._drawn.popleft() for _ in range(len(self._drawn))]
        if drawn:
            rates, new = zip(*drawn, strict=True)
            self._figures = {"sampler/pass_rate": sum(rates) / len(drawn), "sampler/new_share": sum(new) / len(drawn)}

    def figures(self) -> dict[str, float]:
        """The mean of the estimated pass rates of the tasks that were drawn under the version before, and the share of them
        without a score; and how many tasks have one."""
        return {**self._figures, "sampler/tasks": float(sum(file.num_tried for file in self._files))}

    def add_file(self, name: str, ids: npt.NDArray[np.uint64]) -> PassRates:
        """The pass rates of a file's tasks, by the hashes of their ids."""
        file = PassRates(name, ids)
        file.learn(self._history)
        for task_id in self._under_way:
            file.start(task_id)
        self._files.append(file)
        return file

    def draw(self, file: PassRates, *, number: int) -> int:
        """The row of the file's draw of this number."""
        self._history, self._under_way = [], []
        while self._news:
            self._version, groups = self._news.popleft()
            for each in self._files:
                each.learn(groups)
        words = hashlib.sha256(f"{self._seed} {file.name} {number}".encode()).digest()
        task, rate = file.draw(self._rule, version=self._version, draws=np.random.default_rng(list(words)))
        self._drawn.append((rate, not file.tried[task]))
        return int(file.rows[task])


@dataclass(slots=True, init=False, eq=False)
class PassRates:
    """The posteriors of a file's tasks: arrays of one entry for each different id, in the order of their hashes."""

    name: str
    ids: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.int32]
    """The first row with the id."""
    passes: npt.NDArray[np.float64]
    fails: npt.NDArray[np.float64]
    versions: npt.NDArray[np.int32]
    """The version to which `passes` and `fails` are discounted."""
    running: npt.NDArray[np.int16]
    """Groups under way."""
    tried: npt.NDArray[np.bool_]

    def __init__(self, name: str, ids: npt.NDArray[np.uint64]) -> None:
        self.name = name
        self.ids, rows = np.unique(ids, return_index=True)
        self.rows = rows.astype(np.int32)
        number = len(self.ids)
        self.passes, self.fails = np.zeros(number), np.zeros(number)
        self.versions, self.running = np.zeros(number, np.int32), np.zeros(number, np.int16)
        self.tried = np.zeros(number, np.bool_)

    @property
    def num_tried(self) -> int:
        """Tasks with a score."""
        return int(self.tried.sum())

    def start(self, task_id: str) -> None:
        """A group of this task is under way, if the file has it."""
        if (task := self._find(task_id)) is not None:
            self.running[task] += 1

    def learn(self, groups: Sequence[GroupOutcome]) -> None:
        """These groups, in order, are over."""
        for group in groups:
            if (task := self._find(group.task_id)) is None:
                continue
            self.running[task] = max(0, self.running[task] - 1)
            if group.num_scored:
                kept = (1 - FORGOTTEN) ** max(0, group.version - int(self.versions[task]))
                self.passes[task] = self.passes[task] * kept + group.passes
                self.fails[task] = self.fails[task] * kept + group.num_scored - group.passes
                self.versions[task] = max(self.versions[task], group.version)
                self.tried[task] = True

    def draw(self, rule: Rule, *, version: int, draws: np.random.Generator) -> tuple[int, float]:
        """(a task, which is under way now; the mean of its posterior)"""
        number = len(self.ids)
        some: Any = np.arange(number) if number <= CANDIDATES else draws.integers(number, size=CANDIDATES)
        free = some[self.running[some] == 0]
        some = free if len(free) else some
        kept = (1 - FORGOTTEN) ** np.maximum(0, version - self.versions[some])
        passes, fails = 1 + self.passes[some] * kept, 1 + self.fails[some] * kept
        means = passes / (passes + fails)
        if rule == "thompson":
            at = int(np.argmin(np.abs(draws.beta(passes, fails) - 0.5)))
        else:
            weights = means * (1 - means)
            at = int(draws.choice(len(some), p=weights / weights.sum()))
        self.running[some[at]] += 1
        return int(some[at]), float(means[at])

    def _find(self, task_id: str) -> int | None:
        wanted = id_hash(task_id)
        at = int(np.searchsorted(self.ids, np.uint64(wanted)))
        return at if at < len(self.ids) and int(self.ids[at]) == wanted else None


def id_hash(task_id: str) -> int:
    """64 bits of a task's id: of a million tasks two have the same with a chance of 3e-8, and then share a pass rate."""
    return int.from_bytes(hashlib.blake2b(task_id.encode(), digest_size=8).digest(), "little")
