"""Score functions for whole runs, as a user names them in a configuration: one by which random texts differ, and a broken one."""

from __future__ import annotations

import itertools
from typing import Any

from buffers.records import Task


def early_letters(task: Task, answer: str) -> float:
    """1 when most letters of the answer are of the first half of the alphabet."""
    letters = [letter for letter in answer.lower() if letter.isalpha()]
    return float(sum(letter < "n" for letter in letters) * 2 > len(letters))


LARGE = 999_999_999.0
_BROKEN = itertools.cycle(
    [
        1.0,
        float("nan"),
        0.0,
        float("inf"),
        LARGE,
        "x",
        -LARGE,
        None,
        0.5,
        10**400,
        0.0,
        1e9,
        1.0,
        True,
        -1.0,
        ValueError("no"),
    ]
)


def broken(task: Task, answer: str) -> Any:
    """Every second call is no score; of the others some are as large as a score may be."""
    value = next(_BROKEN)
    if isinstance(value, ValueError):
        raise value
    return value


def none(task: Task, answer: str) -> float:
    """No score for any answer."""
    raise ValueError("this judge has no opinion")


def early_letters_of_all(tasks: list[Task], answers: list[str]) -> list[float]:
    """Scores of a list of answers, as `data.reward_manager=batch` asks for them."""
    if not isinstance(answers, list) or len(tasks) != len(answers):
        raise TypeError(f"needs a list of tasks and one of answers, got {type(answers).__name__}")
    return [early_letters(task, answer) for task, answer in zip(tasks, answers, strict=True)]


def two_judges(task: Task, answer: str) -> dict[str, Any]:
    """Early letters and brevity, judged apart, and what would have helped."""
    return {"letters": early_letters(task, answer), "brief": 10.0 / (1 + len(answer)), "hint": "Say abc."}


def by_task(task: Task, answer: str) -> float:
    """0, 1/4, ... or 1, by the digits of the task's id: whatever is sampled, two runs score alike."""
    return sum(map(int, filter(str.isdigit, task.task_id))) % 5 / 4
