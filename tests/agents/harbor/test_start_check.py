"""Rules of agents/harbor/start_check.py: what Harbor could not play is refused before anything starts, in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agents.harbor.start_check import check_address, check_harbor, check_program
from buffers.errors import AgentError, EnvError
from configs.schema import Config
from tests.agents.harbor.test_tasks import letters
from tests.agents.harbor.test_trials import SCRIPTED


def config(folder: Path | None = None, *, host: str = "127.0.0.1", **harbor: Any) -> Config:
    given = {"agent": "terminus-2", "environment": "singularity", "command": SCRIPTED, **harbor}
    data = {"tasks": "" if folder is None else str(letters(folder / "tasks", 1))}
    return Config.model_validate({"env": {"harbor": given}, "server": {"host": host}, "data": data})


def test_what_can_be_played_is_let_in(tmp_path: Path) -> None:
    check_harbor(config(tmp_path))
    check_harbor(config(tmp_path, agent="codex"))
    check_harbor(Config())


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        ("oracle", r"env\.harbor\.agent must ask a model, got oracle"),
        ("devin", r"env\.harbor\.agent must let its model's address be set, got devin"),
        ("claude-cod", r"did you mean 'claude-code'\?"),
    ],
)
def test_an_agent_that_cannot_be_trained_is_refused(agent: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=told):
        check_harbor(config(tmp_path, agent=agent))


def test_a_provider_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"env\.harbor\.environment must be .*did you mean 'daytona'\?"):
        check_harbor(config(tmp_path, environment="dayton"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"environment": "docker"}, r"server\.host=127\.0\.0\.1 is not this machine; set server\.host"),
        ({"environment": "podman", "host": "0.0.0.0"}, r"server\.host=0\.0\.0\.0 is not this machine"),
        ({"environment": "modal", "host": "10.0.0.1"}, r"must travel encrypted, got env\.harbor\.server_url=''"),
        (
            {"environment": "e2b", "server_url": "http://me:1"},
            r"must travel encrypted, got env\.harbor\.server_url='http://me:1'",
        ),
        ({"environment": "docker", "host": "172.17.0.1"}, ""),
        ({"environment": "docker", "server_url": "http://host.docker.internal:8000"}, ""),
        ({"environment": "daytona", "server_url": "https://me.example"}, ""),
        ({"environment": "docker", "agent": "terminus-2"}, ""),
        ({"environment": "mine.rooms:Room"}, ""),
        ({"environment": "child"}, ""),
    ],
)
def test_an_agent_that_could_not_reach_the_server_is_refused(settings: dict[str, Any], told: str) -> None:
    wanted = config(**{"agent": "claude-code", **settings})
    if not told:
        check_address(wanted)
        return
    with pytest.raises(EnvError, match=told):
        check_address(wanted)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            ["no-such-harbor"],
            r"env\.harbor\.command must start harbor, got \['no-such-harbor'\].*uv tool install harbor",
        ),
        (
            [sys.executable, "-c", "raise SystemExit('needs Python 3.12')"],
            r"ended with code 1 and said: needs Python 3\.12; it needs",
        ),
        ([sys.executable, "-c", "print('hello')"], r"ended with code 0 and said: hello"),
    ],
)
def test_a_program_that_is_no_harbor_is_refused(command: list[str], told: str) -> None:
    with pytest.raises(EnvError, match=told):
        check_program(command)


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        (
            {"env": {"harbor": {"agent": "codex"}}, "agents": {"command": ["a"]}},
            r"plays and scores by itself, got agents\.command",
        ),
        ({"env": {"harbor": {"agent": "codex"}}, "data": {"scorer": "contains"}}, r"got data\.scorer=contains"),
        (
            {"env": {"harbor": {"environment": "child"}}},
            r"env\.harbor\.environment has an effect with env\.harbor\.agent only",
        ),
        (
            {"env": {"harbor": {"agent": "codex", "trial": {"task": {}}}}},
            r"must not hold what a run sets itself, got task",
        ),
        (
            {"env": {"harbor": {"agent": "codex", "server_url": "http://me:1"}}, "server": {"processes": 2}},
            r"env\.harbor\.server_url needs one process that serves",
        ),
        ({"env": {"harbor": {"agent": "No Agent"}}}, r"String should match pattern"),
        ({"env": {"harbor": {"agent": "codex", "server_url": "ftp://me"}}}, r"String should match pattern"),
    ],
)
def test_keys_that_contradict_are_refused(tree: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Config.model_validate(tree)
