"""The weights on a node that is not the run's own: what its ranks publish is served, what its engines load is pulled.

A Ray actor there (`learner.checkpoints.weight_nodes`). Its folder is that of the run's node with the node's id in its name
(`folder_on`), in memory; it goes with the actor's process, and so with the run.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from buffers.errors import WeightsError
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


class NodeWeights:
    """`folder`: made here, what an earlier run left there is removed. `host`: an address of this node; `file`: see `Puller`."""

    def __init__(self, folder: Path, *, host: str, secret: bytes, file: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        # It ends with its input, which this process holds, and so removes the folder when this process is killed.
        guard = ["sh", "-c", 'cat; rm -rf "$0"', str(folder)]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        self._published = folder / PUBLISHED
        for name in (PUBLISHED, PULLED):
            (folder / name).mkdir()
        self._server = VersionServer(self._published, secret=secret, host=host)
        self._puller = NodePuller(self._published, folder / PULLED, file=file, secret=secret)
        self.address = str(self._server.address)
        """The address where its ranks' shards are served."""

    async def start(self) -> str:
        """Its address, once it can be asked."""
        return self.address

    async def pull(self, name: str, *, home: str, shards: Mapping[str, str]) -> None:
        """Have the dense folder of the version. `home`, `shards`: see `WireSource.turn_to`. Raises WeightsError."""
        await _in_thread(self._puller.pull, name, home=home, shards=shards)

    async def copy(self, name: str, *, home: str) -> None:
        """Have the dense folder of the version from the server at `home` that has that. Raises WeightsError."""
        await _in_thread(self._puller.copy, name, home=home)

    async def keep(self, pulled: Sequence[str], published: Sequence[str]) -> None:
        """Remove all other versions, and the shards of all others."""
        for old in self._published.iterdir():
            if old.name.removeprefix(".") not in published:
                shutil.rmtree(old, ignore_errors=True)
        await _in_thread(self._puller.keep, pulled)

    async def close(self) -> None:
        """End what it has, and remove the folder."""
        self._puller.close()
        self._server.close()
        await asyncio.to_thread(self._guard.communicate)


async def _in_thread(work: Callable[..., object], *arguments: Any, **options: Any) -> None:
    try:
        await asyncio.to_thread(work, *arguments, **options)
    except OSError as error:
        raise WeightsError(f"the weights of this node cannot be written: {error}") from error
