"""uvicorn as the server uses it: its HTTP protocol with deadlines and bounds, and its server without signal handlers.

A request must be there, whole, within `RECEIVE_S` of its connection or its first byte, and its head must be small; who reads
nothing of a long answer for `SEND_S` is cut off; beyond `MAX_CONNECTIONS` the one that has been idle longest is closed. uvicorn
itself waits without end. Used by `mocked_server.server` and `mocked_server.processes.server_process`. Invariant: a client that
sends or reads slowly, or not at all, holds a connection for that long and no longer; one that waits for an answer is never cut
off. It knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from buffers.errors import UnderstudyError

RECEIVE_S = 60.0
"""Long enough for an honest client on a busy machine, which may connect and send nothing for many seconds, and for a slow line."""
SEND_S = 60.0
"""How long a client may read nothing while more waits than its connection's buffers hold; also how long a connection that was
closed keeps what was not read yet."""
MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers; also what frames the parts of a body that comes in parts, beyond `FRAME_RATIO` bytes for each of
its own, with what follows it."""
FRAME_RATIO = 8
MAX_CONNECTIONS = 8192
"""Most connections: half of the files that the process may open; the rest is for the ledger, checkpoints and the engine."""
MAX_FILES = 65536
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class ServerError(UnderstudyError):
    """The server cannot listen."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or ServerError naming the port in use. It listens at once: who connects waits until it is served, and
    no other process is given the port (the kernel shares one that is only bound, if both sides said SO_REUSEADDR; gRPC does)."""
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
        self._sending: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_bytes = 0
        self._frame_bytes = 0
        self._idle_since = self.loop.time()
        self._is_served = False

    @property
    def is_answered(self) -> bool:
        """Nothing that it asked for is still to be answered."""
        return self.cycle is None or (self.cycle.response_complete and not self.pipeline)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect()
        if len(self.connections) > max_connections():
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._received()
        self._sent()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._receiving is None:
            self._expect()  # also for bytes that begin nothing: uvicorn takes its own clock off with any byte
        if self._in_head:
            # Counted before it is parsed: the parser keeps a header until its end has come.
            self._head_bytes += min(len(data), data.find(b"\r\n\r\n") % (len(data) + 1))
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_TOO_LARGE)
                self._close()
                return
        else:
            self._frame_bytes += len(data)
        super().data_received(data)
        if self._frame_bytes > MAX_HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._frame_bytes = True, 0
        self._expect()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # what follows a body in parts is no header: checks were made by those before it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._frame_bytes = max(0, self._frame_bytes - FRAME_RATIO * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._received()
        self._in_head, self._frame_bytes = True, 0
        super().on_message_complete()
        if self.is_answered:  # before all of it was here: nothing else would look after this connection
            self._expect()

    def on_response_complete(self) -> None:
        self._idle_since, self._is_served = self.loop.time(), True
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._sent()
        self._sending = self.loop.call_later(SEND_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._sent()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        self._close()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _expect(self) -> None:
        self._received()
        self._receiving = self.loop.call_later(RECEIVE_S, self._give_up)

    def _received(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _sent(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _give_up(self) -> None:
        cycle = self.cycle
        is_reading = cycle is None or not (self.flow.read_paused or cycle.waiting_for_100_continue)
        if self.is_answered or (is_reading and cycle.more_body):
            self._close()
        else:
            self._expect()  # it waits for us: for its answer, or until its body is read

    def _close(self) -> None:
        """Close the connection, also when its client never reads what was sent."""
        self.transport.close()
        self.loop.call_later(SEND_S, self.transport.abort)

    def _make_room(self) -> None:
        """Ends the connection that has waited longest for a request, of those that never sent one if there are such; this
        one, when all are being answered."""
        others = [
            each
            for each in self.connections
            if isinstance(each, PatientProtocol) and each.is_answered and not each.transport.is_closing()
        ]
        first = min(others, key=lambda each: (each._is_served, each._idle_since), default=self)
        first.transport.abort()


def max_connections() -> int:
    """Most connections that may be open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


def allow_files() -> None:
    """This process may open as many files as the system lets it, up to `MAX_FILES`; many systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HttpService(uvicorn.Server):
    """An application on sockets that listen already, on the running event loop, from `start` until `close`: uvicorn without its own
    signal handlers (the run has its own)."""

    def __init__(self, app: Any, *, sockets: Sequence[socket.socket]) -> None:
        config = uvicorn.Config(
            app,
            http=PatientProtocol,
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=120,
            lifespan="off",
        )
        super().__init__(config)
        self._sockets = list(sockets)
        self._listens = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        """Ends with the service, or raises why it failed."""

    async def start(self) -> None:
        """Returns when requests are answered. Raises ServerError."""
        self.task = asyncio.create_task(self.serve(sockets=self._sockets), name="serve")
        waiter = asyncio.create_task(self._listens.wait())
        await asyncio.wait({waiter, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if not self._listens.is_set():
            waiter.cancel()
            raise ServerError(f"the HTTP server ended while it started: {self.task.exception()!r}")

    async def close(self) -> None:
        """Stop listening, end open connections."""
        if self.task is not None:
            self.should_exit = True
            self.force_exit = True
            await self.task
        for sock in self._sockets:
            sock.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        allow_files()
        await super().startup(sockets)
        if self.started:
            self._listens.set()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
