"""Weight synchronization: new weights go from the learner to the engine through a file in a fast folder.

Called by `learner.pipeline` (the folder, the engine's first weights) and `learner.learn_loop` (`publish`). Invariant: the
weights that were published last stay until the next ones are loaded, so that an engine that is restarted finds them there.

    sync = WeightSync(run_folder)
    engine = VLLMEngine(..., weights=sync.saved(checkpoint))     # a run that is resumed
    await sync.publish(ranks, engine, version=step)              # after each step
    sync.close()
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Protocol

from learner.checkpoints.store import WEIGHTS, Checkpoint


class Learner(Protocol):
    """Writes its weights into a file: `learner.training.ranks.LearnerRanks`."""

    async def publish(self, path: Path) -> None: ...


class Engine(Protocol):
    """Loads the weights of a folder, and frees its memory between: `mocked_server.vllm.engine.VLLMEngine`."""

    async def load_weights(self, folder: Path, *, version: int) -> None: ...
    async def sleep(self) -> None: ...
    async def wake_up(self) -> None: ...


class WeightSync:
    """One per run. `run`: the run's folder."""

    def __init__(self, run: Path) -> None:
        self.folder = _fast_folder(run)
        self._published: Path | None = None

    def saved(self, checkpoint: Checkpoint) -> tuple[Path, int]:
        """(folder, version) of a checkpoint's weights, for an engine that starts with them."""
        folder = self.folder / "saved"
        folder.mkdir()
        (folder / WEIGHTS).symlink_to((checkpoint.model / WEIGHTS).resolve())
        return folder, checkpoint.position.step

    async def publish(self, learner: Learner, engine: Engine, *, version: int) -> None:
        """Write the learner's weights and load them into the engine as `version`; generation pauses for the load only."""
        folder = Path(tempfile.mkdtemp(prefix=f"version-{version}-", dir=self.folder))
        await learner.publish(folder / WEIGHTS)
        await engine.load_weights(folder, version=version)
        if self._published is not None:
            shutil.rmtree(self._published)
        self._published = folder

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _fast_folder(run: Path) -> Path:
    """An empty folder in shared memory where the system has that, else in the run's folder; its name is the run's, so that what a
    killed process of this run left there is removed."""
    shm = Path("/dev/shm")
    place = shm if sys.platform == "linux" and shm.is_dir() else run
    folder = place / f"understudy-{hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16]}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder
