"""A run's folder: whether it holds a run to resume, and an empty one for a new run.

Called by `learner.run` before anything starts, by `learner.session` and by `learner.evaluate`. Invariants: an earlier run is moved
aside, never overwritten, and a folder that is no run is left alone; what is found by the folder's path (the folder, the versions in
shared memory) is one living run's.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import yaml

from buffers.disk import check_takes, replacing, why_refused
from buffers.errors import UnderstudyError
from configs.schema import Config
from learner.checkpoints.store import (
    ADAPTER,
    ADAPTERS,
    COUNTERS,
    REFERENCE,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    read_checkpoint,
)

LEDGER = "ledger.sqlite"
CONFIG = "config.yaml"
LOG = "log.txt"
EVALUATION = "evaluation.json"
"""What an evaluation's folder has from its beginning, and a run's never."""
NOT_COMPARED = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "quantization_config")
"""Keys of a model's config.json that a checkpoint of it may say otherwise."""


def find_resume(folder: Path, *, resume: str, has_ledger: bool = True) -> tuple[bool, Checkpoint | None]:
    """Whether `folder` holds a run to resume, and from which checkpoint (None: from its start). Raises CheckpointError.

    `resume`: nothing (a fresh run), `auto` (the newest checkpoint; a fresh run when there is no run yet), or a checkpoint.
    `has_ledger`: the run has a ledger, on this machine.
    """
    if resume and (folder / EVALUATION).is_file():
        raise CheckpointError(
            f"a run that is resumed must be one that trains, got {folder}, which is an evaluation; name the run, or evaluate again "
            f"with `understudy eval`"
        )
    if resume and folder.is_dir():
        _check_links(folder)
    has_books = (folder / (LEDGER if has_ledger else CONFIG)).is_file()
    if resume in ("", "auto"):
        again = resume == "auto" and has_books
        return again, CheckpointStore(folder / "checkpoints", keep=1).newest() if again else None
    checkpoint = read_checkpoint(Path(resume))
    if checkpoint.folder.resolve().parent.parent != folder.resolve():
        raise CheckpointError(
            f"--resume must name a checkpoint of this run, in {folder / 'checkpoints'}, got {resume}; set run.dir and "
            f"run.name to that run's, or start a new run from its weights with model.path={checkpoint.model}"
        )
    if not has_books:
        raise CheckpointError(
            f"--resume needs the ledger that belongs to the checkpoint, got no {folder / LEDGER}; put it back, or "
            f"start a new run from its weights with model.path={checkpoint.model}"
        )
    return True, checkpoint


def _check_links(folder: Path) -> None:
    """Raises CheckpointError for a link out of a run's folder where the run writes or reads: it would write to a file of yours that
    the sender of the folder has named. `checkpoints` may be on another disk; `model` has links to where it came from."""
    own = {folder.resolve(), (folder / "checkpoints").resolve()}
    logs = (folder / "agents").glob("*/*.*")
    for path in (
        *(each for each in folder.iterdir() if each.name != "checkpoints"),
        *(folder / "checkpoints").rglob("*"),
        *logs,
    ):
        if path.is_symlink() and not own & {*path.resolve().parents}:
            raise CheckpointError(
                f"what a resumed run writes must lie in its folder, got {path}, a link to {path.resolve()}; remove it, or put "
                f"a copy there"
            )


def _read(path: Path) -> Mapping[str, Any]:
    def compared(part: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in part.items() if name not in NOT_COMPARED}

    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), object_hook=compared)
    return found


def check_place(folder: Path, *, resumes: bool) -> None:
    """Raises UnderstudyError where this folder cannot be made, is another living run's or, of a new run, would take the place of
    what is no run. It only looks."""
    try:
        there = next(each for each in folder.absolute().parents if each.exists())
        for place in filter(Path.exists, (there, folder)):
            if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
                raise OSError(f"{place.absolute()} {'cannot be written' if place.is_dir() else 'is no folder'}")
        is_run = (folder / CONFIG).is_file() and any((folder / name).is_file() for name in (LEDGER, LOG))
        if not resumes and not is_run and folder.exists() and any(folder.iterdir()):
            raise UnderstudyError(
                f"run.dir and run.name must name a new folder, or that of an earlier run, got {folder.absolute()}, which is no "
                f"run; set run.name"
            )
    except OSError as error:
        raise UnderstudyError(
            f"run.dir must be a folder that can be written, got {folder.parent}: {error}; set run.dir"
        ) from None
    if _lock_file(folder).is_file():
        with _locked(folder):
            pass


def check_resumed(config: Config, checkpoint: Checkpoint) -> list[str]:
    """A line for each thing that begins anew with this configuration. Raises CheckpointError where the checkpoint is not one of
    this model, with these adapters and this critic."""
    learner, made = config.used_learner, checkpoint.folder.parent.parent / "model"
    folder = made if config.model.path == "tiny" or config.model.path.endswith(".gguf") else Path(config.model.path)
    adapters = [
        *checkpoint.model.glob(f"{ADAPTER}/adapter_config.json"),
        *sorted(checkpoint.model.glob(f"{ADAPTERS}/*/adapter_config.json")),
    ]
    try:
        there, here = (_read(place / "config.json") for place in (checkpoint.model, folder))
        described = [_read(path) for path in adapters]
        counters = [_read(path) for path in checkpoint.learner.glob(f"**/{COUNTERS}")]
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.folder} cannot be compared with model.path={config.model.path}: {error}; resume from "
            f"another one, or with the model.path that it was saved with"
        ) from None
    critic = "none"
    if (checkpoint.model / "critic").is_dir():
        critic = "separate" if any("critic" in (each.get("learned") or ()) for each in counters) else "shared"
    saved = {
        **{f"{name} of model.path": value for name, value in there.items() if name in here},
        "learner.lora.rank": described[0]["r"] if described else 0,
        "learner.lora.alpha": described[0]["lora_alpha"] if described else learner.lora.alpha,
        "roles with learner.lora.per_role": [path.parent.name for path in adapters if path.parent.name != ADAPTER],
        "learner.critic": critic,
    }
    given = {
        **{f"{name} of model.path": value for name, value in here.items()},
        "learner.lora.rank": learner.lora.rank,
        "learner.lora.alpha": learner.lora.alpha,
        "roles with learner.lora.per_role": sorted(config.adapter_roles),
        "learner.critic": learner.critic if learner.advantage == "gae" else "none",
    }
    for name, value in saved.items():
        if given[name] != value:
            raise CheckpointError(
                f"{name} must be that of the checkpoint {checkpoint.folder}, {value}, got {given[name]}; resume with what "
                f"it was saved with, or start a new run from its weights with model.path={checkpoint.model}"
            )
    if learner.kl.coef == learner.hints.coef == 0.0 or any(REFERENCE in each["copies"] for each in counters):
        return []
    step = checkpoint.position.step
    return [
        f"learner.kl.coef and learner.hints.coef were 0 so far: the reference is the policy after step {step}, not the first one"
    ]


def write_config(folder: Path, config: Config) -> None:
    """`config.yaml`: every key, as it is used; whole or not at all."""
    with replacing(folder / CONFIG) as scratch:
        scratch.write_text(yaml.safe_dump(config.model_dump(), sort_keys=False), encoding="utf-8")


@contextmanager
def claimed(folder: Path, *, resume: str = "", has_ledger: bool = True) -> Iterator[tuple[bool, Checkpoint | None]]:
    """The folder of a run while it lives: what `find_resume` says and, of a new run, an empty folder, an earlier run of that name
    being moved aside. Raises UnderstudyError where another process has it, and for what its disk did not take in the block."""
    with _locked(folder):
        again, checkpoint = find_resume(folder, resume=resume, has_ledger=has_ledger)
        with _taken_by_disk(folder):
            check_takes(folder if folder.is_dir() else folder.resolve().parent)
            if not again and folder.exists() and any(folder.iterdir()):
                stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(folder.stat().st_mtime))
                aside, number = folder.with_name(f"{folder.name}.{stamp}"), 1
                while aside.exists():
                    number += 1
                    aside = folder.with_name(f"{folder.name}.{stamp}-{number}")
                folder.rename(aside)
            folder.mkdir(parents=True, exist_ok=True)
            yield again, checkpoint


@contextmanager
def _taken_by_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not (why := why_refused(error)):
            raise
        raise UnderstudyError(
            f"run.dir must be on a disk that takes files, got {folder.parent.absolute()}: {why}; free space there, then run the "
            f"same command again"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A lock beside the folder, which may move. It ends with the process however that dies, and is not handed on to its children;
    closing any descriptor of its file ends it too."""
    with _taken_by_disk(folder):
        folder.resolve().parent.mkdir(parents=True, exist_ok=True)
        file = _lock_file(folder).open("a+", encoding="utf-8")
    with file as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            lock.seek(0)
            raise UnderstudyError(
                f"run.name must not be that of a run that lives, got {folder} ({lock.read()}); end that one, or set another "
                f"run.name"
            ) from None
        with _taken_by_disk(folder):
            lock.truncate(0)
            os.write(lock.fileno(), f"process {os.getpid()} on {platform.node()}".encode())
        yield


def _lock_file(folder: Path) -> Path:
    folder = folder.resolve()
    return folder.with_name(f".{folder.name}.lock")


# The keys of a run, for programs that are started by hand: `set -a; . runs/<name>/agent.env; python my_agent.py`. Written by
# `learner.pipeline` once the server listens, removed when it ends: the keys open nothing afterwards. The files are readable by
# their owner only (SECURITY.md: a reader of them is the agent, the scorer or the administrator).


class Keys(Protocol):
    """The keys of a run, by what they may call."""

    worker: str
    scorer: str
    admin: str


class Server(Protocol):
    """What the files say about the server."""

    @property
    def keys(self) -> Keys: ...
    @property
    def base_url(self) -> str: ...
    @property
    def admin_url(self) -> str: ...
    @property
    def num_processes(self) -> int: ...
    def environment(self, key: str, *, process: int | None = None) -> dict[str, str]: ...


@contextmanager
def environment_files(folder: Path, server: Server) -> Iterator[None]:
    """Writes a file each for agents, scorers and the administrator, with variables as shell assignments; removes them in the
    end."""
    paths = []
    try:
        for name, variables in _files_of(server).items():
            path = folder / name
            paths.append(path)
            lines = [f"{variable}={shlex.quote(value)}\n" for variable, value in variables.items()]
            with replacing(path) as scratch:  # a program that waits for the file reads all of it
                scratch.touch(mode=0o600)
                scratch.write_text("".join(lines), encoding="utf-8")
        yield
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _files_of(server: Server) -> dict[str, dict[str, str]]:
    """Agents and scorers each have a key of their own; agents a file for each server process."""
    return {
        "agent.env": server.environment(server.keys.worker),
        "scorer.env": {"SERVER_URL": server.base_url, "SCORER_KEY": server.keys.scorer},
        "admin.env": {"SERVER_URL": server.admin_url, "ADMIN_KEY": server.keys.admin},
        **{
            f"agent-{process}.env": server.environment(server.keys.worker, process=process)
            for process in range(1, server.num_processes)
        },
    }
