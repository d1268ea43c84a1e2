"""All runs of the matrix."""

from __future__ import annotations

from tests.matrix.records import Run
from tests.matrix.scenarios.data_runs import data_runs
from tests.matrix.scenarios.deaths import deaths_run, fleet_run
from tests.matrix.scenarios.harbor_runs import harbor_runs
from tests.matrix.scenarios.learner_runs import learner_runs
from tests.matrix.scenarios.loop_runs import loop_runs
from tests.matrix.scenarios.program_runs import program_runs
from tests.matrix.scenarios.refusals import refusal_runs
from tests.matrix.scenarios.settings import PROMPTS
from tests.matrix.scenarios.task_files import prompts


def all_runs() -> list[Run]:
    """In the order in which they are started: the long ones first."""
    plain = Run(name="prompts", settings={**PROMPTS, "run.steps": 3}, files=prompts)
    return [
        deaths_run(), fleet_run(), plain, *data_runs(), *program_runs(), *harbor_runs(), *loop_runs(), *learner_runs(),
        *refusal_runs(),
    ]  # fmt: skip
