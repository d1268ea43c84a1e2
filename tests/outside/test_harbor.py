"""Trials of the published `harbor` program, held to what the scripted one of tests/agents/harbor is held to.

It is the `harbor` on PATH, or what HARBOR_COMMAND names, such as a wrapper that starts it in another root. Without one, these tests
are skipped: it needs Python 3.12 or newer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agents.harbor.start_check import (
    ANTHROPIC,
    ELSEWHERE,
    GEMINI,
    HERE,
    NEAR,
    OPENAI,
    OUTSIDE,
    OWN_SERVICE,
    WITHOUT_MODEL,
    check_program,
)
from tests.agents.harbor.trial_contract import check_scores_and_reasons, model, play, write_tasks_of

PROGRAM = os.environ.get("HARBOR_COMMAND") or shutil.which("harbor") or ""
pytestmark = [
    pytest.mark.outside,
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM, reason="no harbor program: put it on PATH, or name it in HARBOR_COMMAND"),
]


async def test_a_verifier_scores_and_what_fails_is_told_with_harbors_reason(tmp_path: Path) -> None:
    check_program([PROGRAM])
    await check_scores_and_reasons(tmp_path, [PROGRAM])


async def test_a_named_error_leaves_the_verifiers_score(tmp_path: Path) -> None:
    with model() as standing:
        graded = {"graded_errors": ["AgentTimeoutError"], "trial": {"agent_timeout_multiplier": 0.3}}
        service = await play(tmp_path, url=standing.url, command=[PROGRAM], only="agent-hangs", **graded)
    assert service.scores == {"agent-hangs": 0.0} and not service.failed


async def test_an_agent_inside_its_environment_asks_with_the_episodes_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a user's own, found by the PYTHONPATH that is handed on."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("environments")))
    own = {"agent": "own_harbor_agent:Script", "agent_options": {}}
    with model() as standing:
        service = await play(
            tmp_path, url=standing.url, command=[PROGRAM], named=["PYTHONPATH"], only="letters-02", **own
        )
    assert standing.asked == [("key-letters-02", "policy")]
    assert service.scores == {"letters-02": 0.75} and not service.failed


def test_the_solution_of_a_task_is_worth_one(tmp_path: Path) -> None:
    """By Harbor's own agent for that, in the provider of a fenced child process."""
    task = write_tasks_of(tmp_path) / "letters-12"
    provider = Path(__file__).parents[2] / "agents" / "harbor" / "provider"
    config = {
        "task": {"path": str(task)}, "trial_name": "t", "trials_dir": str(tmp_path / "out"), "agent": {"name": "oracle"},
        "environment": {"import_path": "understudy_harbor:ChildEnvironment"},
    }  # fmt: skip
    (tmp_path / "c.json").write_text(json.dumps(config))
    environment = {**os.environ, "PYTHONPATH": str(provider), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    subprocess.run([PROGRAM, "trial", "start", "--config", str(tmp_path / "c.json")], env=environment, check=True)
    result = json.loads((tmp_path / "out" / "t" / "result.json").read_text())
    assert result["exception_info"] is None and result["verifier_result"]["rewards"] == {"reward": 1.0}


def test_the_names_that_the_door_knows_are_those_of_the_program() -> None:
    schema = json.loads(subprocess.run([PROGRAM, "trial", "schema"], capture_output=True, text=True, check=True).stdout)
    providers = set(schema["$defs"]["EnvironmentType"]["enum"])
    assert providers <= HERE | NEAR | ELSEWHERE, providers - (HERE | NEAR | ELSEWHERE)
    help_text = subprocess.run(
        [PROGRAM, "trial", "start", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "4000"},
    ).stdout
    known = ANTHROPIC | GEMINI | OPENAI | OWN_SERVICE | WITHOUT_MODEL
    for name in known:
        assert name in help_text, f"{name} is no agent of this harbor"
    assert known >= OUTSIDE
