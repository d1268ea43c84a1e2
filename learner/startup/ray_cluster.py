"""The Ray cluster that a run joins, where RAY_ADDRESS or `buffer.node` says so. On one machine there is no Ray.

Called by `learner.pipeline` and `learner.startup.run_buffers`. Invariant: the cluster stays when the run ends. What it asks for is
its owner's affair.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import suppress
from urllib.parse import urlsplit

import ray
from ray._private.services import find_bootstrap_address
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RpcError

from buffers.errors import UnderstudyError
from buffers.wire.address import is_loopback
from learner.placement.plan import ADDRESS

REACH_S = 10.0
"""Seconds for a cluster's address to answer."""
MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"


def join(node: str) -> str:
    """The cluster that RAY_ADDRESS names, or the one that `ray start` has started on this machine, which has the `node`. Returns a
    line where anybody on its network may use it; else nothing.

    Raises UnderstudyError when there is none, or it asks for another token.
    """
    wanted = f"buffer.node={node}" if node else f"{ADDRESS}={os.environ[ADDRESS]}"
    try:
        address = _reached(os.environ.get(ADDRESS, ""))
        ray.init(logging_level=logging.ERROR, log_to_driver=False, configure_logging=False, address=address)
        return _open_to_all(address)
    except (OSError, RuntimeError) as error:
        raise UnderstudyError(
            f"{wanted} must be of a running Ray cluster, but none can be joined: {error}; start one with `ray start --head`, or "
            f"{'leave buffer.node empty' if node else f'unset {ADDRESS}'}"
        ) from error


def _reached(named: str) -> str:
    """The address of the cluster that is named, else of this machine's: not of another run's own Ray, which Ray would find too.

    Raises OSError where nothing listens there: Ray would try for ever, and could not be interrupted."""
    address = find_bootstrap_address(None) if named in ("", "auto") else named
    if not address:
        raise ConnectionError(f"{ADDRESS} names none, and `ray start` has started none on this machine")
    try:
        place = urlsplit(address if "://" in address else f"ray://{address}")
        host, port = place.hostname, place.port
    except ValueError:
        host = port = None
    if not (host and port):
        raise ConnectionError(f"{address} is not HOST:PORT")
    try:
        socket.create_connection((host, port), timeout=REACH_S).close()
    except OSError as error:
        raise ConnectionError(f"{address} cannot be reached: {error}") from error
    if "://" not in address:
        with suppress(RpcError):  # what else is wrong Ray says itself
            try:
                GcsClient(address=address).internal_kv_keys(b"", b"", REACH_S)
            except AuthenticationError as error:
                given = f"{TOKEN} is not its" if TOKEN in os.environ else f"{MODE}=token and {TOKEN} are not both set"
                raise ConnectionError(f"{address} asks for a token, and {given}; set those of `ray start`") from error
    return address


def _open_to_all(address: str) -> str:
    """A line for a cluster that other machines reach and that asks for no token. One that asks is joined in that mode only."""
    host = urlsplit(address if "://" in address else f"ray://{address}").hostname or ""
    if os.environ.get(MODE, "").lower() not in ("", "disabled") or is_loopback(host):
        return ""
    return (
        f"the Ray cluster at {address} asks for no token: who reaches it can run programs as you; set {MODE}=token and {TOKEN} "
        f"for each `ray start` and for the run, or run.trusted_network=true where nobody else is on its network"
    )


async def leave_after(joining: asyncio.Future[str]) -> None:
    """Leave it, but for actors that are to stay: once it was joined, which cannot be interrupted."""
    await asyncio.gather(joining, return_exceptions=True)
    await asyncio.to_thread(ray.shutdown)


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
