"""Score functions for plain prompts and programs, by the names that `data.scorer` may give: these, `module.function`, a URL.

What may be called is what the configuration names, and nothing else: a task's row only picks among those by its `data_source`. A
scorer is a pure function (task, the model's answer) -> score; it never sees another task. Of a program that ended without a score
(`agents.processes: 0`) the answer is a `ProgramOutput`. `env_adapters.scoring.rewards` calls them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from buffers.records import Task
from buffers.tasks import reasoning_gym_tasks
from env_adapters.guarded_calls import CaughtException

ANSWER_CHARS = 300
"""GSM8K: the answer is looked for in the end of the text only."""
_NUMBER = r"-?[0-9.,]+"


class ProgramOutput(str):
    """Standard output of a program (the end of it, when it is long), and its exit code."""

    __slots__ = ("exit_code",)
    exit_code: int
    """Negative: the signal that ended it."""

    def __new__(cls, text: str, *, exit_code: int) -> ProgramOutput:
        output = super().__new__(cls, text)
        output.exit_code = exit_code
        return output


def exit_code(task: Task, answer: str) -> float:
    """1 when the program ended with code 0."""
    if not isinstance(answer, ProgramOutput):
        raise TypeError("scorer exit_code judges programs (agents.processes=0), got an answer without one")
    return float(answer.exit_code == 0)


def json_line(task: Task, answer: str) -> float:
    """The `score` of the last line that is a JSON object with a finite one."""
    for line in reversed(answer.splitlines()):
        score = _score_in(line) if line.lstrip().startswith("{") else None
        if score is not None:
            return score
    raise ValueError(f'a line of the output must be {{"score": number}}, got {answer[-60:]!r} at its end; print one')


def _score_in(line: str) -> float | None:
    try:
        score = json.loads(line).get("score")
    except (ValueError, RecursionError):
        return None
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    return float(score) if is_number and math.isfinite(score) else None


def exact_match(task: Task, answer: str) -> float:
    """1 when the answer, without surrounding white space, is the ground truth."""
    return float(answer.strip() == truth_of(task).strip())


def contains(task: Task, answer: str) -> float:
    """1 when the ground truth appears in the answer."""
    return float(truth_of(task) in answer)


def gsm8k_strict(task: Task, answer: str) -> float:
    """1 when the last `#### number` of the answer is the ground truth, letter for letter but for commas (18.0 is not 18)."""
    truth, numbers = _truth(task), re.findall(rf"#### ({_NUMBER})", answer[-ANSWER_CHARS:])
    return float(bool(numbers) and numbers[-1].replace(",", "") == truth)


def gsm8k_flexible(task: Task, answer: str) -> float:
    """1 when the last number of the answer, whatever stands around it, is the ground truth."""
    truth, found = _truth(task), [text.strip(".,") for text in re.findall(_NUMBER, answer[-ANSWER_CHARS:])]
    numbers = [text.replace(",", "") for text in found if text not in ("", "-")]
    return float(bool(numbers) and numbers[-1] == truth)


def reasoning_gym(task: Task, answer: str) -> float:
    """Reasoning Gym's own score of the answer to a task of `reasoning_gym://`, 0 to 1; 0 where its program fails on what a model
    wrote."""
    entry = {name: task.extra_info[name] for name in ("settings", "index")}
    with CaughtException(in_thread=True):
        return reasoning_gym_tasks.score(task.data_source, **entry, answer=answer)
    return 0.0


def _truth(task: Task) -> str:
    """The number; of a worked solution, as GSM8K's column `answer` has it, what stands after the last `####`."""
    return truth_of(task).rpartition("####")[2].strip().replace(",", "")


def truth_of(task: Task) -> str:
    """The text that answers are compared with. Raises ValueError where there is none: the text of None or of a list is nobody's
    answer, and an empty one is in all."""
    if not isinstance(task.ground_truth, str | int | float) or task.ground_truth == "":
        raise ValueError(f"ground_truth must be a text or a number, got {task.ground_truth!r:.120}")
    return str(task.ground_truth)


SCORERS: dict[str, Callable[[Task, str], float]] = {
    "exact_match": exact_match,
    "contains": contains,
    "gsm8k_strict": gsm8k_strict,
    "gsm8k_flexible": gsm8k_flexible,
    "exit_code": exit_code,
    "json_line": json_line,
    "reasoning_gym": reasoning_gym,
}
COMPARE = {"exact_match", "contains", "gsm8k_strict", "gsm8k_flexible"}
"""They compare the answer with the task's ground truth."""
SEE_EXIT_CODE = {"exit_code", "json_line"}
"""They (and URLs) judge a program however it ended; the others judge what one printed that ended with code 0."""
