"""Checks of what a configuration names, made before anything of a run exists: task files, model, programs.

Called by `learner.run` before torch and vLLM are imported, before a run folder is made and before an earlier run is moved
aside; the rules for files are also those of `learner.startup.model_and_tasks`. Invariants: nothing is written; a message begins
with the configuration key and has the absolute path. What `data.make` is to write is not asked for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TypeVar, cast

from buffers.errors import TaskError, UnderstudyError
from buffers.records import Task
from buffers.tasks.parquet import agent_names, read_demonstrations, read_tasks
from configs.model_folder import has_chat_template, has_experts, has_remote_code, quantization, weight_files
from configs.schema import Config
from learner.startup.hub import is_dataset, is_hub_model

T = TypeVar("T")
FIRST_ROWS = 1000
"""Rows of a task file that are read here; all of them are, before the engine starts."""
TEMPLATE_REMEDY = "put chat_template.jinja into the folder, or name a model that was tuned for conversations"
SCRIPTS = (".py", ".sh", ".js", ".mjs", ".ts", ".rb", ".pl")


def in_fork(compute: Callable[[], T]) -> T:
    """What `compute` gives, a value of JSON, in a forked process: what it imports, and the threads that this starts, are not this
    process's, which is to be forked of later. Raises the UnderstudyError that it raises."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) == 0:
        for number in (signal.SIGINT, signal.SIGTERM):  # the process that waits has the word
            signal.signal(number, signal.SIG_DFL)
        os.close(reading)
        _answer(compute, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as source:
        told = source.read()
    os.waitpid(pid, 0)
    if not told:
        raise UnderstudyError("the configuration could not be checked, for the error above; mend it first")
    refused, found = json.loads(told)
    if refused is not None:
        raise UnderstudyError(refused)
    return cast(T, found)


def _answer(compute: Callable[[], object], writing: int) -> None:
    """Runs in the fork, where a defect (of a scorer's module, for example) is printed with its traceback."""
    code = 1
    try:
        try:
            told: tuple[str | None, object] = None, compute()
        except UnderstudyError as error:
            told = str(error), None
        with os.fdopen(writing, "w", encoding="utf-8") as sink:
            json.dump(told, sink)
        code = 0
    finally:
        if sys.exc_info()[0] is not None:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def check_files(config: Config, *, resumes: bool) -> None:
    """Raises TaskError for a task file or a model that is not there or cannot be used. `resumes`: from a checkpoint."""
    data, shown = config.data, {} if resumes else config.sft.files
    tasks = {} if config.learner.stage == "sft" else data.task_files
    named = [path for path in (*tasks, data.validation.tasks, *shown.values()) if path]
    is_made = bool(data.make) and not all(Path(path).is_file() or is_dataset(path) for path in named)
    files = {"data.tasks": list(tasks), "data.validation.tasks": [data.validation.tasks]}
    files |= {"serve.gate.tasks": [config.serve.gate.tasks]}
    if config.env.harbor.agent:  # folders of Harbor tasks, see agents.harbor.start_check
        files = {}
    for key, paths in files.items():
        for path in filter(None, paths):
            if not is_dataset(path) and (not is_made or Path(path).is_file()):
                check_tasks(key, path, first=FIRST_ROWS)
    gate = config.serve.gate.tasks
    if gate and not is_dataset(gate) and len(list(islice(read_tasks(Path(gate).absolute()), 2))) < 2:
        raise TaskError(
            f"serve.gate.tasks must have tasks to compare versions by, at least 2, got fewer in {gate}; add some"
        )
    for key, path in shown.items():
        if not is_made or Path(path).is_file():
            check_demonstrations(key, path)
    if not is_hub_model(config.model.path):
        check_policy(config)


def check_tasks(
    key: str, path: str, *, first: int | None = None, check: Callable[[Task], None] = lambda _: None
) -> Mapping[str | None, int]:
    """Reads the first rows of a task file, or all, with `check` of each; the agents that they name, with the row that named each
    first. Raises TaskError."""
    if first is None:
        return _named(key, path, partial(agent_names, check=check))
    _named(key, path, lambda file: list(islice(read_tasks(file), first)))
    return {}


def check_demonstrations(key: str, path: str) -> None:
    """Reads the first demonstration. Raises TaskError."""
    _named(key, path, lambda file: next(read_demonstrations(file)))


def _named(key: str, path: str, read: Callable[[Path], T]) -> T:
    """What `read` gives of this file. Its error is raised with the key's name."""
    try:
        return read(Path(path).absolute())
    except TaskError as error:
        here = (
            "" if Path(path).is_absolute() or Path(path).exists() else " (paths are relative to the folder you are in)"
        )
        raise TaskError(f"{key}={path}: {error}{here}") from error


def check_model(path: str) -> Path:
    """The folder of the policy's model; `tiny` is made later. Raises TaskError."""
    others = ", a model of the Hugging Face hub (OWNER/NAME) or `tiny`"
    if path == "tiny" or (path.endswith(".gguf") and Path(path).is_file()):
        return Path(path)
    return check_model_folder("model.path", path, others=others)


def check_policy(config: Config) -> None:
    """The policy's model, in all that can be told before torch is imported. Raises TaskError; meant for `in_fork`, as transformers
    may be imported."""
    folder = check_model(config.model.path)
    for key in ("router_replay", "router_aux_coef"):
        if getattr(config.learner, key) and folder.suffix != ".gguf" and not has_experts(folder):
            raise TaskError(
                f"learner.{key} needs a mixture of experts, got model.path={config.model.path} without experts; leave "
                f"learner.{key} out"
            )
    if config.model.path == "tiny":
        return
    if folder.suffix == ".gguf":
        if find_spec("gguf") is None:
            raise TaskError(
                f"model.path={folder} needs the package gguf, which reads such files, got none; pip install gguf, or name the "
                f"folder of the model that it was made of"
            )
        return
    if (method := quantization(folder).get("quant_method", "fp8")) != "fp8":
        raise TaskError(
            f"model.path must name a model of plain weights, or of FP8 in blocks, got {folder} with quantization_config {method}; "
            f"use the model as it was before it was quantized"
        )
    if has_remote_code(folder) and not config.model.trust_remote_code:
        _check_known(folder)
    plain = bool(config.data.scorer) and not (config.agents.command or config.agents.loops or config.env.harbor.agent)
    if (plain or config.sft.demonstrations) and not has_chat_template(folder):
        what = "plain prompts need" if plain else "sft.demonstrations needs"
        raise TaskError(f"{what} a chat template, got {folder} without one; {TEMPLATE_REMEDY}")


def _check_known(folder: Path) -> None:
    """Raises TaskError where transformers has no code of its own for a folder that brings code."""
    from transformers import AutoConfig, AutoTokenizer

    for read in (AutoConfig, AutoTokenizer):
        try:
            read.from_pretrained(folder, trust_remote_code=False)
        except (ValueError, OSError, ImportError) as error:
            if "trust_remote_code" in str(error):
                raise TaskError(
                    f"model.trust_remote_code must be true for {folder}, whose config names code of its own that transformers does "
                    f"not have, got false; read that code, then set model.trust_remote_code=true"
                ) from error


def check_model_folder(key: str, path: str, *, others: str = "") -> Path:
    """The folder, which has a model. `others`: what else the key may say. Raises TaskError."""
    folder = Path(path)
    remedy = "name the folder that has the model's files"
    if folder.is_dir():
        try:
            if not (folder / "config.json").is_file():
                what = "has no config.json"
            elif not weight_files(folder):
                what = "has no weights, *.safetensors or *.bin"
            else:
                return folder
        except ValueError as error:
            raise TaskError(str(error).replace("model.path", key, 1)) from None
    else:
        what = "is not a folder"
    raise TaskError(f"{key} must be a Hugging Face folder{others}, got {path} ({folder.absolute()} {what}); {remedy}")


def check_script(key: str, command: Sequence[str]) -> None:
    """Raises UnderstudyError for a command whose first argument is a script that is not there: `[python, agnt.py]`."""
    for word in command[1:]:
        if word in ("-c", "-m", "-e"):
            return
        if not word.startswith("-"):
            if word.endswith(SCRIPTS) and " " not in word and not Path(word).is_file():
                raise UnderstudyError(
                    f"{key} must name a script that is there, got {word!r} ({Path(word).absolute()} is not a file); paths are "
                    f"relative to the folder you are in"
                )
            return
