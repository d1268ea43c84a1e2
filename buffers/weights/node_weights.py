"""The weights on a node that is not the run's own: what its ranks publish is served, what its engines load is pulled.

`WeightNode` is used by `learner.checkpoints.weight_sync`; `NodeWeights` is an actor there, which Ray places, and no weights go
through Ray. Its folder is that of the run's node with the node's id in its name (`folder_on`), in memory; it goes with the actor's
process, and so with the run.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from buffers.errors import UnderstudyError, WeightsError
from buffers.remote.actor import Actor, ActorDied, CallFailed
from buffers.weights.puller_process import NodePuller
from buffers.weights.version_server import VersionServer

PUBLISHED, PULLED = "published", "pulled"
ID_CHARS = 12


def folder_on(folder: Path, node_id: str) -> Path:
    """The folder of a node's weights beside which `folder` is the run's own."""
    return folder.with_name(f"{folder.name}-{node_id[:ID_CHARS]}")


def same_on(folder: Path, node_id: str) -> Path:
    """A version's folder of the run's own node as another node has it."""
    return folder_on(folder.parents[1], node_id) / folder.parent.name / folder.name


class NodeWeights(NodePuller):
    """`folder`: made here, what an earlier run left there is removed. `host`: an address of this node; `file`: see `Puller`."""

    def __init__(self, folder: Path, *, host: str, secret: bytes, file: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        # Its input ends with this process, and then it removes the folder, unless it was sent a line. It is nobody's child: of a
        # process that Ray kills it ends those, too.
        guard = ["sh", "-c", 'exec 3<&0; (read line <&3 || rm -rf "$0") &', str(folder)]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        self._folder = folder
        self._published = folder / PUBLISHED
        for name in (PUBLISHED, PULLED):
            (folder / name).mkdir()
        super().__init__(self._published, folder / PULLED, file=file, secret=secret)
        self._server = VersionServer(self._published, secret=secret, host=host)

    def start(self) -> str:
        """The address where its ranks' shards are served."""
        return str(self._server.address)

    def keep(self, names: Sequence[str], published: Sequence[str] = ()) -> None:
        """Remove all other versions, and the shards of all others than `published`."""
        for old in self._published.iterdir():
            if old.name.removeprefix(".") not in published:
                shutil.rmtree(old, ignore_errors=True)
        super().keep(names)

    def close(self) -> None:
        """End what it has, and remove the folder."""
        super().close()
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._guard.communicate(b"\n")


class WeightNode:
    """One other node, as the run's own has it. `actor`: its `NodeWeights`. Its methods raise WeightsError."""

    def __init__(self, node_id: str, actor: Actor) -> None:
        self.id = node_id
        self.address = ""
        """The address where its ranks' shards are served."""
        self._actor = actor

    async def start(self) -> None:
        """Returns when it can be asked."""
        self.address = await self._ask("start")

    async def pull(self, name: str, *, home: str, shards: Mapping[str, str]) -> None:
        """Have the dense folder of the version there. `home`, `shards`: see `WireSource.turn_to`."""
        await self._ask("pull", name, home=home, shards=dict(shards))

    async def copy(self, name: str, *, home: str) -> None:
        """Have the dense folder there that `home` serves."""
        await self._ask("copy", name, home=home)

    async def keep(self, pulled: Sequence[str], published: Sequence[str]) -> None:
        """Remove all others there."""
        await self._ask("keep", pulled, published)

    async def close(self) -> None:
        """End it. Does nothing when it is gone."""
        try:
            await self._ask("close")
        except WeightsError:
            pass  # its node is gone, and its memory with it
        self._actor.kill()

    async def _ask(self, method: str, *arguments: object, **named: object) -> Any:
        try:
            return await self._actor.call(method, *arguments, **named)
        except ActorDied as error:
            raise WeightsError(
                f"the weights on node {self.id} must be reached, but are not: {error}; look after that node"
            ) from error
        except CallFailed as error:
            raise WeightsError(f"the weights on node {self.id}: {error}") from None
        except UnderstudyError as error:
            raise WeightsError(str(error)) from None
