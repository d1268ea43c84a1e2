"""Runs of Harbor tasks, by a scripted `harbor` that is held to what the real one is (tests/agents/harbor, tests/outside)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from agents.harbor.make_tasks import failing_tasks, letter_task, write_task
from tests.matrix.records import Run
from tests.matrix.scenarios.settings import SMALL
from tests.support.ports import held_port

SCRIPTED = Path(__file__).parents[2] / "agents" / "harbor" / "scripted_harbor.py"
URL = "http://localhost"
HARBOR: dict[str, Any] = {
    **SMALL,
    "run.steps": 1,
    "buffer.groups_per_step": 4,  # eight failed ones in a row would end the run: three of five tasks fail
    "data.tasks": "{files}/tasks",
    "agents.concurrency": 4,
    "agents.max_attempts": 1,
    "agents.environment": ["HARBOR_NOTES"],
    "rollout.max_model_len": 512,
    "env.harbor.agent": "terminus-2",
    "env.harbor.environment": "singularity",
    "env.harbor.command": ["{python}", "{files}/scripted_harbor.py"],
    "learner.advantage": "grpo",
    "learner.critic": "none",
}
VERIFIER = """\
#!/bin/sh
said=$(cat /logs/agent/trajectory.json | wc -c)
echo "{\\"reward\\": 0.25, \\"length\\": $((said % 7)).5}" > /logs/verifier/reward.json
"""


def _files(folder: Path) -> None:
    """The program, two tasks that are scored, and the three that fail."""
    (folder / "notes").mkdir()
    shutil.copy(SCRIPTED, folder)
    tasks = {"letters-02": letter_task(2), "letters-12": letter_task(12), **failing_tasks()}
    for name, files in tasks.items():
        verified = {} if name == "verifier-fails" else {"tests/test.sh": VERIFIER}
        write_task(folder / "tasks" / name, {**files, **verified})


def harbor_runs() -> list[Run]:
    """One with Harbor's own address, name of the reward and errors; one with the rest."""
    notes, port = {"HARBOR_NOTES": "{files}/notes"}, held_port()
    return [
        Run(
            name="harbor",
            settings={**HARBOR, "env.harbor.trial": {"agent_timeout_multiplier": 0.1}},
            files=_files,
            environment=notes,
        ),
        Run(
            name="harbor-named",
            settings={
                **HARBOR,
                "env.harbor.agent_options": {"max_turns": 2},
                "env.harbor.environment_options": {"auto_mounting": True},
                "env.harbor.environment": "mine.rooms:Room",
                "env.harbor.reward": "length",
                "env.harbor.graded_errors": ["AgentTimeoutError"],
                "env.harbor.trial": {"agent_timeout_multiplier": 0.1},
                "env.harbor.server_url": f"{URL}:{port}",
                "server.port": port,
            },
            files=_files,
            environment=notes,
        ),
    ]
