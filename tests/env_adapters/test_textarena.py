"""TextArena by name: refused before anything starts where the package is missing, a task names no game, or roles are too few; what
it does when it is there, tests/outside plays."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from buffers.errors import EnvError, TaskError
from buffers.records import Task
from buffers.tasks import textarena_games
from configs.load import load_config
from env_adapters.textarena_env import TextArenaEnv
from learner.players import Players, make_players

GAME = {"game": "TicTacToe-v0", "players": 2}
ROLES = "roles={a: {}, b: {frozen: -1}, c: {url: 'http://127.0.0.1:1/v1'}}"


@pytest.fixture(autouse=True)
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textarena_games, "is_installed", lambda: False)


def task(**extra_info: object) -> Task:
    return Task(task_id="t", prompt=[], agent_name="env_agent", extra_info=extra_info)


def players(folder: Path, *, env: str = "textarena", roles: list[str] | None = None) -> Players:
    entry = {"name": "env_agent", "env": env, **({"roles": roles} if roles else {})}
    (folder / "loops.yaml").write_text(yaml.safe_dump([entry]))
    overrides = [f"agents.loops={folder / 'loops.yaml'}", "agents.command=[]", "env.command=[]", ROLES]
    return make_players(load_config(overrides=overrides))


def test_tasks_of_a_package_that_is_missing_are_refused_with_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"TicTacToe-v0: TextArena needs the package textarena, got none; pip install"):
        next(textarena_games.task_rows("textarena://TicTacToe-v0"))


def test_a_task_file_of_games_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="needs the package textarena"):
        players(tmp_path).check(task(**GAME))


@pytest.mark.parametrize(
    ("query", "says"),
    [("size=0", "size of"), ("seed=-1", "seed of"), ("players=two", "players of"), ("size=true", "size of")],
)
def test_a_setting_that_is_no_number_is_refused(query: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"{says} .* must be a whole number"):
        next(textarena_games.task_rows(f"textarena://TicTacToe-v0?{query}"))


@pytest.mark.parametrize("wrong", [{"game": None}, {"game": 3}, {"players": None}, {"options": [1]}, {"seed": "x"}])
def test_a_task_that_names_no_game_is_refused_with_the_column(wrong: dict[str, object]) -> None:
    (key,) = wrong
    with pytest.raises(EnvError, match=f"extra_info.{key} of task 't' must be there as"):
        TextArenaEnv.check(task(**{**GAME, **wrong}))


def test_roles_must_be_of_the_run_served_by_it_and_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ("nobody", "c"):
        with pytest.raises(
            TaskError, match=rf"roles must be of the run's that it serves itself \(a, b\), got '{role}'"
        ):
            players(tmp_path, env="module.Class", roles=["a", role])
    monkeypatch.setattr(TextArenaEnv, "check", lambda task: 2)
    with pytest.raises(TaskError, match="roles must name who plays each of the 2 players of 't', got a; add 1"):
        players(tmp_path, roles=["a"]).check(task(**GAME))
    players(tmp_path, roles=["b", "a"]).check(task(**GAME))
