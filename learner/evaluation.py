"""`Evaluation`: plays each task of a file once or several times, and waits until all have ended; nothing is trained.

Run by `learner.pipeline` in the place of the learn loop, for `learner.evaluate`. Invariant: each task is played `samples` times by
the weights that the engine was started with, and every episode ends in the figures, scored or failed with its reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from buffers.ledger.ledger import Ledger
from buffers.records import Task, Validated
from buffers.tasks.task_pool import TaskPool
from learner.reporting.display import Display
from learner.validation import play

REPORT_S, MAX_REPORT_S = 10.0, 60.0
"""Seconds before the first line on how far it is; then twice as long each time, up to a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """What an evaluation plays."""

    limit: int | None = None
    """Number of tasks, the first of the file. None: all."""


class Evaluation:
    """The main loop of an evaluation, as `LearnLoop` is that of a run. `read_tasks` reads the task file."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        pool: TaskPool,
        read_tasks: Callable[[], Sequence[Task]],
        samples: int,
        display: Display,
    ) -> None:
        self._ledger = ledger
        self._pool = pool
        self._read_tasks = read_tasks
        self._samples = samples
        self._display = display
        self.num_tasks = 0
        self.found: list[Validated] = []
        """The tasks with a score, once `run` has returned."""

    async def run(self) -> None:
        """Play every task; returns when all episodes have ended."""
        tasks = await asyncio.to_thread(self._read_tasks)
        self.num_tasks = len(tasks)
        self._pool.unpause()
        reporting = asyncio.create_task(self._report(), name="report")
        try:
            self.found = await play(self._ledger, tasks, samples=self._samples, fewest=1)
        finally:
            reporting.cancel()

    def stop(self) -> bool:
        """Half an evaluation is none: the caller cancels it."""
        return False

    async def _report(self) -> None:
        wait_s = REPORT_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_REPORT_S)
            counts = self._ledger.counts()
            self._display.played(
                scored=counts["episodes/scored"],
                of=self.num_tasks * self._samples,
                running=int(self._pool.metrics()["pool/running"]),
                failed=sum(number for name, number in counts.items() if name.startswith("failed/")),
            )
