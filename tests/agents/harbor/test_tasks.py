"""Rules of agents/harbor/tasks.py: folders of Harbor tasks become task files, and what is no task is told by its folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agents.harbor.make_tasks import letter_task, write_task
from agents.harbor.tasks import FOLDER, check_folders, read_folder, with_task_files
from buffers.errors import TaskError
from buffers.tasks.parquet import read_tasks
from configs.load import load_config
from configs.schema import Config
from tests.agents.harbor.test_trials import SCRIPTED


def config(folder: Path, **data: Any) -> Config:
    """With Harbor, and `data`."""
    harbor = {"agent": "terminus-2", "environment": "child", "command": SCRIPTED}
    return Config.model_validate({"run": {"dir": str(folder / "runs")}, "data": data, "env": {"harbor": harbor}})


def letters(folder: Path, *counts: int) -> Path:
    for count in counts:
        write_task(folder / f"letters-{count:02}", letter_task(count))
    return folder


def test_a_folder_becomes_a_task_file_with_a_row_for_each_task(tmp_path: Path) -> None:
    folder, other = letters(tmp_path / "some", 3, 1), letters(tmp_path / "other", 2)
    third = letters(tmp_path / "third", 4)
    made = with_task_files(
        config(tmp_path, tasks={str(folder): 3.0, str(other): 1.0}, validation={"tasks": str(third)})
    )
    rows = [list(read_tasks(Path(path))) for path in made.data.task_files]
    assert list(made.data.task_files.values()) == [3.0, 1.0]
    assert [task.task_id for task in rows[0]] == ["some/letters-01", "some/letters-03"]
    assert rows[0][1].prompt == [{"role": "user", "content": "Say the letter a 3 times, and no other letter.\n"}]
    assert rows[0][1].extra_info == {FOLDER: str(folder / "letters-03")}
    (held_out,) = read_tasks(Path(made.data.validation.tasks))
    assert held_out.task_id == "third/letters-04"
    again = with_task_files(config(tmp_path, tasks=str(folder)))
    assert next(iter(again.data.task_files)) == next(iter(made.data.task_files))


def test_one_task_is_a_folder_of_one(tmp_path: Path) -> None:
    letters(tmp_path, 5)
    (task,) = read_folder(tmp_path / "letters-05")
    assert task.task_id == "letters-05/letters-05"


def test_what_is_missing_is_made(tmp_path: Path) -> None:
    make = ["{python}", "-m", "agents.harbor.make_tasks", "--out", str(tmp_path / "made")]
    made = with_task_files(config(tmp_path, tasks=str(tmp_path / "made"), make=make))
    (path,) = made.data.task_files
    assert len(list(read_tasks(Path(path)))) == 12


def test_a_data_set_of_the_registry_is_downloaded_once(tmp_path: Path) -> None:
    wanted = config(tmp_path, tasks="harbor://some/set@2.0")
    check_folders(wanted)
    (path,) = with_task_files(wanted).data.task_files
    (task,) = read_tasks(Path(path))
    assert task.task_id == "some-set@2.0/one" and task.prompt[0]["content"] == "Do it.\n"
    broken = wanted.env.harbor.model_copy(update={"command": [sys.executable, "-c", "raise SystemExit(3)"]})
    again = wanted.model_copy(update={"env": wanted.env.model_copy(update={"harbor": broken})})
    assert list(with_task_files(again).data.task_files) == [path]
    other = again.model_copy(update={"data": again.data.model_copy(update={"tasks": "harbor://other"})})
    with pytest.raises(TaskError, match=r"got harbor://other: harbor download ended with code 3"):
        with_task_files(other)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("task.toml", None, r"data\.tasks must hold Harbor tasks, got .*letters-01 without task\.toml"),
        ("instruction.md", None, r"without instruction\.md"),
        ("task.toml", "[agent", r"task\.toml must be TOML"),
    ],
)
def test_a_folder_that_is_no_task_is_told(name: str, text: str | None, told: str, tmp_path: Path) -> None:
    path = letters(tmp_path / "tasks", 1) / "letters-01" / name
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(TaskError, match=told):
        check_folders(config(tmp_path, tasks=str(tmp_path / "tasks")))


@pytest.mark.parametrize(
    ("tasks", "told"),
    [
        ("", r"plays the tasks of data\.tasks, got none"),
        ("{here}/none", r"must be a folder of Harbor tasks or harbor://NAME@VERSION .*none is not a folder"),
        ("{here}", r"which has none"),
        ("harbor://", r"must be harbor://NAME@VERSION, got harbor://"),
    ],
)
def test_what_is_no_folder_of_tasks_is_told(tasks: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=told):
        check_folders(config(tmp_path, tasks=tasks.format(here=tmp_path)))


def test_env_harbor_is_short_for_its_agent(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("env: harbor\ndata: {tasks: tasks}\n")
    assert load_config(path).env.harbor.agent == "terminus-2"
    assert load_config(path, ["env.harbor.agent=codex"]).env.harbor.agent == "codex"


def test_without_harbor_nothing_changes() -> None:
    plain = Config()
    assert with_task_files(plain) is plain
