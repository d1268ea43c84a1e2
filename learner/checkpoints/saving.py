"""Writes a checkpoint of the ranks' state: into scratch, then committed whole.

Called by `learner.learn_loop` and `learner.sft_loop`. Invariants: what was not committed is removed; a disk that does not take it
is waited for, until the run is to stop. Which are kept, `learner.checkpoints.store` decides.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from buffers.disk import until_written
from buffers.errors import StorageFull
from buffers.records import Position
from learner.checkpoints.store import Checkpoint, CheckpointError, CheckpointStore


class Saver(Protocol):
    """All ranks (`learner.training.ranks.LearnerRanks`)."""

    async def save(self, folder: Path) -> None: ...
    async def save_pretrained(self, folder: Path) -> None: ...


async def save_checkpoint(
    ranks: Saver,
    *,
    store: CheckpointStore,
    position: Position,
    score: Callable[[], float | None],
    say: Callable[[str], object],
    gives_up: Callable[[], bool],
    keeps: bool = True,
) -> Checkpoint | None:
    """The checkpoint; None with `keeps` false, which only tries whether it can be written. `score`: asked when all is written.
    Raises CheckpointError."""
    saved: Checkpoint | None = None

    async def write() -> None:
        nonlocal saved
        scratch = await asyncio.to_thread(store.scratch, position.step)
        try:
            await ranks.save(scratch / "learner")
            await ranks.save_pretrained(scratch / "model")
            if keeps:
                saved = await asyncio.to_thread(store.commit, scratch, position=position, score=score())
        finally:  # of what was not committed; the ledger may wait for its space
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)

    what = f"the checkpoint of step {position.step}"
    try:
        await until_written(write, what=what, folder=store.folder.parent, say=say, gives_up=gives_up)
    except (OSError, StorageFull) as error:
        raise CheckpointError(
            f"checkpoint of step {position.step} could not be written to {store.folder}: {error}; free space there, then resume "
            f"with --resume auto"
        ) from error
    return saved
