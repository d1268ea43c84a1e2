"""The figures of an evaluation: mean score, best of k samples, 95 % intervals, failures by reason; as a table and as JSON.

Called by `learner.evaluate`. Pure functions of what each task scored. Invariant: an episode without a score is never counted as one
of 0; where there are any, a row of its own says what the mean would be if it were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import comb
from statistics import fmean
from typing import Any

import numpy as np
from rich.table import Table

from buffers.records import Validated

RESAMPLES = 10_000
"""Draws of the tasks, with replacement, for an interval."""


def figures_of(
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
        "binary": is_binary(found),
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


def is_binary(found: Sequence[Validated]) -> bool:
    """Whether each score is 0 or 1."""
    return all(score in (0.0, 1.0) for one in found for score in one.scores)


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
