"""A run's folder: whether it holds a run to resume, and an empty one for a new run.

Called by `learner.run` before anything starts and by `learner.session`. Invariant: an earlier run is moved aside, never
overwritten.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from buffers.errors import UnderstudyError
from learner.checkpoints.store import Checkpoint, CheckpointError, CheckpointStore, read_checkpoint

LEDGER = "ledger.sqlite"
CONFIG = "config.yaml"


def find_resume(folder: Path, *, resume: str, elsewhere: bool = False) -> tuple[bool, Checkpoint | None]:
    """Whether `folder` holds a run to resume, and from which checkpoint (None: from its start). Raises CheckpointError.

    `resume`: nothing (a fresh run), `auto` (the newest checkpoint; a fresh run when there is no run yet), or a checkpoint.
    `elsewhere`: the ledger is on another node's disk.
    """
    has_books = (folder / (CONFIG if elsewhere else LEDGER)).is_file()
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


def check_place(folder: Path) -> None:
    """Raises UnderstudyError where this folder cannot be made."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "is no folder" if not there.is_dir() else "cannot be written"
        raise UnderstudyError(
            f"run.dir must be a folder that can be written, got {folder.parent}: {there.absolute()} {what}; set run.dir"
        )


def fresh_folder(folder: Path) -> Path:
    """An empty folder of this name; an earlier run of the same name is moved aside, never overwritten."""
    if folder.exists():
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(folder.stat().st_mtime))
        aside = folder.with_name(f"{folder.name}.{stamp}")
        number = 1
        while aside.exists():
            number += 1
            aside = folder.with_name(f"{folder.name}.{stamp}-{number}")
        folder.rename(aside)
    folder.mkdir(parents=True)
    return folder
