"""Runs that use every value of the learner's enumerated keys: each takes the next value of each of them, so that a new value of the
schema is in a run without being named here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from configs.schema import LearnerConfig
from configs.tiny_model import make_tiny_model
from tests.matrix.inventory import NULL, annotations, values_of
from tests.matrix.records import Run
from tests.matrix.scenarios.settings import PROMPTS, SMALL
from tests.matrix.scenarios.task_files import of_many_lengths, prompts

PACKED = ("learner.advantage", "learner.loss", "learner.loss_agg", "learner.correction", "learner.kl.kind")
"""Enumerated keys whose values are in a run and have a row without being named; those of the first name the runs."""
RECIPE = "learner.recipe"
OF_RECIPES = {"learner.advantage", "learner.critic", "learner.kl.coef"}
LEARNER: dict[str, Any] = {
    **PROMPTS,
    "run.steps": 3,
    "learner.lr": 4e-3,
    "learner.lr_warmup_steps": 1,
    "learner.kl.coef": 0.05,
    "buffer.max_policy_lag": 2,
    "rollout.max_model_len": 22,
}
# Prompts of 13 to 20 tokens leave answers of 2 to 8 tokens: rows of different lengths.
ALSO: dict[str, dict[str, Any]] = {
    "gae": {
        "learner.critic": "shared", "learner.lam": 0.8, "learner.clip.low": 0.02, "learner.clip.high": 0.01,
        "learner.epochs": 2, "run.steps": 6,
    },
    "grpo": {"learner.entropy_coef": 0.05, "learner.epochs": 2, "learner.minibatches": 3},
    "dr_grpo": {"learner.lora.rank": 4, "learner.lora.alpha": 32.0, "learner.lr": 2e-2},
    "rloo": {"learner.gradient_checkpointing": True, "learner.token_budget": 64, "learner.grad_clip": 0.02},
    "remax": {"learner.prefix_tree": False, "learner.correction_bounds.low": 0.9, "learner.correction_bounds.high": 1.1},
    "reinforce_plus_plus": {
        "learner.kl.in_reward": True, "learner.kl.target": 0.001, "learner.kl.horizon": 40.0,
        "learner.check_logprobs": 0.3, "learner.keep_on": "host", "learner.offload": True,
    },
    "reinforce_plus_plus_baseline": {"learner.cov.share": 0.3, "learner.cov.low": 0.0},
    "opo": {"learner.check_logprobs": False, "model.dtype": "bfloat16", "learner.cov.share": 0.3},
    "gpg": {
        "learner.clip.low": 1e-4, "learner.clip.high": 1e-4,
        "learner.clip.ratio_max": 1.01, "learner.adaptive_entropy.target": 10.0, "learner.adaptive_entropy.step": 0.02,
        "learner.adaptive_entropy.most": 0.03,
    },
    "gdpo": {
        "learner.lr": 3e-3, "run.steps": 8, "learner.rejection.kind": "geo_mean", "learner.rejection.low": 0.99998,
        "learner.rejection.high": 1.00002,
    },
    "grpo_passk": {"learner.rejection.kind": "k3_mean"},
    "otb": {"learner.rejection.kind": "stale_negatives", "learner.ranks": 2},
    "none": {"learner.teacher.path": "{files}/teacher", "learner.teacher.coef": 2.0},
}  # fmt: skip
"""Advantage -> what its run sets besides."""
HINTS: dict[str, Any] = {
    **{key: value for key, value in LEARNER.items() if key not in OF_RECIPES}, 
    "learner.advantage": "grpo", "learner.critic": "none", "learner.hints.coef": 0.5, "learner.rejection.kind": "geo_mean",
}  # fmt: skip
"""Hints beside GRPO."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A run's name, and its values of the packed keys."""

    name: str
    values: Mapping[str, Any]
    settings: Mapping[str, Any]


def learner_name(advantage: str) -> str:
    """The name of the run with this advantage."""
    return f"learn-{advantage}"


@cache
def packed() -> tuple[Packed, ...]:
    """One run for each advantage, which takes the next value of each other key that it may have beside the rest; then as many as
    there are values left."""
    first, *others = PACKED
    left = {key: values_of(annotations()[key]) for key in PACKED}
    found: list[Packed] = []
    while any(left.values()):
        more = next((key for key in others if left[key]), "")
        advantage = left[first][0] if left[first] else "grpo"
        name = learner_name(advantage) if left[first] else f"learn-{more.split('.', 1)[1]}-{left[more][0]}"
        chosen = {first: advantage, **{key: (left[key] or values_of(annotations()[key]))[0] for key in others}}
        extras = ALSO.get(advantage, {}) if left[first] else {}
        settings = without_refused({**LEARNER, **{key: setting(value) for key, value in chosen.items()}, **extras})
        values = {key: value for key, value in chosen.items() if key in settings}
        if not left[first] and more not in values:
            raise ValueError(
                f"{more}={left[more][0]} must be usable beside {first}={advantage}; give it a run of its own"
            )
        found.append(Packed(name, values, settings))
        for key, value in values.items():
            left[key] = [other for other in left[key] if other != value]
    return tuple(found)


def setting(value: Any) -> Any:
    """The value that is set: `null` stands for none."""
    return None if value == NULL else value


def without_refused(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys of the learner that would have no effect beside the others, and are refused for that."""
    kept = dict(settings)
    while True:
        try:
            LearnerConfig(**learner_section(kept))
        except ValidationError as error:
            unused = re.search(r"learner\.([\w.]+) has an effect", str(error))
            if unused is None or kept.pop(f"learner.{unused[1]}", NULL) == NULL:
                raise
        else:
            return kept


def learner_section(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The section `learner` of settings by dotted names, as nested mappings."""
    section: dict[str, Any] = {}
    for key, value in settings.items():
        first, *parts = key.split(".")
        if first == "learner":
            place = section
            for part in parts[:-1]:
                place = place.setdefault(part, {})
            place[parts[-1]] = value
    return section


def learner_runs() -> list[Run]:
    """The packed ones, and one with several rounds and a separate critic."""
    runs = [
        Run(
            name=one.name,
            settings=one.settings,
            files=_with_teacher
            if "learner.teacher.path" in one.settings
            else of_many_lengths(extra_info={"hint": "Say abc."}),
        )
        for one in packed()
    ]
    cut = {
        **LEARNER, "learner.mask_truncated": True, "rollout.max_tokens": 96,
        "rollout.max_model_len": 256,
    }  # fmt: skip
    return [
        *runs,
        *recipe_runs(),
        Run(name="hints", settings=HINTS, files=of_many_lengths(extra_info={"hint": "Say abc."})),
        Run(name="rounds", settings=ROUNDS, files=_letters),
        Run(name="truncated", settings=cut, files=of_many_lengths()),
    ]


def _with_teacher(folder: Path) -> None:
    """The tasks, and another model of the policy's family."""
    make_tiny_model(folder / "teacher", seed=7)
    of_many_lengths()(folder)


def recipes() -> list[str]:
    """The values of `learner.recipe`, where the schema has it."""
    return [value for value in values_of(annotations().get(RECIPE)) if value != NULL]


def recipe_runs() -> list[Run]:
    """One for each recipe, which says all of the algorithm."""
    own = {key: value for key, value in LEARNER.items() if key not in OF_RECIPES}
    return [
        Run(
            name=f"recipe-{name}",
            settings={**own, RECIPE: name},
            files=of_many_lengths(extra_info={"hint": "Say abc."}),
        )
        for name in recipes()
    ]


ROUNDS: dict[str, Any] = {
    **SMALL,
    "run.steps": 5,
    "data.tasks": "{files}/tasks.parquet",
    "agents.loops": "{files}/loops.yaml",
    "learner.critic": "separate",
    "learner.critic_lr": 2e-3,
    "learner.lr": 2e-3,
    "learner.lr_warmup_steps": 0,
    "learner.gamma": 0.5,
    "learner.calibrate_values": False,
    "learner.echo.user": 0.2,
    "learner.hints.coef": 0.3,
    "learner.hints.sources": ["said"],
}
"""Two rounds in each episode, with values from a second model; what the environment said between them is foreseen, and a hint."""


def _letters(folder: Path) -> None:
    write_loops(folder, {"name": "env_agent", "env": "tests.matrix.letters.env.Letters"})
    prompts(folder)


def write_loops(folder: Path, *entries: dict[str, Any]) -> None:
    """`loops.yaml` with these entries."""
    (folder / "loops.yaml").write_text(yaml.safe_dump(list(entries)))
