"""The run's Ray: one of its own on this machine, or the cluster that has the node of its ledger.

Called by `learner.pipeline` and `learner.ledger_place`. Invariant: whoever starts it here ends its part of it with `stop`: a Ray of
its own ends with that, a cluster goes on.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray

from buffers.errors import UnderstudyError


def start(node: str) -> None:
    """A local Ray without dashboard; where a node is named, the cluster of this machine or of RAY_ADDRESS.

    Raises UnderstudyError when there is none.
    """
    # Without an address Ray would join whatever runs on this machine.
    # Nor does it start workers before somebody asks for one: an environment of its own is what each of ours has.
    own = {"include_dashboard": False, "_system_config": {"prestart_worker_first_driver": False}}
    place: dict[str, Any] = {"address": "auto"} if node else {"address": "local", **own}
    try:
        ray.init(logging_level=logging.ERROR, log_to_driver=False, configure_logging=False, **place)
    except (ConnectionError, RuntimeError) as error:
        if not node:
            raise
        raise UnderstudyError(
            f"buffer.node={node} must be a node of a running Ray cluster, but none can be joined: {error}; start one with "
            f"`ray start --head`, or leave buffer.node empty"
        ) from error


def stop() -> None:
    """Ends all that this process started in it, but for actors that are to stay."""
    ray.shutdown()


async def stop_after(started: asyncio.Task[None]) -> None:
    """`stop`, once it has started: Ray that still starts cannot be stopped, and is not left alone."""
    await asyncio.gather(started, return_exceptions=True)
    await asyncio.to_thread(stop)


def find_node(name: str) -> tuple[str, str]:
    """(id, address) of the living node of this cluster with this id, address or host name. Raises UnderstudyError."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    found = [
        node for node in alive if name in (node["NodeID"], node["NodeManagerAddress"], node["NodeManagerHostname"])
    ]
    if len(found) != 1:
        known = ", ".join(f"{node['NodeID']} ({node['NodeManagerAddress']})" for node in alive)
        raise UnderstudyError(
            f"buffer.node must name one node of the Ray cluster, got {name!r} for {len(found)} of them; set it to one of {known}"
        )
    return str(found[0]["NodeID"]), str(found[0]["NodeManagerAddress"])
