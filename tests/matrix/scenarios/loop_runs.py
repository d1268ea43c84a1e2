"""Runs whose tasks are played by agent loops."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from buffers.records import Task
from env_adapters.walk.game import walk_tasks
from tests.matrix.records import Live, Run
from tests.matrix.scenarios.learner_runs import write_loops
from tests.matrix.scenarios.settings import SMALL
from tests.matrix.scenarios.task_files import prompts, task, written

LOOPS: dict[str, Any] = {
    **SMALL,
    "data.tasks": "{files}/tasks.parquet",
    "agents.loops": "{files}/loops.yaml",
    "learner.advantage": "grpo",
    "learner.critic": "none",
}
SMALL_CACHE: dict[str, Any] = {
    **LOOPS, "rollout.kv_cache_gb": 0.001, "rollout.max_tokens": 96, "rollout.max_model_len": 512,
}  # fmt: skip
"""A cache in which 16 episodes find no room."""
AUTO: dict[str, Any] = {
    **SMALL_CACHE, "agents.concurrency": "auto", "buffer.groups_per_step": 4, "run.steps": 5,
}  # fmt: skip
"""At most 32 episodes at once: the policy lag lets no more start."""
LETTERS = {"name": "env_agent", "env": "tests.matrix.letters.env.Letters"}
POSTED = 4
"""Tasks that are added while a run goes on."""


def loop_runs() -> list[Run]:
    """See each."""
    return [
        Run(
            name="loops",
            settings={**LOOPS, "agents.processes": 2, "rollout.max_model_len": 1024, "buffer.groups_per_step": 6},
            files=_every_loop,
        ),
        Run(
            name="small-cache",
            settings=SMALL_CACHE,
            files=_walk,
        ),
        Run(name="auto-small", settings={**AUTO, "rollout.kv_cache_gb": 0.003}, files=_walk),
        Run(
            name="auto-large",
            settings={**AUTO, "rollout.kv_cache_gb": 0.02, "rollout.max_model_len": 2048},
            files=_walk,
        ),
        Run(name="aged", settings={**LOOPS, "run.steps": 8, "agents.concurrency": 32}, files=_slow_and_fast),
        Run(
            name="step-rewards",
            settings={**LOOPS, "learner.advantage": "gae", "learner.critic": "shared"},
            files=_step_rewards,
        ),
        Run(name="trajectories", settings=LOOPS, files=_trajectories),
        Run(name="players", settings={**LOOPS, "roles": {"first": {}, "second": {}}}, files=_duel),
        Run(name="players-alone", settings=LOOPS, files=partial(_duel, roles=())),
        Run(name="posted", settings={**LOOPS, "run.steps": 12}, files=_letters, meanwhile=post_tasks),
    ]


def _letters(folder: Path) -> None:
    write_loops(folder, LETTERS)
    prompts(folder)


def _walk(folder: Path) -> None:
    write_loops(folder, {"name": "env_agent", "env": "walk", "max_steps": 3})
    written(walk_tasks(24, seed=0))(folder)


def _slow_and_fast(folder: Path) -> None:
    """Every third task has many turns, during which the others train some steps."""
    write_loops(folder, LETTERS)
    slow = {"turns": 6, "pause_s": 1.0}
    written([task(number, extra_info=slow if number % 3 == 2 else {"turns": 1}) for number in range(24)])(folder)


def _step_rewards(folder: Path) -> None:
    write_loops(folder, {**LETTERS, "options": {"step_rewards": True}})
    prompts(folder)


def _trajectories(folder: Path) -> None:
    write_loops(folder, {"name": "two_trajectories", "_target_": "tests.matrix.letters.loops.TwoTrajectories"})
    prompts(folder)


def _duel(folder: Path, *, roles: Sequence[str] = ("first", "second")) -> None:
    write_loops(folder, {"name": "env_agent", "env": "tests.matrix.letters.env.Duel", "roles": list(roles)})
    prompts(folder)


def _every_loop(folder: Path) -> None:
    tools = [
        {"class_name": "tests.agents.loop_tools.SecretTool"},
        {"function": "tests.agents.loop_tools.add"},
    ]
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": tools}))
    (folder / "notes").mkdir()
    write_loops(
        folder,
        LETTERS,
        {"name": "tool_agent", "tool_config_path": "tools.yaml", "format": "hermes", "max_assistant_turns": 2},
        {"name": "noting", "_target_": "tests.matrix.letters.loops.Noting", "notes_path": "notes"},
    )
    written(_tasks_of_every_loop())(folder)


def _tasks_of_every_loop() -> list[Task]:
    secret = {"tools_kwargs": {"secret": {"create_kwargs": {"secret": "x7"}}}, "need_tools_kwargs": True}
    kinds: list[dict[str, Any]] = [
        {"agent_name": "tool_agent", "extra_info": {**secret, "tool_selection": ["secret"]}},
        {"agent_name": "noting", "ground_truth": "secret-0", "extra_info": {"interaction_kwargs": {"name": "n-1"}}},
        {},
    ]
    return [
        task(number, name=f"{kinds[number % 3].get('agent_name', 'first')}-", **kinds[number % 3])
        for number in range(24)
    ]


def post_tasks(live: Live) -> None:
    """Add tasks that name no agent, while the run goes on."""
    variables = wait_for_variables(live, "admin.env")
    body = {"tasks": [{"task_id": f"posted-{number}", "prompt": "Say it."} for number in range(POSTED)]}
    request = urllib.request.Request(
        variables["SERVER_URL"] + "/tasks",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {variables['ADMIN_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        assert json.loads(reply.read()) == {"added": POSTED}


def wait_for_variables(live: Live, name: str) -> dict[str, str]:
    """The variables of one of the run's files with keys, once it is there."""
    path = live.folder / name
    while not path.exists() or not path.read_text().strip():
        time.sleep(0.2)
    return dict(line.split("=", 1) for line in path.read_text().replace("'", "").splitlines())
