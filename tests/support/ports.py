"""Ports that no other process is given between their choice and the moment in which a server listens there."""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def held_port() -> int:
    """A port of loopback, held for as long as this process lives: bound, and not listened on. Who says SO_REUSEADDR, as servers
    do, may bind it too, and listen, again and again; nobody who asks for any port gets it, nor a connection."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    return int(held.getsockname()[1])
