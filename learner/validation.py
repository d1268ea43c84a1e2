"""Validation: tasks of their own, played by the same agents in the same environment beside the training; never trained.

Used by `learner.learn_loop`. The ledger opens groups that no batch takes (`buffers.ledger.validation`); agents lease
their episodes like any other, between the training ones. Invariant: at most one validation is under way; one that is
due meanwhile is left out and counted. With one sample for a task it is greedy, with more at the run's temperature.
Episodes that run while the weights change are finished by the newer ones: figures belong to about the step named in them.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from buffers.ledger.ledger import Ledger, LedgerEvent
from buffers.records import Task, Validated

PREFIX = "val/"
"""Prefix of the ids of validation tasks: the same file may be trained on under its own ids."""


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
    by_source = defaultdict(list)
    for one in found:
        by_source[one.data_source].append(sum(one.scores) / len(one.scores))
    if len(by_source) > 1:
        figures |= {f"val/mean/{source}": sum(means) / len(means) for source, means in by_source.items()}
    return figures | {
        "val/mean": sum(sum(one.scores) / len(one.scores) for one in found) / len(found),
        "val/best": sum(max(one.scores) for one in found) / len(found),
    }
