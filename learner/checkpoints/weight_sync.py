"""Weight synchronization: each new version goes from the learner's ranks to the engines as files in shared memory.

    ranks -> published/version-*  (a shard of each rank, a manifest)  -> a node's puller -> pulled/version-*  (dense) -> engines

Called by `learner.pipeline` (the folder, the engine's first weights) and `learner.learn_loop` (`publish`). Versions are
`buffers.weights`'s: patches against the one before while that pays, else dense. With LoRA a version is the adapter alone.
Invariant: the weights that were published last stay until the next ones are loaded, so that an engine that is restarted finds
them there. Other nodes (`join`) have folders of their own in memory: the shards of their ranks are served from there, and their
puller takes what it lacks over the wire.

    sync = WeightSync(run_folder)
    engine = VLLMEngine(..., weights=sync.saved(checkpoint))     # a run that is resumed
    await sync.publish(ranks, engine, version=step)              # after each step
    await sync.close()
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

from buffers.disk import until_written
from buffers.errors import WeightsError
from buffers.weights.node_weights import PUBLISHED, PULLED, WeightNode, same_on
from buffers.weights.puller_process import PullerProcess
from buffers.weights.store import VersionStore
from buffers.weights.version_server import VersionServer
from configs.child_processes import goes_with_this_process
from configs.fork_server import own_context
from learner.checkpoints.store import ADAPTER_WEIGHTS, ADAPTERS, WEIGHTS, Checkpoint, saved_versions
from learner.checkpoints.weight_shards import Published

logger = logging.getLogger(__name__)


class Learner(Protocol):
    """Writes its weights, or a role's adapter, into a folder, one shard of each rank: `learner.training.ranks.LearnerRanks`."""

    async def publish(self, folder: Path, *, base: str | None, role: str = "") -> Sequence[Published]: ...


class Engine(Protocol):
    """Loads the weights of a folder, and frees its memory between: `mocked_server.vllm.engine.VLLMEngine`."""

    async def load_weights(self, folder: Path, *, version: int) -> float:
        """Returns the seconds for which it paused; of several engines, the longest pause."""
        ...

    async def sleep(self) -> None: ...
    async def wake_up(self) -> None: ...


class KeepsVersions(Protocol):
    """Copies each version that engines were given: `EarlierVersions`, `learner.live_versions.Versions`."""

    async def published(self, folder: Path, *, version: int) -> None: ...


class WeightSync:
    """One per run. `run`: the run's folder. `adapter`: only an adapter (LoRA) is trained and travels. `host`: the address at which
    other nodes reach this one, `secret`: of the wire between them. `rank_nodes`: the node of each rank, by Ray's name; empty for
    one on this node. `make_node(node_id, sync)`: the weights on another node. `folder`: a new one in the place of the run's own.
    `role`: whose adapter travels, where each has its own."""

    def __init__(
        self,
        run: Path,
        *,
        adapter: bool = False,
        host: str = "127.0.0.1",
        secret: bytes = b"",
        rank_nodes: Callable[[], Sequence[str]] = tuple,
        make_node: Callable[[str, WeightSync], WeightNode] | None = None,
        folder: Path | None = None,
        role: str = "",
    ) -> None:
        self.folder = folder or _fast_folder(run)
        self.file = ADAPTER_WEIGHTS if adapter else WEIGHTS
        self.secret = secret
        self._adapter = adapter
        self._role = role
        self._host = host
        self._rank_nodes = rank_nodes
        self._make_node = make_node
        published, pulled = self.folder / PUBLISHED, self.folder / PULLED
        for folder in (published, pulled):
            folder.mkdir(parents=True)
        self._store = VersionStore(published)
        self._puller = PullerProcess(own_context(), published, pulled, file=self.file, secret=secret)
        self._server: VersionServer | None = None
        self._dense_server: VersionServer | None = None
        """Serves what is pulled here, to nodes that join late."""
        self._nodes: dict[str, WeightNode] = {}
        self._joining = asyncio.Lock()
        self.earlier: KeepsVersions | None = None
        """Keeps versions, for the roles that play earlier ones or for users."""
        self._newest: str | None = None
        self._saved: tuple[Path, Path] | None = None
        """The folder of `saved`, and what it is of."""

    async def join(self, node_id: str) -> None:
        """Another node takes part from now on; returns when it has the newest version. Raises WeightsError."""
        async with self._joining:
            if node_id in self._nodes:
                return
            if self._server is None or self._dense_server is None:
                self._server = VersionServer(self._store.folder, secret=self.secret, host=self._host)
                self._dense_server = VersionServer(self.folder / PULLED, secret=self.secret, host=self._host)
            assert self._make_node is not None, "this run has no other nodes"
            node = self._make_node(node_id, self)
            await node.start()
            if self._newest is not None:
                await node.copy(self._newest, home=str(self._dense_server.address))
            self._nodes[node_id] = node

    async def leave(self, node_id: str) -> None:
        """A node is gone. Does nothing for one that never joined."""
        if (node := self._nodes.pop(node_id, None)) is not None:
            await node.close()

    def on_node(self, folder: Path, node_id: str) -> Path:
        """The folder that another node has of these weights: what `publish` gave to engines, or `saved`."""
        if self._saved is not None and folder == self._saved[0]:
            return self._saved[1]
        return same_on(folder, node_id)

    def saved(self, checkpoint: Checkpoint) -> tuple[Path, int]:
        """(folder, version) of a checkpoint's weights, for an engine that starts with them."""
        folder = self.folder / "saved"
        folder.mkdir()
        there = checkpoint.adapter if self._adapter else checkpoint.model
        for name in [path.name for path in there.iterdir()] if self._adapter else [WEIGHTS]:
            (folder / name).symlink_to((there / name).resolve())
        self._saved = folder, there.resolve()
        return folder, checkpoint.position.step

    async def publish(self, learner: Learner, engine: Engine, *, version: int) -> dict[str, float]:
        """Publish the learner's weights as `version`, and load them into the engine; generation pauses for the load only.

        Returns figures of it. Raises WeightsError when there is no room for them."""
        for node_id in filter(None, self._rank_nodes()):
            await self.join(node_id)
        base = self._store.base
        try:
            folder, figures = await self._bring(learner, version=version, base=base)
        except WeightsError as error:
            if base is None:
                raise
            logger.warning("version %d is published again, densely: %s", version, error)
            folder, figures = await self._bring(learner, version=version, base=None)
        began = time.monotonic()
        if isinstance(engine, RoleEngine) and self._role:
            figures["publish/paused_s"] = await engine.load_adapter(folder, role=self._role, version=version)
            figures["swap_s"] = time.monotonic() - began
        else:
            figures["publish/paused_s"] = await engine.load_weights(folder, version=version)
        if self.earlier is not None:
            await self.earlier.published(folder, version=version)
        await self._puller.keep([folder.name])
        kept = [path.name for path in self._store.folder.glob("version-*")]
        await self._on_others(lambda node: node.keep([folder.name], kept))
        return figures

    def renew(self) -> None:
        """The learner's processes are new ones, whose next version is dense by itself."""

    async def _bring(self, learner: Learner, *, version: int, base: str | None) -> tuple[Path, dict[str, float]]:
        """The dense folder of a new version."""
        scratch = self._store.begin(version)
        written = await learner.publish(scratch, base=base, **({"role": self._role} if self._role else {}))
        first = written[0]
        extra = {} if first.description is None else {"adapter_config.json": first.description}
        manifest = self._store.commit(
            scratch, version=version, base=base, shards=[one.shard for one in written], extra=extra
        )
        figures = {"publish/bytes": float(manifest.num_bytes)}
        if first.changed_share is not None:
            figures["publish/changed_share"] = first.changed_share
        shards = self._shards()
        async with self._joining:  # who joins is in time for this version, or begins with it
            folder, _ = await asyncio.gather(
                self._puller.pull(manifest.name, shards=shards),
                self._on_others(lambda node: node.pull(manifest.name, home=self._home, shards=shards)),
            )
            self._newest = manifest.name
        return folder, figures

    @property
    def _home(self) -> str:
        return "" if self._server is None else str(self._server.address)

    def _shards(self) -> dict[str, str]:
        """File -> address of the node whose rank wrote it, where that is not this one."""
        nodes = {f"rank-{rank}.bin": self._nodes.get(node_id) for rank, node_id in enumerate(self._rank_nodes())}
        return {file: node.address for file, node in nodes.items() if node is not None}

    async def _on_others(self, ask: Callable[[WeightNode], Awaitable[None]]) -> None:
        """A node that does not do it is left out; it joins again with the next engine that starts there."""

        async def on(node_id: str, node: WeightNode) -> None:
            try:
                await ask(node)
            except WeightsError as error:
                logger.warning("node %s has no weights any more: %s", node_id, error)
                if self._nodes.get(node_id) is node:
                    await self.leave(node_id)

        await asyncio.gather(*(on(*each) for each in list(self._nodes.items())))

    async def close(self) -> None:
        """Ends the puller and removes the folder."""
        await asyncio.gather(*(node.close() for node in self._nodes.values()))
        for server in filter(None, (self._server, self._dense_server)):
            await asyncio.to_thread(server.close)
        self._puller.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _fast_folder(run: Path) -> Path:
    """An empty folder in shared memory where the system has that, else in the run's folder; its name is the run's, so that what a
    killed process of this run left there is removed."""
    shm = Path("/dev/shm")
    place = shm if sys.platform == "linux" and shm.is_dir() else run
    folder = place / f"understudy-{hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16]}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    goes_with_this_process(folder)
    return folder


# Earlier versions of the policy, for roles that play it as it was some versions ago (a negative `frozen`). A copy of each is
# kept on disk, in the run's folder, as long as a role may still need it: `age` + 1 of them. Invariants: a follower plays
# exactly the version that is `age` versions old, or the oldest there is in the first steps; a run that is resumed finds the
# versions that it had.

PREFIX = "version-"


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


# The published versions of each role's adapter, which come and go by themselves. Each role has a `WeightSync`, so that a new
# version of one leaves the others' files alone. Invariant: a role is published whenever its version is another than the one
# that the engines have, and not otherwise; after the learner's processes died, all are.


@runtime_checkable
class RoleLearner(Learner, Protocol):
    """Has an adapter for each role: `learner.training.ranks.LearnerRanks`."""

    async def versions(self) -> Mapping[str, int]: ...


@runtime_checkable
class RoleEngine(Engine, Protocol):
    """Serves an adapter for each role: `mocked_server.fleet.engine_fleet.EngineFleet`."""

    async def load_adapter(self, folder: Path, *, role: str, version: int) -> float: ...


class RoleWeights(WeightSync):
    """`roles`: the names of those that are trained. `saved`: the folder of a model, whose adapters of roles engines begin with,
    where it has such. `run`: see `WeightSync`; all ranks and engines are on this node."""

    def __init__(self, run: Path, *, roles: Sequence[str], saved: Path | None = None) -> None:
        super().__init__(run, adapter=True)
        self._model = saved
        self._of_roles = {
            role: WeightSync(run, adapter=True, folder=self.folder / "roles" / role, role=role) for role in roles
        }
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
            began = time.monotonic()
            found = await self._of_roles[role].publish(learner, engine, version=newest)
            self._there[role] = newest
            figures["publish/bytes"] += found["publish/bytes"]
            figures["publish/paused_s"] = max(figures["publish/paused_s"], found["publish/paused_s"])
            figures[f"adapter/{role}/publish_s"] = time.monotonic() - began
            figures[f"adapter/{role}/swap_s"] = found["swap_s"]
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
