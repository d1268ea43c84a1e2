"""Weight synchronization: each new version goes from the learner's ranks to the engines as files in shared memory.

    ranks -> published/version-*  (a shard of each rank, a manifest)  -> the node's puller -> pulled/version-*  (dense) -> engines

Called by `learner.pipeline` (the folder, the engine's first weights) and `learner.learn_loop` (`publish`). Versions are
`buffers.weights`'s: patches against the one before while that pays, else dense. With LoRA a version is the adapter alone.
Invariant: the weights that were published last stay until the next ones are loaded, so that an engine that is restarted finds
them there.

    sync = WeightSync(run_folder)
    engine = VLLMEngine(..., weights=sync.saved(checkpoint))     # a run that is resumed
    await sync.publish(ranks, engine, version=step)              # after each step
    await sync.close()
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from buffers.errors import WeightsError
from buffers.weights.puller_process import PullerProcess
from buffers.weights.store import VersionStore
from configs.checkout import python_path
from learner.checkpoints.store import ADAPTER_WEIGHTS, WEIGHTS, Checkpoint
from learner.checkpoints.weight_shards import Published

logger = logging.getLogger(__name__)


class Learner(Protocol):
    """Writes its weights into a folder, one shard of each rank: `learner.training.ranks.LearnerRanks`."""

    async def publish(self, folder: Path, *, base: str | None) -> Sequence[Published]: ...


class Engine(Protocol):
    """Loads the weights of a folder, and frees its memory between: `mocked_server.vllm.engine.VLLMEngine`."""

    async def load_weights(self, folder: Path, *, version: int) -> float:
        """Returns the seconds for which it paused; of several engines, the longest pause."""
        ...

    async def sleep(self) -> None: ...
    async def wake_up(self) -> None: ...


class WeightSync:
    """One per run. `run`: the run's folder. `adapter`: only an adapter (LoRA) is trained and travels."""

    def __init__(self, run: Path, *, adapter: bool = False) -> None:
        self.folder = _fast_folder(run)
        self._file = ADAPTER_WEIGHTS if adapter else WEIGHTS
        self._adapter = adapter
        published, pulled = self.folder / "published", self.folder / "pulled"
        for folder in (published, pulled):
            folder.mkdir()
        self._store = VersionStore(published)
        self._puller = PullerProcess(published, pulled, file=self._file, python_path=python_path())

    def saved(self, checkpoint: Checkpoint) -> tuple[Path, int]:
        """(folder, version) of a checkpoint's weights, for an engine that starts with them."""
        folder = self.folder / "saved"
        folder.mkdir()
        there = checkpoint.adapter if self._adapter else checkpoint.model
        for name in [path.name for path in there.iterdir()] if self._adapter else [WEIGHTS]:
            (folder / name).symlink_to((there / name).resolve())
        return folder, checkpoint.position.step

    async def publish(self, learner: Learner, engine: Engine, *, version: int) -> dict[str, float]:
        """Publish the learner's weights as `version`, and load them into the engine; generation pauses for the load only.

        Returns figures of it. Raises WeightsError when there is no room for them."""
        base = self._store.base
        try:
            folder, figures = await self._bring(learner, version=version, base=base)
        except WeightsError as error:
            if base is None:
                raise
            logger.warning("version %d is published again, densely: %s", version, error)
            folder, figures = await self._bring(learner, version=version, base=None)
        figures["publish/paused_s"] = await engine.load_weights(folder, version=version)
        await self._puller.keep([folder.name])
        return figures

    async def _bring(self, learner: Learner, *, version: int, base: str | None) -> tuple[Path, dict[str, float]]:
        """The dense folder of a new version."""
        scratch = self._store.begin(version)
        written = await learner.publish(scratch, base=base)
        first = written[0]
        extra = {} if first.description is None else {"adapter_config.json": first.description}
        manifest = self._store.commit(
            scratch, version=version, base=base, shards=[one.shard for one in written], extra=extra
        )
        figures = {"publish/bytes": float(manifest.num_bytes)}
        if first.changed_share is not None:
            figures["publish/changed_share"] = first.changed_share
        return await self._puller.pull(manifest.name), figures

    async def close(self) -> None:
        """Ends the puller and removes the folder."""
        await self._puller.close()
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
