"""The weights on a node that is not the run's own: what its ranks publish is served, what its engines load is pulled.

A Ray actor there (`learner.checkpoints.weight_nodes`). Its folder is that of the run's node with the node's id in its name
(`folder_on`), in memory; it goes with the puller, and so with the run.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from buffers.weights.puller_process import PullerProcess
from buffers.weights.version_server import VersionServer

PUBLISHED, PULLED = "published", "pulled"
ID_CHARS = 12


def folder_on(folder: Path, node_id: str) -> Path:
    """The folder of a node's weights beside which `folder` is the run's own."""
    return folder.with_name(f"{folder.name}-{node_id[:ID_CHARS]}")


def same_on(folder: Path, node_id: str) -> Path:
    """A version's folder of the run's own node as another node has it."""
    return folder_on(folder.parents[1], node_id) / folder.parent.name / folder.name


class NodeWeights:
    """`folder`: made here, what an earlier run left there is removed. `host`: an address of this node; `file`: see `Puller`."""

    def __init__(self, folder: Path, *, host: str, secret: bytes, file: str, python_path: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        self._folder = folder
        self._published, self._pulled = folder / PUBLISHED, folder / PULLED
        for each in (self._published, self._pulled):
            each.mkdir()
        self._server = VersionServer(self._published, secret=secret, host=host)
        self._puller = PullerProcess(
            self._published, self._pulled, file=file, python_path=python_path, secret=secret, removes=folder
        )

        self.address = str(self._server.address)
        """The address where its ranks' shards are served."""

    async def start(self) -> str:
        """Its address, once its puller runs too."""
        await self._puller.keep([])
        return self.address

    async def pull(self, name: str, *, home: str, shards: Mapping[str, str]) -> None:
        """Have the dense folder of the version. `home`, `shards`: see `WireSource.turn_to`. Raises WeightsError."""
        await self._puller.pull(name, home=home, shards=shards)

    async def copy(self, name: str, *, home: str) -> None:
        """Have the dense folder of the version from the server at `home` that has that. Raises WeightsError."""
        await self._puller.copy(name, home=home)

    async def keep(self, pulled: Sequence[str], published: Sequence[str]) -> None:
        """Remove all other versions, and the shards of all others."""
        for old in self._published.iterdir():
            if old.name.removeprefix(".") not in published:
                shutil.rmtree(old, ignore_errors=True)
        await self._puller.keep(pulled)

    async def close(self) -> None:
        """End the puller and the server, and remove the folder."""
        await self._puller.close()
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)
