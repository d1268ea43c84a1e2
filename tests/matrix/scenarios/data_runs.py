"""Runs about tasks, scorers, validation, checkpoints and what a run writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.matrix.records import Run
from tests.matrix.scenarios.settings import PROMPTS
from tests.matrix.scenarios.task_files import prompts

MAKE = """
import sys, pyarrow, pyarrow.parquet
folder = sys.argv[1]
def rows(name, number, source):
    return [{"task_id": f"{name}{n}", "data_source": source, "prompt": f"Say {name} {n}.", "reward_model": {"ground_truth": "a"}}
            for n in range(number)]
def write(name, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), f"{folder}/{name}.parquet")
write("many", rows("m", 12, "letters"))
write("few", rows("f", 12, "truth"))
write("validation", rows("v", 2, "letters") + rows("w", 1, "truth"))
says = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "abc abc"}]
write("demonstrations", [{"messages": says} for _ in range(40)])
"""
OTHER_ROPE = {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}}
"""The engine computes another model than the learner."""
MIX: dict[str, Any] = {
    **PROMPTS,
    "run.name": "another-name",
    "run.steps": 4,
    "run.seed": 7,
    "run.reward_optimum": 1.0,
    "run.trackers": ["tensorboard"],
    "run.checkpoints.every": 1,
    "run.checkpoints.keep": 2,
    "data.tasks": {"{files}/many.parquet": 3, "{files}/few.parquet": 1},
    "data.make": ["{python}", "{files}/make.py", "{files}"],
    "data.scorer": {"letters": "tests.support.scoring.early_letters", "default": "contains"},
    "data.validation.tasks": "{files}/validation.parquet",
    "data.validation.every": 2,
    "data.validation.samples": 3,
    "sft.demonstrations": "{files}/demonstrations.parquet",
    "sft.steps": 5,
    "sft.lr": 3e-3,
}


JUDGED: dict[str, Any] = {
    "data.scorer": "judge",
    "data.judge.truth": "tests.support.scoring.early_letters",
    "roles": {"player": {}, "judge": {"frozen": 0}},
    "rollout.max_model_len": 3072,
}
"""The policy judges itself."""


def data_runs() -> list[Run]:
    """See each."""
    return [
        Run(name="mix", settings=MIX, files=_make),
        Run(
            name="made-demonstrations",
            settings={
                **PROMPTS, "run.steps": 1, "data.tasks": "{files}/tasks.parquet",
                "data.make": ["{python}", "{files}/make.py", "{files}"],
                "sft.demonstrations": "{files}/demonstrations.parquet", "sft.steps": 2,
            },
            files=_tasks_and_make,
        ),
        Run(name="no-such-node", settings={**PROMPTS, "buffer.node": "nowhere"}, files=prompts, code=1),
        Run(
            name="batch",
            settings={
                **PROMPTS, "data.reward_manager": "batch", "data.scorer": "tests.support.scoring.early_letters_of_all",
                "rollout.temperature": 0.5, "rollout.max_tokens": 5, "buffer.max_policy_lag": 0, "rollout.sleep": True,
                "buffer.groups_per_step": 1, "buffer.group_size": 3, "rollout.kv_cache_gb": None,
            },
            files=_some_long,
            environment={"VLLM_LOGGING_LEVEL": "INFO"},
        ),
        Run(
            name="replayed",
            settings={
                **PROMPTS, "run.steps": 6, "buffer.groups_per_step": 4, "buffer.max_policy_lag": 0, "buffer.replay.share": 0.75,
                "buffer.replay.oldest": 2, "buffer.replay.only": "solved", "buffer.replay.times": 3,
            },
            files=prompts,
        ),
        Run(
            name="mapped",
            settings={
                **PROMPTS, "data.scorer": "tests.support.scoring.two_judges", "learner.advantage": "gdpo",
                "learner.critic": "none", "data.sampler": "thompson",
            },
            files=prompts,
        ),
        Run(
            name="model-judge",
            settings={
                **PROMPTS, **JUDGED, "data.judge.rubric": "{files}/rubric.txt", "data.judge.max_tokens": 300,
            },
            files=_rubric,
        ),
        Run(name="ranked", settings={**PROMPTS, **JUDGED, "data.judge.mode": "ranking"}, files=prompts),
        Run(
            name="dapo",
            settings={
                **PROMPTS, "data.reward_manager": "dapo", "data.sampler": "pass_rate", "rollout.max_tokens": 6, "run.steps": 3,
                "buffer.group_size": 2, "buffer.groups_per_step": 4,
                "model.path": "{files}/model", "rollout.engine_args": {"enable_prefix_caching": False},
            },
            files=_own_model,
            environment={"VLLM_LOGGING_LEVEL": "INFO"},
        ),
        Run(
            name="drifts",
            settings={
                **PROMPTS,
                "rollout.engine_args": OTHER_ROPE, "learner.max_mean_logprob_diff": 9.0,
            },
            files=prompts,
        ),
        Run(name="disagrees", settings={**PROMPTS, "rollout.engine_args": OTHER_ROPE}, files=prompts, code=1),
    ]  # fmt: skip


def _make(folder: Path) -> None:
    (folder / "make.py").write_text(MAKE)


def _tasks_and_make(folder: Path) -> None:
    _make(folder)
    prompts(folder)


def _rubric(folder: Path) -> None:
    (folder / "rubric.txt").write_text("Is it good? {task} -> {answer}")
    prompts(folder)


def _own_model(folder: Path) -> None:
    from configs.tiny_model import make_tiny_model

    make_tiny_model(folder / "model", layers=1, seed=3)
    prompts(folder)


def _some_long(folder: Path) -> None:
    """Every fourth prompt is longer than `rollout.max_model_len`."""
    from buffers.tasks.parquet import write_tasks
    from tests.matrix.scenarios.task_files import task

    long = [{"role": "user", "content": "word " * 600}]
    tasks = [task(number, **({"prompt": long} if number % 4 == 3 else {})) for number in range(24)]
    write_tasks(folder / "tasks.parquet", tasks)
