"""Tasks that are played and never trained: `Validation` beside the training, `Evaluation` in the place of it.

Used by `learner.learn_loop`, and by `learner.pipeline` for `learner.evaluate`. The ledger opens groups that no batch takes
(`buffers.ledger.validation`); the same agents in the same environment lease their episodes like any other. Invariants: with one
sample for a task it is greedy, with more at the run's temperature; every episode ends in the figures, scored or failed; at most one
validation is under way, and one that is due meanwhile is left out and counted. Validation's episodes that run while the weights
change are finished by the newer ones: figures belong to about the step named in them. An evaluation's are all played by the weights
that the engine was started with.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean

from buffers.ledger.ledger import Ledger, LedgerEvent
from buffers.records import Task, Validated
from buffers.tasks.task_pool import TaskPool
from learner.reporting.display import Display
from learner.reporting.evaluation_report import means_by_source

PREFIX = "val/"
"""Prefix of the ids of validation tasks: the same file may be trained on under its own ids."""
REPORT_S, MAX_REPORT_S = 10.0, 60.0
"""Seconds before the first line on how far an evaluation is; then twice as long each time, up to a minute."""


class Validation:
    """`tasks` reads the task file. `samples`: episodes of each task."""

    def __init__(self, ledger: Ledger, *, tasks: Callable[[], Sequence[Task]], every: int, samples: int) -> None:
        self._ledger = ledger
        self._read_tasks = tasks
        self._every = every
        self._samples = samples
        self._running: asyncio.Task[dict[str, float]] | None = None
        self._num_skipped = 0
        self.means: dict[int, float] = {}
        """Step -> mean score of its weights, of the validations that ended."""

    def begin(self, step: int, *, last: bool = False) -> None:
        """Start to validate the weights of `step` if it is due; returns at once."""
        if step % self._every and not last:
            return
        if self._running is not None:
            self._num_skipped += 1
            return
        self._running = asyncio.create_task(self._run(step), name=f"validate step {step}")

    def take(self) -> dict[str, float]:
        """The figures of a validation that ended since the last call, once."""
        if self._running is None or not self._running.done():
            return {}
        figures, self._running = self._running.result(), None
        if "val/mean" in figures:
            self.means[int(figures["val/step"])] = figures["val/mean"]
        return figures | {"val/skipped": float(self._num_skipped)}

    async def finish(self) -> dict[str, float]:
        """Wait for the one under way and take its figures; none if it is cancelled meanwhile."""
        if self._running is not None:
            await asyncio.wait({self._running})
        return self.take()

    def cancel(self) -> None:
        """Give up the one under way."""
        if self._running is not None:
            self._running.cancel()
            self._running = None

    async def _run(self, step: int) -> dict[str, float]:
        began = time.monotonic()
        tasks = await asyncio.to_thread(self._read_tasks)
        found = await play(self._ledger, tasks, samples=self._samples, fewest=self._samples)
        times = {"val/step": float(step), "val/seconds": time.monotonic() - began}
        return figures_of(found, num_tasks=len(tasks)) | times


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


async def play(ledger: Ledger, tasks: Sequence[Task], *, samples: int, fewest: int) -> list[Validated]:
    """Open `samples` episodes of each task, greedy ones if there is one of each, and wait until all have ended; what they scored.

    A task is left out when fewer than `fewest` of its episodes have a score."""
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()

    def wake(_: LedgerEvent) -> None:
        with suppress(RuntimeError):  # the loop has ended, and this wait with it
            loop.call_soon_threadsafe(woken.set)

    named = [replace(task, task_id=PREFIX + task.task_id) for task in tasks]
    unwatch = ledger.watch(wake)
    try:
        opened = ledger.open_validation(named, group_size=samples, greedy=samples == 1, min_size=fewest)
        group_ids = await asyncio.wrap_future(opened)
        while ledger.counts()["groups/validating"] > 0:
            woken.clear()
            if ledger.counts()["groups/validating"] > 0:
                await woken.wait()
    finally:
        unwatch()
    return await asyncio.wrap_future(ledger.validated(group_ids))


def figures_of(found: Sequence[Validated], *, num_tasks: int) -> dict[str, float]:
    """Mean score, and mean over tasks of the best of a task's samples (for scores of 0 and 1 that is pass@k)."""
    figures = {"val/tasks": float(len(found)), "val/failed": float(num_tasks - len(found))}
    if not found:
        return figures
    by_source = means_by_source(found)
    if len(by_source) > 1:
        figures |= {f"val/mean/{source}": fmean(means) for source, means in by_source.items()}
    return figures | {
        "val/mean": fmean(mean for means in by_source.values() for mean in means),
        "val/best": fmean(max(one.scores) for one in found),
    }
