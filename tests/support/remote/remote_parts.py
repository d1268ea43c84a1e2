"""A Ray cluster of two nodes on this machine, and ledgers whose actor is on the second of them."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.authentication.authentication_token_setup import _get_default_token_path, generate_and_save_token
from ray.cluster_utils import Cluster

from buffers.remote.ledger_actor import start_actor
from buffers.remote.remote_ledger import RemoteLedger

ROOT = Path(__file__).parents[3]
SECRET = b"s" * 32


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The driver is on `own`, ledgers are on `disk`."""

    address: str
    own: str
    disk: str
    cluster: Cluster


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Everything of the cluster ends with the block."""
    head = {"num_cpus": 1, "include_dashboard": False}
    head["_system_config"] = {"health_check_period_ms": 1000}  # a node's death is known in 5 s, not in 15
    make_users_token()
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        disk = cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield Nodes(
            address=cluster.address, own=ray.get_runtime_context().get_node_id(), disk=disk.node_id, cluster=cluster
        )
    finally:
        ray.shutdown()
        cluster.shutdown()


def make_users_token() -> None:
    """The token that Ray makes for this user where there is none, made by one process at a time: two that start Ray at once would
    each make one, and the workers of the first be refused by it, which waits for them for ever."""
    with (Path(tempfile.gettempdir()) / "understudy-tests-ray-token.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _get_default_token_path().exists():
            generate_and_save_token()


def open_remote(path: Path, *, node_id: str, **settings: Any) -> RemoteLedger:
    """The ledger at `path`; closing it ends its actor."""
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    actor = start_actor(path, node_id=node_id, host="127.0.0.1", secret=SECRET, environment=environment, **settings)
    return RemoteLedger(actor, path=path, secret=SECRET, owns=True)
