"""The process of an engine's host on another node: a child of a Ray actor there, in a bundle of a placement group or anywhere.

A `HostProcess` of `mocked_server.fleet.remote_engine`. Ray places it and gives it its cards (`CUDA_VISIBLE_DEVICES`, which the
child inherits), and ends it; no request and no output goes through Ray. When the actor's process dies the child does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from buffers.errors import EngineDied, EngineError, UnderstudyError
from buffers.remote.ray_deaths import died, in_short, refusal
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
        self._actor: Any = None
        strategy: Any = None
        if bundle is not None:
            strategy = PlacementGroupSchedulingStrategy(bundle[0], placement_group_bundle_index=bundle[1])
        elif node_id is not None:
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        self._options = {
            "num_cpus": 0, "num_gpus": num_gpus, "scheduling_strategy": strategy, "max_restarts": 0,
            "runtime_env": {"env_vars": dict(environment)},
        }  # fmt: skip

    @property
    def actor(self) -> Any:
        """Ray's handle; None: it does not run."""
        return self._actor

    async def start(self) -> str:
        """Returns its address once it listens. Raises EngineDied when its process or its node died, else EngineError."""
        await self.end()
        self._actor = ray.remote(HostActor).options(**self._options).remote(self._settings)
        try:
            address: str = await self._actor.start.remote()
        except RayTaskError as error:
            if isinstance(error.cause, UnderstudyError):
                raise error.cause from None
            raise EngineError(f"the actor of engine {self._settings.name} did not start its host: {error}") from error
        except RayError as error:
            name = f"the actor of engine {self._settings.name}"
            if died(error) and not isinstance(error, ActorUnschedulableError):
                raise EngineDied(f"{name} died while it started: {in_short(error)}") from error
            raise EngineError(refusal(error) or f"{name} cannot be placed: {error}") from error
        return address

    async def end(self) -> None:
        """End it, whatever it does."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            await asyncio.wait_for(actor.end.remote(), END_S)
        except (RayError, TimeoutError):
            pass  # it is dead, or its node is
        ray.kill(actor)
