"""The ledger in a process of its own: a detached Ray actor on the node that has the disk, and the handle to it.

Started by `learner.startup.run_buffers`, used through `remote_ledger`. Invariants: it never leaves its node; when its process
dies Ray starts it again there, and what was acknowledged is in the file: running episodes and leases stay. Ray starts, finds
and ends the process; what is asked of the ledger, and what it answers, goes over the wire (`ledger_server`), and none of it
through Ray's object store.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from buffers.errors import UnderstudyError
from buffers.remote.host import OPEN_S, LedgerAddress, LedgerGone, LedgerHost

NAMESPACE = "understudy"
START_S = 120.0
IN_USE_S = 5.0
"""A ledger that has had no request for events for so long has no user."""


class LedgerActor(LedgerHost):
    """The host in its Ray actor."""

    def __init__(self, path: Path, **settings: Any) -> None:
        context = ray.get_runtime_context()
        super().__init__(path, node_id=context.get_node_id(), again=context.was_current_actor_reconstructed, **settings)


class ActorHandle:
    """The actor from another process. Raises LedgerGone when it has ended for good."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def where(self) -> LedgerAddress:
        """Waits while it is being started again. Raises LedgerGone when that takes more than `START_S`, or has no end."""
        # Asking twice is asking once: Ray may repeat it, and holds it until the actor is there.
        try:
            where: LedgerAddress = ray.get(self._actor.where.options(max_task_retries=-1).remote(), timeout=START_S)
        except RayError as error:  # also: its node died, no answer within that time
            raise LedgerGone(
                f"the ledger's process must run, but ended for good: {error}; resume with --resume auto"
            ) from error
        return where

    def idle_s(self) -> float:
        """Seconds since its last use."""
        idle_s = START_S  # if it is dead, or stuck
        with suppress(RayError):
            idle_s = self._get(self._actor.idle_s.options(max_task_retries=-1).remote(), timeout_s=START_S)
        return idle_s

    def open(self) -> None:
        """Raises what opening the file raises; UnderstudyError when its node does not start it."""
        try:
            self._get(self._actor.open.options(max_task_retries=-1).remote(), timeout_s=START_S)
        except RayError as error:  # also: not within that time
            raise UnderstudyError(
                f"the ledger's process must start within {START_S:.0f} s, but did not: {error}; see the logs of Ray on its node"
            ) from error

    def end(self) -> None:
        """Close the file and end the actor for good. Idempotent."""
        # Dead already, or so busy that its process is ended as it is: nothing acknowledged is lost.
        with suppress(UnderstudyError, RayError):
            self._get(self._actor.close.remote(), timeout_s=OPEN_S)
        ray.kill(self._actor)
        with suppress(LedgerGone):
            self.where()  # until Ray knows that it is dead, and its name is free

    def _get(self, answer: Any, *, timeout_s: float | None) -> Any:
        try:
            return ray.get(answer, timeout=timeout_s)
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, UnderstudyError) else error) from None


def start_actor(
    path: Path,
    *,
    node_id: str,
    host: str,
    secret: bytes,
    environment: Mapping[str, str],
    **settings: bool,
) -> ActorHandle:
    """Start the actor of the ledger at `path` on this node; one that an earlier process left behind is ended first.

    `environment`: of its process. `host`, `settings`: see `LedgerHost`. Raises UnderstudyError when the ledger is in use, or cannot
    be opened.
    """
    _end_earlier(path, node_id=node_id)
    affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor = ray.remote(LedgerActor).options(
        name=_name(path, node_id=node_id), namespace=NAMESPACE, lifetime="detached", num_cpus=0, max_restarts=-1,
        scheduling_strategy=affinity, runtime_env={"env_vars": dict(environment)},
    ).remote(
        path, secret=secret, host=host, **settings
    )  # fmt: skip
    handle = ActorHandle(actor)
    try:
        handle.open()
    except UnderstudyError:
        handle.end()
        raise
    return handle


def find_actor(path: Path, *, node_id: str) -> ActorHandle:
    """The actor of the ledger at `path` on this node, for a process elsewhere in the cluster. Raises LedgerGone."""
    try:
        return ActorHandle(ray.get_actor(_name(path, node_id=node_id), namespace=NAMESPACE))
    except ValueError as error:
        raise LedgerGone(
            f"ledger {path} must have an actor on node {node_id}, got none; start its run first"
        ) from error


def _name(path: Path, *, node_id: str) -> str:
    return f"ledger {node_id} {path}"


def _end_earlier(path: Path, *, node_id: str) -> None:
    try:
        earlier = find_actor(path, node_id=node_id)
    except LedgerGone:
        return
    until = time.monotonic() + 2 * IN_USE_S
    while (idle_s := earlier.idle_s()) < IN_USE_S:
        if time.monotonic() > until:
            raise UnderstudyError(
                f"ledger {path} must have one user, got another run that has it open; end that run first"
            )
        time.sleep(IN_USE_S - idle_s)
    earlier.end()
