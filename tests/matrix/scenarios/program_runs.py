"""Runs whose tasks are played by programs: one process for each episode, or long-lived ones with an environment beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from buffers.records import Task
from env_adapters.relay.game import relay_tasks
from tests.matrix.records import Run
from tests.matrix.scenarios.settings import SMALL
from tests.matrix.scenarios.task_files import task, written
from tests.support.ports import held_port

PROGRAMS = Path(__file__).parents[1] / "programs"
NOTES = "MATRIX_NOTES"
LETTERS = "tests.support.scoring.early_letters"
PROGRAM: dict[str, Any] = {
    **SMALL,
    "data.tasks": "{files}/tasks.parquet",
    "agents.command": ["{python}", "{files}/agent.py"],
    "agents.environment": [NOTES],
    "learner.advantage": "grpo",
    "learner.critic": "none",
}
EACH: dict[str, Any] = {**PROGRAM, "agents.processes": 0, "data.scorer": "json_line", "agents.concurrency": 4}
"""A process for each episode, which prints its score."""
JUDGED: dict[str, Any] = {
    **PROGRAM,
    "env.command": ["{python}", "{files}/judge.py"],
    "agents.processes": 2,
    "agents.concurrency": 8,
}
"""Two programs that ask for episodes, judged by an environment."""
SILENT: dict[str, Any] = {
    **JUDGED, "agents.silence_s": 3.0, "agents.processes": 1, "agents.max_attempts": 1, "agents.concurrency": 32,
}  # fmt: skip
"""More agents than there are episodes to play, of which some say nothing."""


ROLES: dict[str, Any] = {
    **SMALL,
    "run.steps": 3,
    "data.tasks": "{files}/tasks.parquet",
    "agents.command": ["{python}", "{understudy}/agents/examples/relay_agent.py"],
    "env.command": ["{python}", "-m", "env_adapters.relay.server"],
    "roles": {"scout": {}, "runner": {"frozen": -1}},
    "learner.advantage": "grpo",
    "learner.critic": "none",
}
"""Two speakers in each episode, one of them the policy as it was a version ago."""
APART: dict[str, Any] = {
    **ROLES,
    "roles": {"scout": {}, "runner": {}, "silent": {}},
    "learner.lora.rank": 4,
    "learner.lora.per_role": True,
    "learner.entropy_coef": 0.05,
    "learner.lr": 2e-2,
}
"""Two speakers in each episode, each an adapter of its own, and a role that nobody asks."""


def _relay(folder: Path) -> None:
    written(relay_tasks(24, seed=0))(folder)


def programs(tasks: Callable[[Path], None]) -> Callable[[Path], None]:
    """The programs and these tasks."""

    def write(folder: Path) -> None:
        for path in PROGRAMS.glob("*.py"):
            shutil.copy(path, folder)
        (folder / "notes").mkdir()
        tasks(folder)

    return write


def fates(*some: str, number: int = 24, **extra: Any) -> Callable[[Path], None]:
    """Programs, and tasks whose fates repeat in this order."""
    return programs(
        written([task(each, extra_info={"fate": some[each % len(some)], **extra}) for each in range(number)])
    )


SHOWN = {"fate": "", "hint": "h-1", "mine": "m-1", "index": 7}
SECRET = {
    "answer": "secret-1",
    "ground_truth": "secret-2",
    "interaction_kwargs": {"name": "secret-3"},
    "reward_model": "secret-4",
    "solution": "secret-5",
    "tools_kwargs": {"add": {"create_kwargs": {"key": "secret-6"}}},
}


def _all_columns() -> list[Task]:
    return [
        task(number, data_source="mine", ground_truth="secret-0", extra_info={**SHOWN, **SECRET})
        for number in range(24)
    ]


def _judgings(folder: Path) -> None:
    """Tasks whose environment scores rounds, branches, and by several judges."""
    some = ("rounds", "branch", "judges")
    programs(written([task(each, extra_info={"judging": some[each % 3]}) for each in range(24)]))(folder)


def program_runs() -> list[Run]:
    """See each."""
    return [*_each(), *_judged()]


def _each() -> list[Run]:
    """A process for each episode."""
    notes = {NOTES: "{files}/notes", "MATRIX_UNNAMED": "not for agents"}
    return [
        Run(
            name="program",
            settings={**EACH, "server.host": "127.0.0.2", "server.processes": 2, "agents.concurrency": 3},
            files=programs(written(_all_columns())),
            environment=notes,
        ),
        Run(
            name="crashes",
            settings={
                **EACH,
                "data.scorer": LETTERS,
                "agents.fewest_members": 3,
                "agents.max_attempts": 2,
                "agents.preload": ["colorsys"],
            },
            files=fates("crash"),
            environment=notes,
        ),
        Run(
            name="given-up",
            settings={**EACH, "data.scorer": LETTERS, "agents.max_attempts": 1},
            files=fates("crash", "crash", ""),
            environment=notes,
        ),
    ]


def _judged() -> list[Run]:
    """Long-lived programs, judged by an environment."""
    notes = {NOTES: "{files}/notes"}
    return [
        Run(
            name="deadline",
            settings={
                **JUDGED, "run.steps": 4, "agents.deadline_s": 1.5, "rollout.max_tokens": 4000, "rollout.max_model_len": 4096,
                "agents.max_attempts": 3, "agents.processes": 1, "agents.concurrency": 32,
            },
            files=fates("", "", "long"),
            environment=notes,
        ),
        Run(
            name="judged",
            settings={**JUDGED, "server.port": held_port()},
            files=fates("two rounds"),
            environment=notes,
        ),
        Run(name="roles", settings=ROLES, files=_relay),
        Run(name="roles-apart", settings=APART, files=_relay),
        Run(name="silent", settings=SILENT, files=fates("slow", "slow", "silent"), environment=notes),
        Run(
            name="resumed",
            settings={**json.loads(json.dumps(SILENT).replace("{files}", "{after}/../files")), "run.dir": "{after}/..",
                      "run.name": "silent", "run.steps": 3},
            flags=("--resume", "auto"),
            environment={NOTES: "{files}"},
            after="silent",
        ),
        Run(
            name="parsers",
            settings={**JUDGED, "server.reasoning_parser": "qwen3", "agents.processes": 1},
            files=fates("tools", "two rounds"),
            environment=notes,
        ),
        Run(
            name="no-parsers",
            settings={**JUDGED, "server.tool_parser": None, "agents.processes": 1},
            files=fates("tools", "two rounds", "forced"),
            environment=notes,
        ),
        Run(name="parts", settings={**JUDGED, "agents.processes": 1}, files=_judgings, environment=notes),
        Run(
            name="ends",
            settings={**JUDGED, "agents.command": ["{python}", "-c", "print('nothing to do')"], "agents.environment": []},
            files=fates(""),
            code=1,
            timeout_s=150.0,
        ),
        Run(
            name="strict",
            settings={
                **JUDGED, "server.replay_match": "strict", "server.tool_parser": "hermes", "server.reasoning_parser": "qwen3",
                "agents.processes": 1,
            },
            files=fates("tools", "two rounds"),
            environment=notes,
        ),
    ]  # fmt: skip
