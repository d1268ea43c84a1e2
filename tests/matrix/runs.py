"""All runs of the matrix."""

from __future__ import annotations

from tests.matrix.records import Run
from tests.matrix.scenarios.learner_runs import learner_runs
from tests.matrix.scenarios.program_runs import program_runs
from tests.matrix.scenarios.settings import PROMPTS
from tests.matrix.scenarios.task_files import prompts


def all_runs() -> list[Run]:
    """In the order in which they are started."""
    return [Run(name="prompts", settings={**PROMPTS, "run.steps": 3}, files=prompts), *learner_runs(), *program_runs()]
