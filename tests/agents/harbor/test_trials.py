"""Rules of agents/harbor/trials.py: an episode is a trial, whose verifier scores it, or whose error is its reason."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agents.harbor.tasks import FOLDER, read_folder
from agents.harbor.trials import CHILD, read_outcome, trial_config, trial_environment
from buffers.records import Task
from configs.schema import HarborConfig
from tests.agents.harbor.trial_contract import check_scores_and_reasons, model, play, trials, write_tasks_of
from tests.agents.test_external import ScriptedService

SCRIPTED = [sys.executable, str(Path(__file__).with_name("scripted_harbor.py"))]


@pytest.mark.seconds
async def test_a_verifier_scores_and_what_fails_is_told_with_harbors_reason(tmp_path: Path) -> None:
    await check_scores_and_reasons(tmp_path, SCRIPTED, limit_s=1.0)


@pytest.mark.seconds
async def test_a_named_error_leaves_the_verifiers_score(tmp_path: Path) -> None:
    with model() as standing:
        service = await play(
            tmp_path, url=standing.url, command=SCRIPTED, only="agent-hangs", graded_errors=["AgentTimeoutError"],
            trial={"agent_timeout_multiplier": 0.01},
        )  # fmt: skip
    assert service.scores == {"agent-hangs": 0.0} and not service.failed


@pytest.mark.parametrize("in_background", [False, True])
async def test_a_trial_whose_episode_has_ended_is_interrupted_and_gives_no_score(
    tmp_path: Path, in_background: bool
) -> None:
    """A shell starts what it runs in the background with SIGINT ignored, and so are its children."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if in_background else signal.default_int_handler)
    try:
        await interrupted(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


async def interrupted(tmp_path: Path) -> None:
    (hangs,) = [task for task in read_folder(write_tasks_of(tmp_path)) if task.task_id.endswith("agent-hangs")]
    service = ScriptedService(replace(hangs, task_id="e"))
    long = {"agent_timeout_multiplier": 60.0}
    playing = asyncio.create_task(
        trials(service, folder=tmp_path, url="http://127.0.0.1:1", command=SCRIPTED, trial=long).run()
    )
    while not list((tmp_path / "agents").glob("lane-*/e/app")):
        await asyncio.sleep(0.05)
    await service.fail("e", "deadline")
    await playing
    assert service.failed == {"e": "deadline"}
    (result,) = (tmp_path / "agents" / "failed").glob("e/result.json")
    assert json.loads(result.read_text())["exception_info"]["exception_type"] == "CancelledError"


async def test_a_program_that_writes_no_result_is_a_failed_episode_with_its_last_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no space left'); raise SystemExit(5)"]
    service = await play(tmp_path, url="http://127.0.0.1:1", command=command, only="letters-02")
    assert service.failed == {"letters-02": "harbor ended without a result: exit code 5, no space left"}


async def test_a_task_without_a_folder_is_a_failed_episode(tmp_path: Path) -> None:
    """Tasks may be added while a run lives: nothing was checked of them before."""
    plain = Task(task_id="p", prompt=[{"role": "user", "content": "?"}])
    gone = Task(task_id="g", prompt=plain.prompt, extra_info={FOLDER: str(tmp_path / "gone")})
    service = ScriptedService(plain, gone)
    await trials(service, folder=tmp_path, url="http://127.0.0.1:1", command=SCRIPTED).run()
    assert {name: why.partition(":")[0] for name, why in service.failed.items()} == dict.fromkeys(
        "pg", "harbor has no such task"
    )


def test_a_reward_of_another_name_is_no_score(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(
        json.dumps({"exception_info": None, "verifier_result": {"rewards": {"speed": 2}}})
    )

    def outcome(reward: str) -> tuple[float | None, str]:
        found = read_outcome(tmp_path, exit_code=0, log_tail="", reward=reward, graded_errors=[])
        return found.score, found.reason

    assert outcome("speed") == (2.0, "")
    assert outcome("reward") == (None, "harbor gave no reward of that name: env.harbor.reward=reward, got ['speed']")


@pytest.mark.parametrize(
    "result",
    [
        "[]",
        "5",
        '{"exception_info": [], "verifier_result": [1]}',
        '{"exception_info": "x", "verifier_result": null}',
        '{"exception_info": null, "verifier_result": {"rewards": [1]}}',
        '{"exception_info": null, "verifier_result": {"rewards": "reward"}}',
        "[" * 100_000,
    ],
)
def test_a_result_that_harbor_does_not_write_is_a_failed_episode(tmp_path: Path, result: str) -> None:
    (tmp_path / "result.json").write_text(result)
    outcome = read_outcome(tmp_path, exit_code=1, log_tail="last\nwords", reward="reward", graded_errors=[])
    assert outcome.score is None and outcome.reason == "harbor ended without a result: exit code 1, words"


@pytest.mark.parametrize(
    ("agent", "named"),
    [
        ("claude-code", "anthropic/policy"),
        ("gemini-cli", "gemini/policy"),
        ("codex", "openai/policy"),
        ("my.own:Agent", "openai/policy"),
    ],
)
def test_a_model_is_named_with_the_api_that_its_agent_asks_in(agent: str, named: str, tmp_path: Path) -> None:
    harbor = HarborConfig(agent=agent, environment="child", trial={"timeout_multiplier": 2.0})
    config = trial_config(
        harbor, task="/t", name="1-0-0", folder=tmp_path, model="policy", server="http://10.0.0.1:8000"
    )
    assert config["agent"]["extra_allowed_hosts"] == ["10.0.0.1"]
    assert config["agent"]["model_name"] == named and config["environment"]["import_path"] == CHILD
    assert config["agent"].get("import_path" if ":" in agent else "name") == agent
    assert config["timeout_multiplier"] == 2.0


def test_agents_elsewhere_get_the_address_by_which_they_reach_the_server() -> None:
    given = {
        "OPENAI_BASE_URL": "http://0.0.0.0:8000/v1",
        "ANTHROPIC_BASE_URL": "http://0.0.0.0:8000",
        "MODEL": "policy",
    }
    made = trial_environment(given, root="http://0.0.0.0:8000", server_url="https://me.example")
    assert made["OPENAI_BASE_URL"] == "https://me.example/v1" and made["ANTHROPIC_BASE_URL"] == "https://me.example"
    assert made["MODEL"] == "policy"
