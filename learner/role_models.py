"""The models of a run's roles that the policy does not play: engines of frozen ones, servers of others.

Built by `learner.pipeline`. A frozen model has an engine of its own, in a process of its own, beside the policy's; one that is an
earlier version of the policy gets its weights from `learner.checkpoints.earlier_versions`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.schema import Config
from learner.checkpoints.earlier_versions import EarlierVersions, Follower
from learner.checkpoints.weight_sync import WeightSync
from learner.role_adapters.role_weights import RoleWeights
from mocked_server.fleet.engine_fleet import EngineFleet
from mocked_server.http.upstream import Upstream
from mocked_server.roles import Roles
from mocked_server.vllm.engine import VLLMEngine
from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleModels:
    """What a run has beside the policy's own engines."""

    roles: Roles | None
    """None: the run has no roles."""
    engines: dict[str, EngineFleet]
    """Those of frozen roles, by name."""
    upstreams: dict[str, Upstream]
    """Servers of others, by role."""
    followers: dict[str, Follower]
    """Those of the engines that play earlier versions."""

    def figures(self) -> dict[str, float]:
        """The version of the policy that each of these roles plays."""
        found = {name: follower.version for name, follower in self.followers.items()}
        return {f"policy/role_version/{name}": float(version) for name, version in found.items() if version is not None}

    async def start_beside(
        self, policy: EngineFleet, *, folder: Path, weights: WeightSync, first: tuple[Path, int] | None,
        say: Callable[[str], object],
    ) -> None:  # fmt: skip
        """Start all engines. `weights` gives earlier versions to those that play them; `first`: (folder, version) of the weights
        that a run is resumed with; `folder`: the run's; `say` gets a line where
        its disk takes none of them."""
        if isinstance(weights, RoleWeights):
            await weights.load_saved(policy)
        await asyncio.gather(*(each.start() for each in (policy, *self.engines.values())))
        if self.followers:
            own = folder / "earlier"
            own.mkdir(exist_ok=True)
            weights.earlier = EarlierVersions(own, followers=list(self.followers.values()), say=say)
            await weights.earlier.begin(checkpoint=first)


def role_names(config: Config) -> tuple[str, ...]:
    """The names of all roles, that of the default first."""
    return tuple(sorted(config.roles, key=lambda name: not config.roles[name].is_trained))


def role_models(
    config: Config,
    *,
    settings: EngineSettings,
    vllm_config: Any,
    record_death: Callable[[str, Exception], None],
    stack: AsyncExitStack,
) -> RoleModels:
    """Nothing is started. `settings`, `vllm_config`: of the policy's engines; what is left on `stack` ends it all."""
    upstreams, engines, followers = dict[str, Upstream](), dict[str, EngineFleet](), dict[str, Follower]()
    for name, role in config.roles.items():
        if role.url:
            key = os.environ.get(role.key_variable, "") if role.key_variable else ""
            upstreams[name] = Upstream(role.url, model=role.model or name, key=key)
            stack.push_async_callback(upstreams[name].close)
        elif role.frozen is not None:
            own = vllm_config
            if isinstance(role.frozen, str):
                other = replace(settings, model_path=Path(role.frozen), lora_rank=0, role_names=(), router_replay=False)
                own = make_vllm_config(make_args(other))
            engine = VLLMEngine(own, name=f"role-{name}", timeout_s=config.rollout.engine_timeout_s)
            engines[name] = EngineFleet([engine], record_death=record_death)
            stack.push_async_callback(engines[name].close)
            if isinstance(role.frozen, int):
                followers[name] = Follower(engines[name], -role.frozen)
    roles = None
    if config.roles:
        trained = [name for name in role_names(config) if config.roles[name].is_trained]
        roles = Roles(trained=trained, frozen=list(engines), others=upstreams)
    return RoleModels(roles=roles, engines=engines, upstreams=upstreams, followers=followers)
