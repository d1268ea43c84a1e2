"""Models and data sets of the Hugging Face hub by name, and data sets on this disk: a configuration that names them becomes one
that names folders and files of this machine.

Called by `learner.run` and `learner.evaluate` before anything starts. Each download is a process of its own (this module as a
program), which has huggingface_hub and its threads and shows its progress on standard error. Invariants: a folder that exists is
that folder, whatever the hub has; what is named is one commit, found in hub's cache again; without a network, or with
HF_HUB_OFFLINE, the cache is all there is. Files are data: nothing in them is run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from buffers.errors import TaskError, UnderstudyError
from buffers.tasks import reasoning_gym_tasks, textarena_games
from configs.child_processes import python_path
from configs.schema import Config

NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""OWNER/NAME."""
DATASET = re.compile(r"hf://([\w.-]+/[\w.-]+)/([\w.-]+)/([\w.-]+)")
"""hf://OWNER/NAME/CONFIG/SPLIT."""
SCHEME = "hf://"
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
CODE = "*.py"
IGNORED = ("consolidated*", "original/*", "adapter_*")
"""The same weights once more in another form, and adapters."""
SHAPE_FILES = ("config.json",)
CONVERTED = "refs/convert/parquet"
"""The branch on which the hub keeps each data set as parquet, by its own conversion."""
MARK_CHARS = 12
NAMED = {package.SCHEME: package for package in (reasoning_gym_tasks, textarena_games)}
"""Packages that make tasks by name."""
MADE = ".tasks"
"""The folder beside the runs that has task files made of data sets."""


def is_hub_model(path: str) -> bool:
    """Whether `model.path` can only be a name of the hub."""
    return path != "tiny" and NAME.fullmatch(path) is not None and not Path(path).exists()


def is_dataset(path: str) -> bool:
    """Whether a task file is named by a data set."""
    from buffers.tasks.datasets import is_saved_dataset

    return path.startswith((SCHEME, *NAMED)) or (path != "" and is_saved_dataset(Path(path)))


def with_local_files(config: Config) -> Config:
    """The configuration with folders and files of this machine; what is missing is downloaded. Raises UnderstudyError, in one
    line."""
    model, data = config.model, config.data
    if is_hub_model(model.path):
        files = (*MODEL_FILES, CODE) if model.trust_remote_code else MODEL_FILES
        model = model.model_copy(update={"path": str(model_folder(model.path, only=files))})

    def own(path: str) -> str:
        if not is_dataset(path):
            return path
        return _asked("tasks", path, str(Path(config.run.dir) / MADE), json.dumps(data.columns))

    tasks = own(data.tasks) if isinstance(data.tasks, str) else {own(path): much for path, much in data.tasks.items()}
    validation = data.validation.model_copy(update={"tasks": own(data.validation.tasks)})
    changed = {"tasks": tasks, "validation": validation, "columns": {}}
    return config.model_copy(update={"model": model, "data": data.model_copy(update=changed)})


def model_folder(name: str, *, only: Sequence[str] = MODEL_FILES) -> Path:
    """The folder of the cache that has the model's files, `only` those of these patterns."""
    return Path(_asked("model", name, *only))


def _asked(*words: str) -> str:
    """The path that this module as a program gives. Raises UnderstudyError with its message."""
    command = [sys.executable, "-m", "learner.startup.hub", *words]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    told = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {}
    if "path" not in told:
        raise UnderstudyError(told.get("error") or f"{words[1]} could not be had, for the error above; mend it first")
    path: str = told["path"]
    return path


def main(kind: str, name: str, *words: str) -> int:
    """Downloads a model (`words`: patterns of its files), or makes a task file of a data set (their folder, columns as JSON), and
    prints one line of JSON: `path`, or `error`."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        if kind == "model":
            path = _download_model(name, words)
        else:
            folder, columns = words
            path = _task_file(name, folder=Path(folder), columns=json.loads(columns))
        told = {"path": str(path)}
    except UnderstudyError as error:
        told = {"error": str(error)}
    except (HfHubHTTPError, OSError, ValueError) as error:  # hub's other errors are among the latter two
        told = {"error": _message(kind, name, error)}
    print(json.dumps(told), flush=True)
    return 0 if "path" in told else 1


def _task_file(path: str, *, folder: Path, columns: Mapping[str, str]) -> Path:
    """A task file with the data set's rows, made in `folder` where it is not there yet: the same rows and columns have the same
    name."""
    from buffers.tasks.datasets import saved_files, write_task_file

    if scheme := next((scheme for scheme in NAMED if path.startswith(scheme)), ""):
        return _named_file(path, scheme=scheme, folder=folder)
    if path.startswith(SCHEME):
        if (found := DATASET.fullmatch(path)) is None:
            raise TaskError(
                f"data.tasks of the hub must be hf://OWNER/NAME/CONFIG/SPLIT, got {path}; for example hf://openai/gsm8k/main/train"
            )
        source, subset, split = found.groups()
        label = f"{source.split('/')[1]}-{subset}-{split}"
        files = _download_dataset(source, subset=subset, split=split)
    else:
        source, label = Path(path).name, "-".join(Path(path).absolute().parts[-2:])
        files = saved_files(Path(path))
    # files of the hub's cache are links to files that are named by their contents
    named = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    mark = sha256(json.dumps([named, sorted(columns.items()), source]).encode()).hexdigest()[:MARK_CHARS]
    if not (to := folder / f"{label}-{mark}.parquet").is_file():
        write_task_file(files, columns=columns, source=source, to=to)
    return to


def _named_file(address: str, *, scheme: str, folder: Path) -> Path:
    """The tasks that a package has at this address, of the version that is installed."""
    from buffers.records import Task
    from buffers.tasks.parquet import write_tasks

    package, name = NAMED[scheme], address.removeprefix(scheme).partition("?")[0].replace("/", "-")
    installed = version(package.PACKAGE) if package.is_installed() else ""
    mark = sha256(json.dumps([address, installed]).encode()).hexdigest()[:MARK_CHARS]
    if not (to := folder / f"{name or 'none'}-{mark}.parquet").is_file():
        try:
            tasks = [Task(**row) for row in package.task_rows(address)]
        except ValueError as error:
            raise TaskError(f"data.tasks={error}") from None
        folder.mkdir(parents=True, exist_ok=True)
        write_tasks(to, tasks)
    return to


def _download_model(name: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=list(IGNORED)))
    if "*.safetensors" in patterns and not any(folder.glob("*.safetensors")):
        folder = Path(snapshot_download(name, allow_patterns=[*patterns, "*.bin"], ignore_patterns=list(IGNORED)))
    if not (folder / "config.json").is_file():
        raise UnderstudyError(
            f"model.path must name a model for transformers, got {name}, which has no config.json on the hub; name another model"
        )
    return folder


def _download_dataset(name: str, *, subset: str, split: str) -> list[Path]:
    """The parquet files of one split: those of the data set itself, or else those of the hub's own conversion."""
    from huggingface_hub import snapshot_download

    own = [f"{subset}/{split}-*.parquet", f"{subset}/{split}/*.parquet"]
    own += [f"data/{split}-*.parquet"] if subset == "default" else []
    for revision, patterns in ((None, own), (CONVERTED, [f"{subset}/{split}/*.parquet"])):
        folder = Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))
        if files := sorted(file for pattern in patterns for file in folder.glob(pattern)):
            return files
    raise TaskError(
        f"data.tasks must name a split that the hub has as parquet, got hf://{name}/{subset}/{split}; name another config or split"
    )


def _message(kind: str, name: str, error: Exception) -> str:
    """One line, which says both what the name is not here and what the hub says."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        why, remedy = f"{constants.ENDPOINT} gives it on request only", "ask on its page, then `hf auth login`"
    elif isinstance(error, RepositoryNotFoundError):
        why = f"{constants.ENDPOINT} has no such {'model' if kind == 'model' else 'data set'} that you may read"
        remedy = "mend the name, or `hf auth login` for a private one"
    elif constants.HF_HUB_OFFLINE:
        why = f"it is not whole in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
        remedy = "unset HF_HUB_OFFLINE, or name a folder"
    else:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = (
            f"it is not in the cache {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} did not give it ({first:.200})"
        )
        remedy = "connect to a network, or name a folder"
    if kind != "model":
        return f"data.tasks must name a data set that can be read, got {name}: {why}; {remedy}"
    return (
        f"model.path must be a folder, a model of the Hugging Face hub or `tiny`, got {name}: {Path(name).absolute()} is not a "
        f"folder, and {why}; {remedy}"
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
