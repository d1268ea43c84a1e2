"""A node's puller with its sources, and the same in a process of its own, which is started again when it dies.

`PullerProcess` is used by `learner.checkpoints.weight_sync`, on its event loop, one call at a time. Copying and comparing the
weights takes no time of the process that answers agents, and a puller that is killed loses nothing: the next one resumes with what
is complete. On other nodes `buffers.weights.node_weights` has a process that answers nobody else, and a puller in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from buffers.errors import WeightsError
from buffers.remote.actor import ActorDied, CallFailed, ChildActor
from buffers.weights.puller import Puller
from buffers.weights.version_server import WireSource

logger = logging.getLogger(__name__)

MOST_DEATHS = 3
"""Deaths of the process in one call after which it is no accident."""
TITLE = "understudy::weights_puller"


class NodePuller:
    """Pulls from the versions in `source`, or on other nodes, into `folder`. `file`: see `Puller`; `secret`: of the wire to other
    nodes. Raises WeightsError."""

    def __init__(self, source: Path, folder: Path, *, file: str, secret: bytes = b"") -> None:
        self._source = WireSource(source, secret=secret)
        self._puller = Puller(self._source, folder, file=file)

    def pull(self, name: str, *, home: str = "", shards: Mapping[str, str] | None = None) -> Path:
        """The dense folder of the version. `home`, `shards`: see `WireSource.turn_to`; none: all is in `source`."""
        self._source.turn_to(home, shards or {})
        return self._puller.pull(name)

    def copy(self, name: str, *, home: str) -> Path:
        """The dense folder of the version, from the server at `home` that has that."""
        self._source.turn_to(home, {})
        return self._puller.copy(name)

    def keep(self, names: Sequence[str]) -> None:
        """Remove all other versions."""
        self._puller.keep(names)

    def close(self) -> None:
        """End its connections."""
        self._source.close()


class PullerProcess:
    """A `NodePuller` elsewhere, made with these arguments. `context`: of multiprocessing, which starts the process."""

    def __init__(self, context: Any, *arguments: Path, **options: Any) -> None:
        self._make: Callable[[], ChildActor] = partial(ChildActor, context, TITLE, NodePuller, *arguments, **options)
        self._actor: ChildActor | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; None: there is none."""
        return None if self._actor is None else self._actor.pid

    async def pull(self, name: str, *, shards: Mapping[str, str]) -> Path:
        """See `NodePuller.pull`."""
        folder: Path = await self._call("pull", name, shards=shards)
        return folder

    async def keep(self, names: Sequence[str]) -> None:
        """See `Puller.keep`."""
        await self._call("keep", names)

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        for _ in range(MOST_DEATHS):
            if self._actor is None:
                self._actor = self._make()
            try:
                return await self._actor.call(method, *arguments, **options)
            except ActorDied as death:
                logger.warning("the puller of the weights died and is started again: %s", death)
                self.close()
            except CallFailed as error:
                raise WeightsError(f"the puller of the weights failed: {error}") from error
        raise WeightsError(
            f"the puller of the weights must {method} {arguments!s:.100}, but died {MOST_DEATHS} times; see the log above"
        )

    def close(self) -> None:
        """End the process."""
        actor, self._actor = self._actor, None
        if actor is not None:
            actor.kill()
