"""The process of an engine's host on another node: a child of a Ray actor there, in a bundle of a placement group or anywhere.

A `HostProcess` of `remote_engine`. Ray places it and gives it its cards (`CUDA_VISIBLE_DEVICES`, which the
child inherits), and ends it; no request and no output goes through Ray. When the actor's process dies the child does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray

from buffers.errors import EngineDied, EngineError, UnderstudyError
from buffers.remote.actor import ActorDied, ActorRefused
from buffers.remote.ray_actor import ActorUnplaced, RayActor, on_node
from mocked_server.vllm.hosted.program import ChildHost, HostSettings

END_S = 10.0
"""Seconds for a host to end before its actor is killed."""


class HostActor:
    """The parent of the host's process, on its node."""

    def __init__(self, settings: HostSettings) -> None:
        address = ray.util.get_node_ip_address()
        self._child = ChildHost(replace(settings, host=address))

    async def start(self) -> str:
        """See `ChildHost.start`."""
        return await self._child.start()

    async def end(self) -> None:
        """See `ChildHost.end`."""
        await self._child.end()

    async def pid(self) -> int:
        """The host's process, on its node."""
        return self._child.pid


class RayHost:
    """`num_gpus`: cards of the engine; on a machine without any, 0. `bundle`: (placement group, index of its bundle), or `node_id`;
    neither: Ray chooses. `environment`: of its process."""

    def __init__(
        self,
        settings: HostSettings,
        *,
        num_gpus: int,
        environment: Mapping[str, str],
        bundle: tuple[Any, int] | None = None,
        node_id: str | None = None,
    ) -> None:
        self._settings = settings
        self.actor: RayActor | None = None
        """None: it does not run."""
        self._place = on_node(node_id, environment=environment, num_gpus=num_gpus, bundle=bundle)

    async def start(self) -> str:
        """Returns its address once it listens. Raises EngineDied when its process or its node died, else EngineError."""
        await self.end()
        self.actor = RayActor(self._place, HostActor, self._settings)
        name = f"the actor of engine {self._settings.name}"
        try:
            address: str = await self.actor.call("start")
        except EngineError:
            raise
        except ActorUnplaced as error:
            raise EngineError(f"{name} cannot be placed: {error}") from error
        except ActorDied as error:
            raise EngineDied(f"{name} died while it started: {error}") from error
        except ActorRefused as error:
            raise EngineError(str(error)) from error
        except UnderstudyError as error:
            raise EngineError(f"{name} did not start its host: {error}") from error
        return address

    async def end(self) -> None:
        """End it, whatever it does."""
        actor, self.actor = self.actor, None
        if actor is None:
            return
        try:
            await asyncio.wait_for(actor.call("end"), END_S)
        except (UnderstudyError, TimeoutError):
            pass  # it is dead, or its node is
        actor.kill()
