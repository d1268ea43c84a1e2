"""ZeroMQ's sockets for each way to a listener, with keys that follow from the run's secret."""

from __future__ import annotations

import hmac
import shutil
import tempfile
from pathlib import Path

import zmq
from zmq.utils import z85

from buffers.wire.address import Way, WireAddress
from buffers.wire.session import MAX_PART_BYTES

HANDSHAKE_S = 10.0
"""Seconds for the whole of a stranger's proof."""
_MAX_SOCKET_CHARS = 60
_RECEIVE_QUEUE, _SEND_QUEUE = 64, 1024
"""Messages that wait in a connection's queues; then it is not read, and what is sent to it is refused."""


_CONTEXTS: set[zmq.Context[zmq.Socket[bytes]]] = set()
"""Those that are not ended. Garbage collection must not find one: pyzmq would wait without end for sockets that it has lost."""


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """One of a connection's, or a listener's, own; `end_context` ends it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    _CONTEXTS.add(context)
    return context


def end_context(context: zmq.Context[zmq.Socket[bytes]], *, linger_ms: int = 0) -> None:
    """Close all its sockets, and end it."""
    context.destroy(linger_ms)
    _CONTEXTS.discard(context)


def bind(
    context: zmq.Context[zmq.Socket[bytes]], *, host: str, port: int, way: Way, secret: bytes
) -> tuple[zmq.Socket[bytes], WireAddress]:
    """A listener's socket. LOCAL: in a folder of its own, which `unbind` removes. Raises OSError."""
    socket = context.socket(zmq.ROUTER)
    _limit(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what is sent to who has left raises
    if way is Way.LOCAL:
        folder = tempfile.mkdtemp(prefix="understudy-wire-", dir=_folder_for_sockets())
        address = WireAddress(way, str(Path(folder) / "socket"))
        socket.bind(address.endpoint)
        return socket, address
    if way is Way.ENCRYPTED:
        socket.curve_secretkey, _ = _listener_keys(secret)
        socket.curve_server = True
    socket.ipv6 = ":" in host
    place = f"[{host}]" if ":" in host else host
    try:
        socket.bind(f"tcp://{place}:{port or '*'}")
    except zmq.ZMQError as error:
        socket.close(0)
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error}") from error
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return socket, WireAddress(way, f"{place}:{bound.rpartition(':')[2]}")


def unbind(address: WireAddress) -> None:
    """Remove what `bind` left in the file system."""
    if address.way is Way.LOCAL:
        shutil.rmtree(Path(address.place).parent, ignore_errors=True)


def connect(
    context: zmq.Context[zmq.Socket[bytes]], address: WireAddress, *, secret: bytes
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A connection's socket, which never connects again by itself, and the socket that tells when it is cut."""
    socket = context.socket(zmq.DEALER)
    _limit(socket)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    if address.way is Way.ENCRYPTED:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        _, socket.curve_serverkey = _listener_keys(secret)
    socket.ipv6 = "[" in address.place
    cut = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
    failed = (
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    )
    events = socket.get_monitor_socket(cut | failed)
    socket.connect(address.endpoint)
    return socket, events


def _limit(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PART_BYTES + 4096)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    socket.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
    socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
    socket.setsockopt(zmq.LINGER, 0)


def _listener_keys(secret: bytes) -> tuple[bytes, bytes]:
    """(secret key, public key) of the listener. Who does not know the run's secret knows neither, and cannot even greet."""
    private = z85.encode(hmac.digest(secret, b"wire curve listener", "sha256"))
    return private, zmq.curve_public(private)


def _folder_for_sockets() -> str:
    """The folder for temporary files, or /tmp where its name is too long for the path of a Unix socket (107 bytes)."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= _MAX_SOCKET_CHARS else "/tmp"
