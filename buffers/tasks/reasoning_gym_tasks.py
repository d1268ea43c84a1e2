"""Reasoning Gym (PyPI's reasoning-gym) by name: `data.tasks: reasoning_gym://chain_sum?min_digits=2&size=400`, and its own
scores as `data.scorer: reasoning_gym`.

Called by `learner.startup.hub` for tasks and by `env_adapters.scoring.scorers` for scores; as a program, in any environment that
has the package, it prints tasks as lines of JSON. Invariants: the same address gives the same tasks; nothing of ours is imported,
and the package only when it is used.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qsl

SCHEME = "reasoning_gym://"
PACKAGE = "reasoning-gym"
OWN = ("level", "system")
"""Settings that are not the generator's: the level of its curriculum, and one of Reasoning Gym's system prompts by name."""
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
REMEDY = "pip install reasoning-gym"


def is_installed() -> bool:
    """Whether this environment has the package."""
    return find_spec("reasoning_gym") is not None


def task_rows(address: str) -> Iterator[dict[str, Any]]:
    """What `Task` has of each task: {task_id, prompt, ground_truth, data_source, extra_info}. Raises ValueError for an address
    that Reasoning Gym has no tasks for."""
    if not is_installed():
        raise ValueError(f"{address} needs the package reasoning-gym, got none; {REMEDY}")
    from reasoning_gym.factory import CURRICULA, DATASETS
    from reasoning_gym.utils import SYSTEM_PROMPTS

    name, _, query = address.removeprefix(SCHEME).partition("?")
    given = {key: _value(text) for key, text in parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)}
    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=3) or ["chain_sum", "gsm_symbolic", "countdown"]
        raise ValueError(
            f"{address} must name one of Reasoning Gym's {len(DATASETS)} generators, got {name!r}; {', '.join(near)} are some"
        )
    _, settings = DATASETS[name]
    system = given.pop("system", None)
    if system is not None and system not in SYSTEM_PROMPTS:
        raise ValueError(
            f"system of {address} must be one of {', '.join(SYSTEM_PROMPTS)}, got {system!r}; leave it out for none"
        )
    if (level := given.pop("level", None)) is not None:
        given = _of_level(CURRICULA, name, level, address=address) | given
    known = settings.__dataclass_fields__
    if unknown := sorted(given.keys() - known.keys()):
        raise ValueError(f"{address} must set what {name} has, got {unknown[0]}; it has {', '.join([*known, *OWN])}")
    given = {"seed": 0, **given}
    try:
        with redirect_stdout(sys.stderr):  # some generators print dots
            entries = list(_dataset(name, json.dumps(given)))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"{address} must have settings that {name} takes, got {given}: {error or 'its check of them failed'}"
        ) from None
    before = [{"role": "system", "content": SYSTEM_PROMPTS[system]}] if system else []
    for index, entry in enumerate(entries):
        yield {
            "task_id": f"{name}:{index}",
            "prompt": [*before, {"role": "user", "content": entry["question"]}],
            "ground_truth": entry["answer"],
            "data_source": f"{SCHEME}{name}",
            "extra_info": {"settings": json.dumps(given), "index": index},
        }


def _of_level(curricula: dict[str, Any], name: str, level: object, *, address: str) -> dict[str, Any]:
    """The settings of a level of the generator's curriculum."""
    if name not in curricula or not isinstance(level, int) or level < 0:
        has = "a whole number from 0 on" if name in curricula else f"left out, as {name} has no curriculum"
        raise ValueError(f"level of {address} must be {has}, got {level!r}")
    curriculum = curricula[name]()
    curriculum.set_global_level(level)
    return dict(vars(curriculum.generate_configuration()))


def _value(text: str) -> Any:
    """A number, truth value or list where the text is one in JSON; else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def score(data_source: str, *, settings: str, index: int, answer: str) -> float:
    """Reasoning Gym's score of an answer, 0 to 1, part credit included: of what stands between the last <answer> and </answer>,
    or of all of it. `settings`, `index`: those of the task's `extra_info`. Raises what its scorer raises, on a text that its
    author did not think of."""
    found = ANSWER.findall(answer)
    dataset = _dataset(data_source.removeprefix(SCHEME), settings)
    return float(dataset.score_answer((found[-1] if found else answer).strip(), _entry(dataset, index)))


@cache
def _dataset(name: str, settings: str) -> Any:
    from reasoning_gym.factory import DATASETS

    generator, kind = DATASETS[name]
    config = kind(**json.loads(settings))
    if hasattr(config, "validate"):
        config.validate()
    return generator(config=config)


@lru_cache(maxsize=4096)
def _entry(dataset: Any, index: int) -> Any:
    return dataset[index]


if __name__ == "__main__":
    for row in task_rows(sys.argv[1]):
        print(json.dumps(row))
