"""The published versions of each role's adapter, which come and go by themselves.

Built by `learner.engines` in the place of one `WeightSync`, where roles have adapters of their own. Each role has a `WeightSync`,
so that a new version of one leaves the others' files alone. Invariant: a role is published whenever its version is another than
the one that the engines have, and not otherwise; after the learner's processes died, all are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from learner.checkpoints.store import ADAPTERS, saved_versions
from learner.checkpoints.weight_shards import Published
from learner.checkpoints.weight_sync import Engine, Learner, WeightSync


@runtime_checkable
class RoleLearner(Protocol):
    """Has an adapter for each role: `learner.training.ranks.LearnerRanks`."""

    async def publish(self, folder: Path, *, base: str | None, role: str = "") -> Sequence[Published]: ...
    async def versions(self) -> Mapping[str, int]: ...


@runtime_checkable
class RoleEngine(Protocol):
    """Serves an adapter for each role: `mocked_server.fleet.engine_fleet.EngineFleet`."""

    async def load_adapter(self, folder: Path, *, role: str, version: int) -> float: ...


class RoleWeights(WeightSync):
    """`roles`: the names of those that are trained. `saved`: the folder of a model, whose adapters of roles engines begin with,
    where it has such. `run`: see `WeightSync`; all ranks and engines are on this node."""

    def __init__(self, run: Path, *, roles: Sequence[str], saved: Path | None = None) -> None:
        super().__init__(run, adapter=True)
        self._model = saved
        self._of_roles = {role: WeightSync(run, adapter=True, folder=self.folder / "roles" / role) for role in roles}
        self._there: dict[str, int] = {}
        """Role -> the version that the engines have."""

    async def publish(self, learner: Learner, engine: Engine, *, version: int) -> dict[str, float]:
        """Publish the roles that have a version which engines do not; figures of that. `version` is the step's number, by which no
        role counts. Raises WeightsError."""
        assert isinstance(learner, RoleLearner) and isinstance(engine, RoleEngine)
        figures: dict[str, float] = {"publish/bytes": 0.0, "publish/paused_s": 0.0}
        for role, newest in (await learner.versions()).items():
            if self._there.get(role) == newest:
                continue
            began, own = time.monotonic(), _OneEngine(engine, role=role)
            found = await self._of_roles[role].publish(_OneLearner(learner, role=role), own, version=newest)
            self._there[role] = newest
            figures["publish/bytes"] += found["publish/bytes"]
            figures["publish/paused_s"] = max(figures["publish/paused_s"], found["publish/paused_s"])
            figures[f"adapter/{role}/publish_s"] = time.monotonic() - began
            figures[f"adapter/{role}/swap_s"] = own.took_s
        return figures

    def renew(self) -> None:
        """The learner's processes are new ones: all roles are published the next time."""
        self._there = {}

    async def load_saved(self, engine: RoleEngine) -> None:
        """Give the engines the adapters of the saved model, before they start."""
        if (model := self._model) is None:
            return
        for role, version in saved_versions(model).items():
            folder = self.folder / "roles" / role / "saved"
            folder.mkdir()
            for path in (model / ADAPTERS / role).iterdir():
                (folder / path.name).symlink_to(path.resolve())
            await engine.load_adapter(folder, role=role, version=version)
            self._there[role] = version

    async def close(self) -> None:
        """Ends what serves the roles, and removes the folder."""
        await asyncio.gather(*(sync.close() for sync in self._of_roles.values()))
        await super().close()


class _OneLearner:
    """A learner, seen by what publishes one role."""

    def __init__(self, learner: RoleLearner, *, role: str) -> None:
        self._learner = learner
        self._role = role

    async def publish(self, folder: Path, *, base: str | None) -> Sequence[Published]:
        return await self._learner.publish(folder, base=base, role=self._role)


class _OneEngine:
    """Engines, seen by what publishes one role. `took_s`: from its files to the version that is served."""

    def __init__(self, engine: RoleEngine, *, role: str) -> None:
        self._engine = engine
        self._role = role
        self.took_s = 0.0

    async def load_weights(self, folder: Path, *, version: int) -> float:
        began = time.monotonic()
        paused_s = await self._engine.load_adapter(folder, role=self._role, version=version)
        self.took_s = time.monotonic() - began
        return paused_s

    async def sleep(self) -> None: ...
    async def wake_up(self) -> None: ...
