"""uvicorn as the server uses it: its HTTP protocol with a deadline, and its server without signal handlers.

A request must be there, whole, within `RECEIVE_S` of its connection or its first byte, and its head must be small; uvicorn
itself waits for ever. Used by `mocked_server.server`. Invariant: a client that sends slowly, or nothing, holds a connection
for that long and no longer; one that waits for an answer is never cut off. It knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from buffers.errors import UnderstudyError

RECEIVE_S = 10.0
MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers."""
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class ServerError(UnderstudyError):
    """The server cannot listen."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or ServerError naming the port in use. It listens at once: who connects waits until it is served, and
    nobody else is given the port (the kernel shares one that is only bound, if both sides said SO_REUSEADDR; gRPC does)."""
    # asyncio switches Nagle's algorithm off only where the protocol is named: each answer would take 40 ms more.
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, proto=socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen()
    except OSError as error:
        sock.close()
        raise ServerError(
            f"server.host:server.port must be free to listen on, got {host}:{port} ({error.strerror}); "
            "set server.port=0 for any free port"
        ) from None
    return sock


class PatientProtocol(HttpToolsProtocol):
    """See the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receiving: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._received()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            # Counted before it is parsed: the parser keeps a header until its end has come.
            self._head_bytes += min(len(data), data.find(b"\r\n\r\n") % (len(data) + 1))
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._expect()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._received()
        self._in_head = True
        super().on_message_complete()

    def _expect(self) -> None:
        self._received()
        self._receiving = self.loop.call_later(RECEIVE_S, self._give_up)

    def _received(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class QuietServer(uvicorn.Server):
    """uvicorn without its own signal handlers (the run has its own), telling when it listens."""

    on_started: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_started()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
