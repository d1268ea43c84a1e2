"""Runs that use every value of the learner's enumerated keys: each takes the next value of each of them, so that a new value of the
schema is in a run without being named here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.matrix.inventory import annotations, values_of
from tests.matrix.records import Run
from tests.matrix.scenarios.settings import PROMPTS, SMALL
from tests.matrix.scenarios.task_files import prompts, with_columns

PACKED = ("learner.advantage", "learner.loss", "learner.loss_agg", "learner.correction", "learner.kl.kind")
"""The first one names the run."""
LEARNER: dict[str, Any] = {
    **PROMPTS,
    "run.steps": 3,
    "learner.lr": 4e-3,
    "learner.lr_warmup_steps": 1,
    "learner.kl.coef": 0.05,
    "buffer.max_policy_lag": 2,
}
ALSO: dict[str, dict[str, Any]] = {
    "gae": {"learner.critic": "shared", "learner.lam": 0.8, "learner.clip.low": 0.1, "learner.clip.high": 0.12},
    "grpo": {"learner.entropy_coef": 0.05, "learner.epochs": 2, "learner.minibatches": 3},
    "dr_grpo": {"learner.lora.rank": 4, "learner.lora.alpha": 32.0, "learner.lr": 2e-2},
    "rloo": {"learner.gradient_checkpointing": True, "learner.token_budget": 64, "learner.grad_clip": 0.02},
    "reinforce_plus_plus": {"learner.kl.in_reward": True, "learner.kl.target": 0.001, "learner.kl.horizon": 40.0},
    "reinforce_plus_plus_baseline": {"learner.ranks": 2},
    "opo": {"learner.check_logprobs": False, "model.dtype": "bfloat16"},
}
"""Advantage -> what its run sets besides."""


def learner_name(advantage: str) -> str:
    """The name of the run with this advantage."""
    return f"learn-{advantage}"


def packed() -> list[dict[str, Any]]:
    """The enumerated settings of each run: the i-th value of each key, over and over."""
    values = {key: values_of(annotations()[key]) for key in PACKED}
    return [
        {key: some[number % len(some)] for key, some in values.items()}
        for number in range(max(map(len, values.values())))
    ]


def learner_runs() -> list[Run]:
    """One for each advantage, and one with several rounds and a separate critic."""
    runs = [
        Run(
            name=learner_name(chosen["learner.advantage"]),
            settings={**LEARNER, **chosen, **ALSO.get(chosen["learner.advantage"], {})},
            files=with_columns(extra_info={"hint": "Say abc."}) if chosen["learner.advantage"] == "cpo" else prompts,
        )
        for chosen in packed()
    ]
    return [*runs, Run(name="rounds", settings=ROUNDS, files=_letters)]


ROUNDS: dict[str, Any] = {
    **SMALL,
    "run.steps": 2,
    "data.tasks": "{files}/tasks.parquet",
    "agents.loops": "{files}/loops.yaml",
    "learner.critic": "separate",
    "learner.critic_lr": 2e-3,
    "learner.lr": 2e-3,
    "learner.lr_warmup_steps": 0,
    "learner.gamma": 0.5,
}
"""Two rounds in each episode, with values from a second model."""


def _letters(folder: Path) -> None:
    write_loops(folder, {"name": "env_agent", "env": "tests.support.letters_env.Letters"})
    prompts(folder)


def write_loops(folder: Path, *entries: dict[str, Any]) -> None:
    """`loops.yaml` with these entries."""
    (folder / "loops.yaml").write_text(yaml.safe_dump(list(entries)))
