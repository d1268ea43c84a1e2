"""Engines on the other nodes of a run's cluster: started where there is room, with the newest weights, and elsewhere when a node
is gone.

Built by `learner.pipeline`. `RemoteEngines.grow` is a loop.

Loop row: `grow` waits for time; adds engines to the fleet as nodes join the cluster, up to `rollout.engines.most`; unblocked by
time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from buffers.errors import EngineError, UnderstudyError, WeightsError
from buffers.weights.node_weights import NodeWeights, WeightNode, folder_on
from configs.child_processes import python_path
from configs.schema import Config
from learner.checkpoints.weight_sync import EarlierVersions, Follower, RoleWeights, WeightSync
from learner.placement.plan import in_cluster, own_node
from learner.placement.run_nodes import RunNodes, checked, living_nodes
from mocked_server.fleet.engine_fleet import EngineFleet
from mocked_server.http.roles import Roles, Upstream
from mocked_server.keys import wire_secret
from mocked_server.vllm.engine import VLLMEngine
from mocked_server.vllm.engine_arguments import EngineSettings, has_gpu, make_args, make_vllm_config
from mocked_server.vllm.hosted.outputs import VLLMCodec
from mocked_server.vllm.hosted.program import ActorHost, ChildHost, HostSettings
from mocked_server.vllm.hosted.remote_engine import RemoteEngine

logger = logging.getLogger(__name__)

LOOK_S = 2.0
REST_S = 30.0
"""Seconds after a failure before one more engine is tried."""


def run_nodes(config: Config, *, model: Path, folder: Path, learns: bool) -> RunNodes:
    """The nodes of a run: this machine, or those of the Ray cluster that it has joined. `model`, `folder`: what all nodes must see.

    Raises UnderstudyError when what the configuration asks for has no room there, or a node cannot take part."""
    own = own_node(has_gpu=has_gpu())
    if not in_cluster(config.buffer.node) or config.rollout.engine != "vllm":  # other engines are on this machine
        return RunNodes(config, nodes=[own], learns=learns)
    paths = [(model / "config.json").resolve(), folder.resolve()]
    look = partial(living_nodes, own)
    nodes = RunNodes(config, nodes=look(), learns=learns, look=look, check=partial(checked, paths=paths))
    nodes.check()
    if nodes.ranks_elsewhere and not config.run.trusted_network:
        raise UnderstudyError(
            "learner.ranks on other nodes than the run's own exchange gradients by gloo or NCCL, which neither encrypt nor ask who "
            "is there; set run.trusted_network=true where nobody else is on that network, or learner.ranks to what the run's node "
            "has room for"
        )
    return nodes


def make_weight_sync(config: Config, *, nodes: RunNodes, folder: Path, saved: Path | None = None) -> WeightSync:
    """The weight synchronization of a run on these nodes, of one policy or of each role's adapter. `saved`: the model with whose
    adapters of roles engines begin, where it has such."""
    if config.adapter_roles:
        return RoleWeights(folder, roles=config.adapter_roles, saved=saved)

    def make_node(node_id: str, sync: WeightSync) -> WeightNode:
        from buffers.remote.ray_actor import RayActor, on_node

        variables = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        folder, host = folder_on(sync.folder, node_id), nodes.address_of(node_id)
        place = on_node(node_id, environment=variables)
        return WeightNode(node_id, RayActor(place, NodeWeights, folder, host=host, secret=sync.secret, file=sync.file))

    return WeightSync(
        folder,
        adapter=config.learner.lora.rank > 0,
        host=nodes.nodes[0].address,
        secret=wire_secret(folder, host=config.server.host, label=b"weights"),
        rank_nodes=nodes.rank_node_ids,
        make_node=make_node,
    )


class PlacedHost:
    """The process of an engine's host, at the place that the run's nodes give it at each start. A `HostProcess`."""

    def __init__(self, settings: HostSettings, *, nodes: RunNodes, weights: WeightSync) -> None:
        self._settings = settings
        self._nodes = nodes
        self._weights = weights
        self._node_id = ""
        """Its node by Ray's name; empty: the run's own."""
        self._host: ActorHost | None = None

    async def start(self) -> str:
        """Returns its address once it listens. Raises EngineDied, EngineError."""
        from buffers.remote.ray_actor import RayActor, on_node

        name = self._settings.name
        await self.end()
        place = await asyncio.to_thread(self._nodes.take, name)
        node = self._nodes.node_of(place)
        self._node_id = "" if place.node == 0 else node.id
        if self._node_id:
            try:
                await self._weights.join(node.id)
            except WeightsError as error:
                raise EngineError(f"engine {name} cannot be on node {node.address}: {error}") from error
        devices = [node.devices[card] for card in place.cards] if node.devices else []
        cards = {"CUDA_VISIBLE_DEVICES": ",".join(devices), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        logs = {name: level for name, level in os.environ.items() if name.startswith("VLLM_LOGGING_LEVEL")}
        environment = {"PYTHONPATH": python_path(), **logs, **(cards if devices else {})}
        # Beside a rank the card is counted for that.
        at = on_node(node.id, environment=environment, num_gpus=0 if place.beside_rank else len(place.cards))
        settings = replace(self._settings, host=node.address)
        self._host = ActorHost(name, partial(RayActor, at, ChildHost, settings))
        address = await self._host.start()
        logger.info("engine %s is on node %s", name, node.address)
        return address

    async def end(self) -> None:
        """End it, whatever it does."""
        host, self._host = self._host, None
        if host is not None:
            await host.end()

    def locate(self, folder: Path) -> Path:
        """The folder that its node has of these weights."""
        return self._weights.on_node(folder, self._node_id) if self._node_id else folder


class RemoteEngines:
    """`settings`: of any engine of the run; each gets its name. `first`: (folder, version) of the weights that it begins with;
    None: the model's own."""

    def __init__(
        self, settings: HostSettings, *, nodes: RunNodes, weights: WeightSync, first: tuple[Path, int] | None
    ) -> None:
        self.first = first
        self._settings = settings
        self._nodes = nodes
        self._weights = weights
        self._codec = VLLMCodec()

    def make(self, name: str) -> RemoteEngine:
        """The engine of this name."""
        host = PlacedHost(replace(self._settings, name=name), nodes=self._nodes, weights=self._weights)
        return RemoteEngine(
            host, self._codec, secret=self._settings.secret, name=name, weights=self.first, locate=host.locate
        )

    async def grow(self, fleet: EngineFleet, *, say: Callable[[str], object]) -> None:
        """Add engines as there is room for them, until cancelled. `say`: gets a line for each that joins."""
        rests_until = 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            for gone in await asyncio.to_thread(self._nodes.refresh):
                logger.warning("node %s is gone", gone)
                await self._weights.leave(gone)
            for refusal in self._nodes.refusals():
                say(f"left out: {refusal}")
            for name in self._nodes.engines.keys() - set(fleet.names):
                self._nodes.release(name)
            if time.monotonic() < rests_until or (new := self._nodes.one_more()) is None:
                continue
            try:
                began = time.monotonic()
                await fleet.add(self.make(new))
                say(f"engine {new} has joined, in {time.monotonic() - began:.0f} s")
            except UnderstudyError as error:
                self._nodes.release(new)
                rests_until = time.monotonic() + REST_S
                say(f"engine {new} could not join: {error}")


# The models of a run's roles that the policy does not play: engines of frozen ones, servers of others. A frozen model has an
# engine of its own, in a process of its own, beside the policy's; one that is an earlier version of the policy gets its weights
# from `learner.checkpoints.weight_sync`.


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
            weights.earlier = earlier = EarlierVersions(own, followers=list(self.followers.values()), say=say)
            await earlier.begin(checkpoint=first)


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
        elif role.frozen not in (None, 0):
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
        frozen = [name for name, role in config.roles.items() if role.frozen is not None]
        roles = Roles(trained=trained, frozen=frozen, others=upstreams)
    return RoleModels(roles=roles, engines=engines, upstreams=upstreams, followers=followers)
