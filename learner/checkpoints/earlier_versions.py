"""Earlier versions of the policy, for roles that play it as it was some versions ago (a negative `frozen`).

Called by `learner.checkpoints.weight_sync` with each version that is published. A copy of each is kept on disk, in the run's
folder, as long as a role may still need it: `age` + 1 of them. Invariants: a follower plays exactly the version that is `age`
versions old, or the oldest there is in the first steps; a run that is resumed finds the versions that it had.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from buffers.disk import until_written

PREFIX = "version-"


class Engine(Protocol):
    """Plays the version that it was given last."""

    async def load_weights(self, folder: Path, *, version: int) -> float: ...


@dataclass(slots=True)
class Follower:
    """An engine that stays `age` versions behind. `version`: the one that it has; None: none was given to it."""

    engine: Engine
    age: int
    version: int | None = None


class EarlierVersions:
    """`folder`: its own, in the run's."""

    def __init__(self, folder: Path, *, followers: Sequence[Follower], say: Callable[[str], object]) -> None:
        self._folder = folder
        self._say = say
        self._followers = list(followers)
        self._most = max(follower.age for follower in followers)

    async def begin(self, *, checkpoint: tuple[Path, int] | None) -> None:
        """Call it before the first version of this process. `checkpoint`: (folder, version) of the weights that it resumes from;
        what was kept of later ones is of steps that are made again."""
        after = -1 if checkpoint is None else checkpoint[1]
        for version in self._kept():
            if version > after:
                await asyncio.to_thread(shutil.rmtree, self._at(version))
        if checkpoint is not None:
            if after not in self._kept():
                await self._keep(*checkpoint)
            await self._follow(after)

    async def published(self, folder: Path, *, version: int) -> None:
        """Keep a new version, and give the followers theirs."""
        await self._keep(folder, version)
        await self._follow(version)
        for old in self._kept():
            if old < version - self._most:
                await asyncio.to_thread(shutil.rmtree, self._at(old))

    async def _follow(self, newest: int) -> None:
        kept = self._kept()
        for follower in self._followers:
            wanted = max((version for version in kept if version <= newest - follower.age), default=kept[0])
            if follower.version != wanted:
                await follower.engine.load_weights(self._at(wanted), version=wanted)
                follower.version = wanted

    async def _keep(self, folder: Path, version: int) -> None:
        await until_written(
            partial(asyncio.to_thread, self._copy, folder, version), what=f"version {version} for the roles that play earlier ones",
            folder=self._folder, say=self._say,
        )  # fmt: skip

    def _copy(self, folder: Path, version: int) -> None:
        scratch = self._folder / f".{PREFIX}{version}"
        for left in (scratch, self._at(version)):
            shutil.rmtree(left, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            for file in folder.iterdir():
                shutil.copyfile(file, scratch / file.name)  # links are followed
            scratch.rename(self._at(version))
        except OSError:
            shutil.rmtree(scratch, ignore_errors=True)
            raise

    def _kept(self) -> list[int]:
        return sorted(int(path.name.removeprefix(PREFIX)) for path in self._folder.glob(f"{PREFIX}*"))

    def _at(self, version: int) -> Path:
        return self._folder / f"{PREFIX}{version}"
