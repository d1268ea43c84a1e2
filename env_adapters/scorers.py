"""Score functions for plain prompts, by the name that `data.scorer` gives. Nothing else can be named there.

A scorer is a pure function (task, the model's answer) -> score; it never sees another task.
"""

from __future__ import annotations

from collections.abc import Callable

from buffers.records import Task


def exact_match(task: Task, answer: str) -> float:
    """1 when the answer, without surrounding white space, is the ground truth."""
    return float(answer.strip() == str(task.ground_truth).strip())


def contains(task: Task, answer: str) -> float:
    """1 when the ground truth appears in the answer."""
    return float(str(task.ground_truth) in answer)


SCORERS: dict[str, Callable[[Task, str], float]] = {"exact_match": exact_match, "contains": contains}
