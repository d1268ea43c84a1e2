"""Folders of Harbor tasks -> task files: `with_task_files` makes a configuration that names folders one that names parquet
files.

Called by `learner.run` before anything starts. A task's folder holds `task.toml` and `instruction.md`, `environment/` and
`tests/`; a folder of tasks holds such folders. Invariants: the same folders give the same rows, in the order of their names;
nothing of a task is judged but that it can be started: Harbor reads it again. `harbor://NAME@VERSION` is downloaded by `harbor
download`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from hashlib import sha256
from pathlib import Path

from buffers.errors import TaskError
from buffers.records import Task
from buffers.tasks.parquet import write_tasks
from configs.schema import Config
from env_adapters.child_process import resolve_command

SCHEME = "harbor://"
DATASET = re.compile(r"harbor://([\w./-]+?)(@[\w.+-]+)?")
"""harbor://NAME, harbor://NAME@VERSION, harbor://OWNER/NAME@VERSION."""
FOLDER = "harbor_task"
"""The field of `extra_info` that has the task's folder."""
MADE = ".tasks"
"""The folder beside the runs that has what is made and downloaded."""
MARK_CHARS = 12


def with_task_files(config: Config) -> Config:
    """The configuration as it is without Harbor; else one whose tasks are task files. Raises TaskError, in one line."""
    data = config.data
    if not config.env.harbor.agent:
        return config
    named = [*data.task_files, *filter(None, [data.validation.tasks])]
    missing = [path for path in named if not path.startswith(SCHEME) and not Path(path).is_dir()]
    if missing and data.make:
        _make(data.make, missing[0])

    def own(path: str) -> str:
        return (
            str(_task_file(path, made=Path(config.run.dir) / MADE, command=config.env.harbor.command)) if path else path
        )

    tasks = own(data.tasks) if isinstance(data.tasks, str) else {own(path): much for path, much in data.tasks.items()}
    validation = data.validation.model_copy(update={"tasks": own(data.validation.tasks)})
    return config.model_copy(update={"data": data.model_copy(update={"tasks": tasks, "validation": validation})})


def check_folders(config: Config) -> None:
    """Raises TaskError for what `data.tasks` names and cannot be Harbor tasks. What is downloaded or made is not looked for."""
    named = {path: "data.tasks" for path in config.data.task_files}
    if not named:
        raise TaskError(
            "env.harbor.agent plays the tasks of data.tasks, got none; set data.tasks to a folder of Harbor tasks"
        )
    if config.data.validation.tasks:
        named[config.data.validation.tasks] = "data.validation.tasks"
    for path, key in named.items():
        if path.startswith(SCHEME):
            if DATASET.fullmatch(path) is None:
                raise TaskError(
                    f"{key} must be harbor://NAME@VERSION, got {path}; for example harbor://terminal-bench@2.0"
                )
        elif Path(path).is_dir() or not config.data.make:
            read_folder(Path(path), key=key)


def read_folder(folder: Path, *, key: str = "data.tasks") -> list[Task]:
    """The tasks of a folder, or the one that it is. Raises TaskError naming the folder, and what it lacks."""
    if not folder.is_dir():
        raise TaskError(
            f"{key} must be a folder of Harbor tasks or harbor://NAME@VERSION with env.harbor.agent, got {folder} "
            f"({folder.absolute()} is not a folder); name another, or set data.make"
        )
    places = (
        [folder] if (folder / "task.toml").is_file() else sorted(path for path in folder.iterdir() if path.is_dir())
    )
    places = [place for place in places if not place.name.startswith(".")]
    if not places:
        raise TaskError(f"{key} must be a folder of Harbor tasks, got {folder}, which has none; name another")
    return [_read_task(place, source=folder.name, key=key) for place in places]


def _read_task(place: Path, *, source: str, key: str) -> Task:
    settings, multi_step = place / "task.toml", (place / "steps").is_dir()
    wanted = [settings] if multi_step else [settings, place / "instruction.md"]
    for path in wanted:
        if not path.is_file():
            raise TaskError(
                f"{key} must hold Harbor tasks, got {place} without {path.name}; a task has task.toml, instruction.md, "
                f"environment/ and tests/test.sh: add it, or move that folder away"
            )
    try:
        tomllib.loads(settings.read_text(encoding="utf-8"))
        instruction = "" if multi_step else (place / "instruction.md").read_text(encoding="utf-8")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{key}: {settings} must be TOML, and instruction.md text, got an error: {error}") from None
    return Task(
        task_id=f"{source}/{place.name}",
        prompt=[{"role": "user", "content": instruction or place.name}],
        data_source=source,
        extra_info={FOLDER: str(place.absolute())},
    )


def _task_file(path: str, *, made: Path, command: list[str]) -> Path:
    """A task file with the tasks of this folder, or of this data set of the registry."""
    folder = _download(path, to=made, command=command) if path.startswith(SCHEME) else Path(path)
    tasks = read_folder(folder)
    mark = sha256(json.dumps([task.private() for task in tasks]).encode()).hexdigest()[:MARK_CHARS]
    made.mkdir(parents=True, exist_ok=True)
    to = made / f"{folder.absolute().name}-{mark}.parquet"
    if not to.is_file():
        write_tasks(to, tasks)
    return to


def _download(name: str, *, to: Path, command: list[str]) -> Path:
    """The folder that `harbor download` has filled. One that is there is not downloaded again."""
    match = DATASET.fullmatch(name)
    assert match is not None, "check_folders() first"
    folder = to / name.removeprefix(SCHEME).replace("/", "-")
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f".{folder.name}")
    words = [
        *resolve_command(command),
        "download",
        name.removeprefix(SCHEME),
        "--output-dir",
        str(unfinished),
        "--overwrite",
    ]
    print(f"understudy: downloading {name} to {folder} ...", file=sys.stderr, flush=True)
    done = subprocess.run(words, stdout=sys.stderr, check=False)
    places = sorted({path.parent.parent for path in unfinished.rglob("task.toml")})
    if done.returncode != 0 or len(places) != 1:
        raise TaskError(
            f"data.tasks must name a data set of Harbor's registry, got {name}: harbor download ended with code "
            f"{done.returncode} and {len(places)} folders of tasks; see its words above"
        )
    places[0].rename(folder)
    return folder


def _make(command: list[str], missing: str) -> None:
    done = subprocess.run(resolve_command(command), stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise TaskError(
            f"data.make must write {missing}, but it exited with code {done.returncode}; see its words above"
        )
