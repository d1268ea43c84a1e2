"""The run's Ray: one of its own on this machine, or the cluster that has the node of its ledger.

Called by `learner.pipeline` and `learner.startup.run_buffers`. Invariants: the process that starts it here ends its part of
it with `stop`: a Ray of its own ends with that, a cluster stays. A Ray of its own answers only who has its token,
which is drawn for each run and lies with Ray's sockets and logs in a folder that no other user can enter. The
folder is removed at the end. What a cluster asks for is its owner's affair.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray._private.node import Node
from ray._private.services import find_bootstrap_address
from ray._raylet import (  # type: ignore[attr-defined]
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    AuthenticationTokenLoader,
    Config,
    GcsClient,
    persist_port,
)
from ray.exceptions import AuthenticationError, RpcError

from buffers.disk import end_of
from buffers.errors import UnderstudyError
from buffers.wire.address import is_loopback
from configs.child_processes import MAX_CHARS, socket_folder
from learner.placement.plan import ADDRESS, in_cluster

logger = logging.getLogger(__name__)

REACH_S = 10.0
"""Seconds for a cluster's address to answer."""
START_S = 300.0
"""Seconds for a Ray of its own to start; idle it takes half of one."""
LAST_WORDS_CHARS = 6000
UNUSED_DAEMONS = "start_monitor", "start_log_monitor", "start_api_server"
"""Methods of Ray's node that start the autoscaler's monitor, the log monitor and the server of the dashboard. `ray.init` starts all
three, even without a dashboard; nothing here asks them, and they take seconds of a processor and 300 MB."""
UNUSED_PORTS = METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME, DASHBOARD_AGENT_LISTEN_PORT_NAME
"""Ports of the dashboard's agent, which nothing here asks either."""
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_folder: Path | None = None
"""Folder of the Ray that this process has started."""
_agent_port: socket.socket | None = None
"""Holds the port of that Ray's runtime environment agent."""


def start(node: str) -> str:
    """A local Ray without dashboard; where RAY_ADDRESS names a cluster, or a node is named, that one, or the one that `ray start`
    has started on this machine. Returns a line where anybody on its network may use it; else nothing.

    Raises UnderstudyError when there is none, or it asks for another token.
    """
    if not in_cluster(node):
        _start_local()
        return ""
    wanted = f"buffer.node={node}" if node else f"{ADDRESS}={os.environ[ADDRESS]}"
    try:
        address = _reached(os.environ.get(ADDRESS, ""))
        _init(address=address)
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


def _init(**place: Any) -> None:
    ray.init(logging_level=logging.ERROR, log_to_driver=False, configure_logging=False, **place)


def _start_local() -> None:
    global _folder
    _folder = Path(tempfile.mkdtemp(prefix="ray-", dir=socket_folder(MAX_CHARS)))
    token = _folder / "token"
    with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    with _authenticated_by(token), _without_unused_daemons(), _without_haste():
        # Without an address Ray would join any cluster of this machine. A folder below ours, as Ray makes its own open to all.
        # No prestarted workers: each of our actors has a runtime environment of its own, so that none could be reused. And no
        # niceness, which is 15 of Ray's own: on a machine with other work the learner would get next to no processor.
        settings = {"prestart_worker_first_driver": False, "worker_niceness": 0}
        try:
            _init(
                address="local", include_dashboard=False, _temp_dir=str(_folder / "ray"),
                _system_config={**settings, "agent_register_timeout_ms": int(1000 * START_S)},
            )  # fmt: skip
        except Exception as error:  # Ray has no class of its own for it
            _keep_last_words(_folder, "raylet.err")
            raise UnderstudyError(
                f"Ray must start on this machine, but did not: {error} End other programs if it is busy, then run the same "
                f"command again"
            ) from error


@contextmanager
def _authenticated_by(token: Path) -> Iterator[None]:
    """Ray that is started inside asks for this token. It reads what to ask for from the environment, which its daemons and workers
    inherit; whom this process starts otherwise has no use for it."""
    ours = {MODE: "token", TOKEN_PATH: str(token)}
    before = {name: os.environ.pop(name, None) for name in (MODE, TOKEN, TOKEN_PATH)}
    os.environ.update(ours)
    _forget_authentication()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _forget_authentication() -> None:
    """Ray reads the environment again: it did when it was imported. What asks for a token refuses a cluster that has none."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _without_unused_daemons() -> Iterator[None]:
    """A node that is started inside has the daemons that its actors need and no others: `ray.init` has no option for it."""

    def start_nothing(node: Node, **_: object) -> None:
        """Stands in for a method that starts a daemon."""

    before = {name: getattr(Node, name) for name in UNUSED_DAEMONS}
    for name in UNUSED_DAEMONS:
        setattr(Node, name, start_nothing)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


@contextmanager
def _without_haste() -> Iterator[None]:
    """A node that is started inside may take START_S: Ray gives it 30 s, and its raylet, which waits for its two agents to write
    down their ports, gives up after 15 (ray-project/ray issue 65983). A busy machine needs longer to import what they are made of.
    So the ports are known before, and nobody waits."""
    start = Node.start_ray_processes

    def start_and_wait(node: Node) -> None:
        global _agent_port
        _agent_port = _held_port()
        node._ray_params.runtime_env_agent_port = _agent_port.getsockname()[1]
        for name in UNUSED_PORTS:
            persist_port(node.get_session_dir_path(), node._node_id, name, -1)
        start(node)
        with ExitStack() as failing:
            failing.callback(node.kill_all_processes, check_alive=False)  # nobody else has a node that failed
            _wait_until_registered(node)
            failing.pop_all()

    Node.start_ray_processes = start_and_wait
    try:
        yield
    finally:
        Node.start_ray_processes = start


def _held_port() -> socket.socket:
    """A free port, bound so that the system gives it to no other process. Ray's agent can listen on it nevertheless: both sockets
    have SO_REUSEADDR, and this one never listens."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def _wait_until_registered(node: Node) -> None:
    """Returns when its raylet is known to the cluster. Raises RuntimeError when it has ended, or takes longer than START_S."""
    cluster, deadline = GcsClient(address=node.gcs_address), time.monotonic() + START_S
    while not cluster.get_all_node_info():
        if dead := node.dead_processes():
            daemon, process = dead[0]
            raise RuntimeError(f"its {daemon} ended with code {process.returncode}.")
        if time.monotonic() > deadline:
            raise RuntimeError(f"it took longer than {START_S:.0f} s.")
        time.sleep(0.05)


def stop() -> None:
    """Ends all that this process started in it, but for actors that are to stay."""
    global _folder, _agent_port
    ray.shutdown()
    if _agent_port is not None:
        _agent_port.close()
        _agent_port = None
    if _folder is not None:
        _keep_last_words(_folder, "worker-*.err")
        _forget_authentication()
        shutil.rmtree(_folder, ignore_errors=True)
        _folder = None


def _keep_last_words(folder: Path, *names: str) -> None:
    """What these of its processes said last, such as why one crashed, goes to this process's log: Ray's own files end now."""
    logs = folder / "ray" / "session_latest" / "logs"
    for path in sorted(path for name in names for path in logs.glob(name)):
        if words := end_of(path, chars=LAST_WORDS_CHARS):
            logger.info("%s of Ray ended with:\n%s", path.name, words)


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
