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
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from math import comb
from statistics import fmean
from typing import Any

import numpy as np
from rich.table import Table

from buffers.ledger.ledger import Ledger, LedgerEvent
from buffers.records import Task, Validated
from buffers.tasks.task_pool import TaskPool
from learner.reporting.display import Display

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
        return validation_figures(found, num_tasks=len(tasks)) | times


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """What an evaluation plays."""

    limit: int | None = None
    """Number of tasks, the first of the file. None: all."""


@dataclass(eq=False)
class Evaluation:
    """The main loop of an evaluation, as `LearnLoop` is that of a run. `read_tasks` reads the task file."""

    ledger: Ledger
    _: KW_ONLY
    pool: TaskPool
    read_tasks: Callable[[], Sequence[Task]]
    samples: int
    display: Display

    def __post_init__(self) -> None:
        self.num_tasks = 0
        self.found: list[Validated] = []
        """The tasks with a score, once `run` has returned."""

    async def run(self) -> None:
        """Play every task; returns when all episodes have ended."""
        tasks = await asyncio.to_thread(self.read_tasks)
        self.num_tasks = len(tasks)
        self.pool.unpause()
        reporting = asyncio.create_task(self._report(), name="report")
        try:
            self.found = await play(self.ledger, tasks, samples=self.samples, fewest=1)
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
            counts = self.ledger.counts()
            self.display.played(
                scored=counts["episodes/scored"],
                of=self.num_tasks * self.samples,
                running=int(self.pool.metrics()["pool/running"]),
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


def validation_figures(found: Sequence[Validated], *, num_tasks: int) -> dict[str, float]:
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


# The figures of an evaluation: mean score, best of k samples, 95 % intervals, failures by reason; as a table and as JSON. Pure
# functions of what each task scored. Invariant: an episode without a score is never counted as one of 0; where there are any, a
# row of its own says what the mean would be if it were.

RESAMPLES = 10_000
"""Draws of the tasks, with replacement, for an interval."""


def evaluation_figures(
    found: Sequence[Validated], *, num_tasks: int, samples: int, failures: Mapping[str, int]
) -> dict[str, Any]:
    """What goes to evaluation.json. `found`: the tasks with a score; `failures`: attempts that failed, by reason."""
    lost = sum(one.num_failed for one in found) + samples * (num_tasks - len(found))
    return {
        "tasks": num_tasks,
        "tasks_without_score": num_tasks - len(found),
        "samples": samples,
        "episodes_scored": sum(len(one.scores) for one in found),
        "episodes_failed": lost,
        "failed_attempts": dict(failures),
        "mean": with_interval([fmean(one.scores) for one in found]),
        "mean_failed_as_0": with_interval(
            [sum(one.scores) / samples for one in found] + [0.0] * (num_tasks - len(found))
        ),
        "best_of": {
            str(k): with_interval([best_of_k(one.scores, k) for one in found if len(one.scores) >= k])
            for k in best_ks(samples)
        },
        "by_source": {source: with_interval(means) for source, means in means_by_source(found).items()},
        "binary": all(score in (0.0, 1.0) for each in found for score in each.scores),
    }


def with_interval(values: Sequence[float]) -> dict[str, float | int | None]:
    """Mean over tasks, and the 2.5th and 97.5th percentile of the means of tasks that were drawn again (bootstrap). Of fewer than
    two tasks there is no interval, of none no mean."""
    if len(values) < 2:
        return {"value": values[0] if values else None, "low": None, "high": None, "tasks": len(values)}
    drawn = np.random.default_rng(0).choice(np.asarray(values), size=(RESAMPLES, len(values))).mean(axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {"value": fmean(values), "low": float(low), "high": float(high), "tasks": len(values)}


def best_ks(samples: int) -> list[int]:
    """1, 2, 4, ... and the number of samples itself; nothing for one sample."""
    return (
        sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples})
        if samples > 1
        else []
    )


def best_of_k(scores: Sequence[float], k: int) -> float:
    """The expected best of `k` of these `n` scores, without bias: the mean over all subsets of k.

    The i-th smallest is the best of C(i-1, k-1) of the C(n, k) subsets. For scores of 0 and 1 it is pass@k of Chen et al. 2021
    (arXiv:2107.03374, equation 1). `k <= n`.
    """
    ordered = sorted(scores)
    return sum(score * comb(rank, k - 1) for rank, score in enumerate(ordered)) / comb(len(ordered), k)


def table(figures: Mapping[str, Any]) -> Table:
    """A row for each figure: value and 95 % interval."""
    shown = Table(title="evaluation", title_justify="left")
    shown.add_column("", style="bold")
    shown.add_column("value", justify="right")
    shown.add_column("95 % interval", justify="right")
    shown.add_column("tasks", justify="right")
    name = "pass" if figures["binary"] else "best"
    rows = {"mean score": figures["mean"]}
    if figures["episodes_failed"]:
        rows["mean, failed episodes as 0"] = figures["mean_failed_as_0"]
    rows |= {f"{name}@{k}": each for k, each in figures["best_of"].items()}
    if len(figures["by_source"]) > 1:
        rows |= {f"mean of {source}": each for source, each in figures["by_source"].items()}
    for label, each in rows.items():
        low_high = "-" if each["low"] is None else f"{each['low']:.3f} to {each['high']:.3f}"
        shown.add_row(label, "-" if each["value"] is None else f"{each['value']:.3f}", low_high, f"{each['tasks']:,}")
    return shown


def failures_in_words(figures: Mapping[str, Any]) -> list[str]:
    """A line on episodes without a score, and one for each reason, the most frequent first."""
    if not figures["failed_attempts"] and not figures["episodes_failed"]:
        return []
    lines = [
        f"episodes without a score: {figures['episodes_failed']:,} of "
        f"{figures['tasks'] * figures['samples']:,}; attempts that failed, by reason:"
    ]
    ordered = sorted(figures["failed_attempts"].items(), key=lambda item: -item[1])
    return lines + [f"  {number:>6,}  {reason}" for reason, number in ordered]


def means_by_source(found: Sequence[Validated]) -> dict[str, list[float]]:
    """Mean score of each task, by its source."""
    by_source = defaultdict(list)
    for one in found:
        by_source[one.data_source].append(fmean(one.scores))
    return by_source
