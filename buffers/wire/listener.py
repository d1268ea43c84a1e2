"""Takes connections of this run's processes and hands over what they say: one thread for all of them.

`Listener` is held by a `Service` (`buffers.wire.service`). Invariants: `on_message` gets messages of proven connections only, in
the order of each; a connection that sends an invalid message ends alone; who reads no answers, or is silent, holds up nobody.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from buffers.errors import UnderstudyError
from buffers.wire.address import Way, WireError
from buffers.wire.session import FAREWELL, MESSAGE, Message, Session
from buffers.wire.sockets import bind, end_context, new_context, unbind

logger = logging.getLogger(__name__)

TICK_S = 1.0
PROBE_S = 30.0
"""A connection that was silent for so long is asked whether it is still there."""
MAX_UNPROVEN = 256
"""Connections that have proven nothing yet. A further one takes the place of the oldest: by itself ZeroMQ would take as many as
this process may have files, and leave it none."""
SAY_AGAIN_S = 60.0
"""Seconds in which the same of strangers is logged once."""
MAX_MESSAGE_BYTES = 256 << 20
"""Most that a connection may say at once."""
_MAX_TURN = 256
"""Messages that are taken before those of this process are sent."""


class Peer:
    """A proven connection, as the listener knows it."""

    def __init__(self, name: bytes, *, session: Session, listener: Listener) -> None:
        self.name = name
        self.session = session
        self.heard_at = time.monotonic()
        """Time of its last message, of `time.monotonic`."""
        self.is_gone = False
        self._listener = listener

    def send(self, kind: str, body: Any = None, *, number: int = 0) -> None:
        """Send from any thread, without waiting. What a connection that ended would get is dropped."""
        self._listener.send(self, kind, body, number)


class Listener:
    """Listens until `close`. `on_message(peer, message)` and `on_tick()`, every second, are called in its thread and must not wait
    for it; a message that raises UnderstudyError or ValueError there ends its connection. `on_gone`: it ended."""

    def __init__(
        self,
        *,
        secret: bytes,
        way: Way,
        host: str = "127.0.0.1",
        port: int = 0,
        on_message: Callable[[Peer, Message], None],
        on_tick: Callable[[], None] = lambda: None,
        on_gone: Callable[[Peer], None] = lambda peer: None,
        name: str = "wire",
    ) -> None:
        self._secret = secret
        self._on_message, self._on_tick, self._on_gone = on_message, on_tick, on_gone
        self._context = new_context()
        try:
            self._socket, self.address = bind(self._context, host=host, port=port, way=way, secret=secret)
        except OSError:
            end_context(self._context)
            raise
        failures = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_ACCEPT_FAILED
        self._events = self._socket.get_monitor_socket(failures | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._peers: dict[bytes, Peer] = {}
        self._unproven: dict[bytes, Session] = {}
        """The oldest first."""
        self._strangers: dict[int, None] = {}
        """Descriptors of connections that have proven nothing, the oldest first."""
        self._proven_early: set[int] = set()
        """Descriptors of those that have proven themselves before ZeroMQ's word that they are there was read."""
        self._said_at: dict[str, float] = {}
        self._calls: deque[Callable[[], object]] = deque()
        self._waker, self._wakes = socket.socketpair()
        self._waker.setblocking(False)
        self._wakes.setblocking(False)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def way(self) -> Way:
        return self.address.way

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    def close(self) -> None:
        """Ends all connections. Idempotent; not in its own thread."""
        self._closing = True
        self._wake()
        self._thread.join()

    def send(self, peer: Peer, kind: str, body: Any, number: int) -> None:
        """See `Peer.send`."""
        if threading.current_thread() is self._thread:
            self._send(peer, kind, body, number)
        else:
            self.call(partial(self._send, peer, kind, body, number))

    def call(self, work: Callable[[], object]) -> None:
        """Have the listener's thread do this next, in the order of the calls; from any thread. Nothing is done after `close`."""
        self._calls.append(work)
        self._wake()

    def end(self, peer: Peer, why: str) -> None:
        """End a connection, in the listener's thread; its other side reads why."""
        if self._peers.pop(peer.name, None) is not None:
            peer.is_gone = True
            self._part(peer.name, why)
            self._on_gone(peer)

    def _wake(self) -> None:
        with suppress(OSError):  # it is awake, or has ended
            self._waker.send(b"x")

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._socket, self._events, self._wakes):
            poller.register(each, zmq.POLLIN)
        ticks_at = time.monotonic() + TICK_S
        try:
            while not self._closing:
                ready = dict(poller.poll(int(max(0.0, ticks_at - time.monotonic()) * 1000) + 1))
                if self._wakes.fileno() in ready:
                    self._wakes.recv(4096)
                if self._events in ready:
                    self._take_events()
                while self._calls and not self._closing:
                    self._calls.popleft()()
                if self._socket in ready:
                    self._take_turn()
                if time.monotonic() >= ticks_at:
                    ticks_at = time.monotonic() + TICK_S
                    self._probe()
                    self._on_tick()
        finally:
            self._closing = True
            self._socket.disable_monitor()
            end_context(self._context)
            self._waker.close()
            self._wakes.close()
            unbind(self.address)

    def _take_turn(self) -> None:
        for _ in range(_MAX_TURN):
            try:
                name, *parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._take(name.bytes, [part.buffer for part in parts], descriptor=int(name.get(zmq.SRCFD)))

    def _take(self, name: bytes, parts: list[memoryview], *, descriptor: int) -> None:
        peer = self._peers.get(name)
        try:
            if peer is None:
                self._greet(name, parts)
                if name in self._peers and self._strangers.pop(descriptor, descriptor) is not None:
                    self._proven_early.add(descriptor)
                return
            peer.heard_at = time.monotonic()
            if (size := sum(map(len, parts))) > MAX_MESSAGE_BYTES:
                raise WireError(f"a message may have {MAX_MESSAGE_BYTES} bytes, got {size}; send less at once")
            self._on_message(peer, peer.session.unpack(parts))
        except (UnderstudyError, ValueError, LookupError, TypeError, RecursionError) as error:
            logger.warning("a connection to %s ended: %s", self.address, error)
            self._unproven.pop(name, None)
            if peer is None:
                self._part(name, str(error))
            else:
                self.end(peer, str(error))

    def _greet(self, name: bytes, parts: list[memoryview]) -> None:
        data = bytes(parts[0][:4096]) if parts else b""
        if data[:1] == MESSAGE:
            raise WireError("a connection must begin with a greeting, got a message; connect again")
        if (session := self._unproven.pop(name, None)) is None:
            session = Session(self._secret, listens=True, signed=self.way is Way.SIGNED)
            session.take_greeting(data)
            if len(self._unproven) >= MAX_UNPROVEN:
                del self._unproven[next(iter(self._unproven))]
            self._unproven[name] = session
            self._put(name, [session.greeting()])
            return
        session.take_proof(data)
        self._peers[name] = Peer(name, session=session, listener=self)
        self._put(name, [session.proof()])

    def _send(self, peer: Peer, kind: str, body: Any, number: int) -> None:
        if not peer.is_gone and not self._put(peer.name, peer.session.pack(kind, body, number=number)):
            self.end(peer, "a connection must read what it gets")

    def _put(self, name: bytes, parts: list[Any]) -> bool:
        """False: it has left, or reads nothing."""
        try:
            self._socket.send_multipart([name, *parts], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def _part(self, name: bytes, why: str) -> None:
        self._put(name, [FAREWELL + why.encode()[:2000]])

    def _probe(self) -> None:
        long_ago = time.monotonic() - PROBE_S
        for peer in [peer for peer in self._peers.values() if peer.heard_at < long_ago]:
            peer.heard_at = time.monotonic()
            self._send(peer, "", None, 0)

    def _take_events(self) -> None:
        for _ in range(_MAX_TURN):
            if not self._events.poll(0):
                return
            event = recv_monitor_message(self._events)
            kind, value = event["event"], int(event["value"])
            if kind == zmq.EVENT_ACCEPTED and value in self._proven_early:
                self._proven_early.remove(value)
            elif kind == zmq.EVENT_ACCEPTED:
                self._strangers.pop(value, None)
                self._strangers[value] = None
                if len(self._strangers) > MAX_UNPROVEN:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    self._hang_up(oldest)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._strangers.pop(value, None)
                self._proven_early.discard(value)
            elif kind == zmq.EVENT_ACCEPT_FAILED:
                self._say("cannot take a connection: errno %s", value)
            else:
                self._say(
                    "gets bytes that do not prove that who sends them knows the run's secret, and drops them; give both sides the "
                    "same server.key, or look for who else is on this network"
                )

    def _hang_up(self, descriptor: int) -> None:
        """End a connection under ZeroMQ, which closes it then. The number may be another file's by now, which stays."""
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family != socket.AF_UNIX and self.address.place.endswith(f":{connection.getsockname()[1]}"):
                connection.shutdown(socket.SHUT_RDWR)
                self._say(
                    "has %s connections that prove nothing, and ends the oldest; look for who is on this network",
                    MAX_UNPROVEN,
                )

    def _say(self, what: str, *values: object) -> None:
        """Log it, unless that was done just now: strangers would fill the disk."""
        now = time.monotonic()
        if now - self._said_at.get(what, -SAY_AGAIN_S) >= SAY_AGAIN_S:
            self._said_at[what] = now
            logger.warning(f"%s {what}", self.address, *values)
