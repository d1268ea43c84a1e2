"""Score functions for plain prompts, by the names that `data.scorer` may give: these, `module.function`, or a URL.

What may be called is what the configuration names, and nothing else: a task's row only picks among those by its
`data_source`. A scorer is a pure function (task, the model's answer) -> score; it never sees another task.
`env_adapters.rewards` calls them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from buffers.records import Task

ANSWER_CHARS = 300
"""GSM8K: the answer is looked for in the end of the text only."""
_NUMBER = r"-?[0-9.,]+"


def exact_match(task: Task, answer: str) -> float:
    """1 when the answer, without surrounding white space, is the ground truth."""
    return float(answer.strip() == str(task.ground_truth).strip())


def contains(task: Task, answer: str) -> float:
    """1 when the ground truth appears in the answer."""
    return float(str(task.ground_truth) in answer)


def gsm8k_strict(task: Task, answer: str) -> float:
    """1 when the last `#### number` of the answer is the ground truth, letter for letter but for commas (18.0 is not 18)."""
    found = re.findall(rf"#### ({_NUMBER})", answer[-ANSWER_CHARS:])
    return float(bool(found) and found[-1].replace(",", "") == _truth(task))


def gsm8k_flexible(task: Task, answer: str) -> float:
    """1 when the last number of the answer, whatever stands around it, is the ground truth."""
    found = [text.strip(".,") for text in re.findall(_NUMBER, answer[-ANSWER_CHARS:])]
    numbers = [text.replace(",", "") for text in found if text not in ("", "-")]
    return float(bool(numbers) and numbers[-1] == _truth(task))


def _truth(task: Task) -> str:
    return str(task.ground_truth).strip().replace(",", "")


SCORERS: dict[str, Callable[[Task, str], float]] = {
    "exact_match": exact_match,
    "contains": contains,
    "gsm8k_strict": gsm8k_strict,
    "gsm8k_flexible": gsm8k_flexible,
}
