"""The weights on the other nodes of a run, each held by a Ray actor there; no weights go through Ray.

Used by `learner.checkpoints.weight_sync`. The actor's process ends with the run, and what it holds in memory with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from buffers.errors import UnderstudyError, WeightsError
from buffers.remote.actor import ActorDied, CallFailed
from buffers.remote.ray_actor import RayActor, on_node
from buffers.weights.node_weights import NodeWeights, folder_on
from configs.child_processes import python_path


class WeightNode:
    """One other node. `run_folder`: of the weights on the run's own; `host`: the node's address."""

    def __init__(self, node_id: str, *, run_folder: Path, host: str, secret: bytes, file: str) -> None:
        self.id = node_id
        self.folder = folder_on(run_folder, node_id)
        self.address = ""
        environment = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        self._actor = RayActor(
            on_node(node_id, environment=environment), NodeWeights, self.folder, host=host, secret=secret, file=file
        )

    async def start(self) -> None:
        """Returns when it can be asked. Raises WeightsError."""
        self.address = await self._ask("start")

    async def pull(self, name: str, *, home: str, shards: Mapping[str, str]) -> None:
        """Have the dense folder of the version there. Raises WeightsError."""
        await self._ask("pull", name, home=home, shards=dict(shards))

    async def copy(self, name: str, *, home: str) -> None:
        """Have the dense folder there that `home` serves. Raises WeightsError."""
        await self._ask("copy", name, home=home)

    async def keep(self, pulled: Sequence[str], published: Sequence[str]) -> None:
        """Remove all others there. Raises WeightsError."""
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
