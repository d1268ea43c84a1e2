"""All runs of the matrix, and those that a model of somebody else's can play."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
    return [
        deaths_run(), fleet_run(), plain_run(), *data_runs(), *program_runs(), *harbor_runs(), *loop_runs(), *learner_runs(),
        *refusal_runs(),
    ]  # fmt: skip


def plain_run() -> Run:
    """Plain prompts with the defaults of most keys."""
    return Run(name="prompts", settings={**PROMPTS, "run.steps": 3}, files=prompts)


OF_THE_TINY_MODEL = ("learner.lr", "learner.critic_lr", "rollout.kv_cache_gb")
"""Keys whose values in the runs are for a random model; with another one the run chooses them."""
LONGER = 20
"""Tokens that SmolLM2's template adds to a prompt, its own system prompt above all."""


def runs_with(model: Path) -> list[Run]:
    """The learner's runs and the plain one with a pretrained model in the place of the tiny one."""
    runs = []
    for run in (plain_run(), *learner_runs()):
        settings = {key: value for key, value in run.settings.items() if key not in OF_THE_TINY_MODEL}
        settings |= {
            "model.path": str(model),
            "rollout.max_model_len": settings["rollout.max_model_len"] + LONGER,
        }
        if "learner.teacher.path" in settings:
            settings["learner.teacher.path"] = str(model)
        runs.append(replace(run, settings=settings))
    return runs
