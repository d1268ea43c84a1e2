"""The checkpoints of a run: their folders, which of them are complete, and which are kept.

Called by `learner.learn_loop`, and by `learner.session` to find the one to resume from. A checkpoint is written into a
scratch folder beside the others, flushed to disk and renamed: a folder `step-*` is complete, whenever the run was killed.
What a crash left behind is removed with the next checkpoint. It writes no tensors
(`learner.checkpoints.training_state`, `learner.checkpoints.weight_shards`).

    <run>/checkpoint -> the newest one's model/
    <run>/checkpoints/step-000020/
        run.json        position in the ledger, policy version, score
        learner/        torch DCP: everything that training needs to resume
        model/          Hugging Face folder: what transformers and vLLM load
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from buffers.disk import replacing
from buffers.errors import UnderstudyError
from buffers.records import Position

RECORD = "run.json"
WEIGHTS = "model.safetensors"
"""File name in a folder that engines load."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""File name in the folder of an adapter, as peft has it."""
ADAPTER, ADAPTERS = "adapter", "adapters"
"""Folders in that of a model: of its adapter, or of those of its roles, by name."""
COUNTERS = "counters.json"
"""File name of the learner's state that is no tensor."""
REFERENCE = "reference"
"""Name of the reference weights in a checkpoint; older versions are named by their number."""
VERSIONS = "versions.json"
"""File name beside these: the version of each role."""
FORMAT = 1
_PREFIX = "step-"


class CheckpointError(UnderstudyError):
    """A folder is no complete checkpoint of this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete one."""

    folder: Path
    position: Position
    score: float | None
    """The figure by which the best one is kept: the mean score that these weights had in their validation (None: they have none
    yet); in a run without validation the mean of the last batches."""

    @property
    def learner(self) -> Path:
        return self.folder / "learner"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def adapter(self) -> Path:
        """The folder of its adapter, as peft loads it; with LoRA only."""
        return self.model / ADAPTER


class CheckpointStore:
    """`<run folder>/checkpoints`. Keeps the newest `keep` and the best one."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def all(self) -> list[Checkpoint]:
        """Complete ones, oldest first."""
        found = [read_checkpoint(path) for path in self.folder.glob(f"{_PREFIX}*") if (path / RECORD).is_file()]
        return sorted(found, key=lambda one: (one.position.lineage, one.position.step))

    def newest(self) -> Checkpoint | None:
        return next(reversed(self.all()), None)

    def scratch(self, step: int) -> Path:
        """An empty folder to write into."""
        folder = self.folder / f".{_PREFIX}{step:06d}.tmp"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def commit(self, scratch: Path, *, position: Position, score: float | None) -> Checkpoint:
        """Make what was written into `scratch` a checkpoint, durably, and remove those that need not be kept."""
        target = self.folder / _name(position)
        if target.is_dir():  # the run ended where it was resumed, or the disk was full when this had its name
            shutil.rmtree(scratch)
        else:
            record: dict[str, Any] = {"format": FORMAT, **asdict(position), "score": score}
            (scratch / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            _flush(scratch)
            scratch.rename(target)
            _flush_folder(self.folder)
        self.point_to(target / "model")
        self._prune()
        return read_checkpoint(target)

    def rescore(self, checkpoint: Checkpoint, score: float) -> Checkpoint:
        """Write the score of weights that were validated after they were saved, durably."""
        path = checkpoint.folder / RECORD
        if not path.is_file():  # it was not kept
            return checkpoint
        record = json.loads(path.read_text(encoding="utf-8")) | {"score": score}
        with replacing(path) as scratch, scratch.open("w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _flush_folder(checkpoint.folder)
        return replace(checkpoint, score=score)

    def point_to(self, model: Path) -> None:
        """`<run>/checkpoint` is this Hugging Face folder; after a commit it is the newest."""
        link = self.folder.parent / ".checkpoint.new"
        link.unlink(missing_ok=True)
        link.symlink_to(model.relative_to(self.folder.parent))
        link.replace(self.folder.parent / "checkpoint")

    def _prune(self) -> None:
        every = self.all()
        scored = [one for one in every if one.score is not None]
        best = max(scored, key=lambda one: one.score or 0.0, default=None)
        for old in every[: -self._keep]:
            if best is None or old.folder != best.folder:
                # Renamed first: a folder that is half removed must not look complete.
                gone = old.folder.with_name(f".{old.folder.name}.old")
                shutil.rmtree(gone, ignore_errors=True)
                old.folder.rename(gone)
        for left in self.folder.glob(".*"):
            shutil.rmtree(left, ignore_errors=True)


def _name(position: Position) -> str:
    """Another lineage's checkpoint of the same step is another folder."""
    suffix = f".{position.lineage}" if position.lineage else ""
    return f"{_PREFIX}{position.step:06d}{suffix}"


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`. Raises CheckpointError."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if record.pop("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        score = record.pop("score")
        return Checkpoint(folder=folder, position=Position(**record), score=score)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"--resume must be `auto` or name a complete checkpoint folder (runs/<name>/checkpoints/step-*), got "
            f"{folder} ({error}); list that folder"
        ) from None


def saved_versions(model: Path) -> dict[str, int]:
    """Role -> version of the adapters in a model's folder; empty: it has none."""
    path = model / ADAPTERS / VERSIONS
    found: dict[str, int] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _flush(folder: Path) -> None:
    """Everything below `folder`, and the folders themselves, to disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            _flush_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
