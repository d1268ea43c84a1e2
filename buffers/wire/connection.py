"""A connection to a listener of this run, from another process or machine.

Held by one thread of a client (`buffers.wire.client`): `send` and `receive` are its own, `post` and `wake` may be called by
others. Invariant: a connection is one conversation: what was sent arrives in its order, or the connection ends with WireLost, and
then nobody knows what of the last messages arrived. It never connects again by itself: its holder makes another, and sends
again what had no answer.
"""

from __future__ import annotations

import socket
import threading
import time
import warnings
from collections import deque
from contextlib import suppress
from typing import Any, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from buffers.wire.address import Way, WireAddress, WireError, WireLost
from buffers.wire.session import FAREWELL, WRONG_SECRET, Message, Session
from buffers.wire.sockets import HANDSHAKE_S, connect, end_context, new_context

SEND_S = 30.0
"""Seconds for a listener to read what waits to be sent to it."""
_LINGER_MS = 1000


class Connection:
    """See the module. Making one raises WireError where the other side does not prove the secret, OtherVersion, WireLost."""

    def __init__(self, address: str | WireAddress, *, secret: bytes) -> None:
        self.address = address if isinstance(address, WireAddress) else WireAddress.parse(address)
        self._is_closed = True  # until there is something to close
        self._context = new_context()
        try:
            self._socket, self._events = connect(self._context, self.address, secret=secret)
        except (zmq.ZMQError, OSError, ValueError):
            end_context(self._context)
            raise
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._posted: deque[tuple[str, Any, int]] = deque()
        self._is_closed = False
        self._end: WireError | None = None
        self._lock = threading.Lock()
        self._poller = zmq.Poller()
        for each in (self._socket, self._events, self._wakes):
            self._poller.register(each, zmq.POLLIN)
        self._session = Session(secret, listens=False, signed=self.address.way is Way.SIGNED)
        self._is_greeted = False
        try:
            self._shake_hands()
            self._is_greeted = True
        finally:
            if not self._is_greeted:
                self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _shake_hands(self) -> None:
        until = time.monotonic() + HANDSHAKE_S
        self._put([self._session.greeting()])
        self._session.take_greeting(self._handshake_part(until))
        self._put([self._session.proof()])
        self._session.check_version()
        self._session.take_proof(self._handshake_part(until))

    def _handshake_part(self, until: float) -> bytes:
        while time.monotonic() < until:
            if (parts := self._take(until - time.monotonic())) is not None:
                return bytes(parts[0])
        raise WireLost(
            f"the listener at {self.address} must answer within {HANDSHAKE_S:.0f} s, but did not; see its log"
        )

    def send(self, kind: str, body: Any = None, *, number: int = 0) -> None:
        """Raises WireLost when the other side does not read for `SEND_S`."""
        self._put(self._session.pack(kind, body, number=number))

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None after `timeout_s` (None: no limit) and after `wake`. Sends what was posted. Raises WireError."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            parts = self._take(None if until is None else max(0.0, until - time.monotonic()))
            message = None if parts is None else self._session.unpack(parts)
            if message is None or message.kind:  # else it was only asked whether it is there
                return message

    def post(self, kind: str, body: Any = None, *, number: int = 0) -> None:
        """`send`, from any thread: it is sent by the one that is in `receive`, or enters it next."""
        self._posted.append((kind, body, number))
        self.wake()

    def wake(self) -> None:
        """End the present `receive`, or the next one. From any thread."""
        with self._lock:
            if not self._is_closed:
                with suppress(BlockingIOError):
                    self._waker.send(b"x")

    def close(self) -> None:
        """Idempotent. What was sent is given a second to leave."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._wakes.close()
            self._waker.close()
        self._socket.disable_monitor()
        end_context(self._context, linger_ms=_LINGER_MS if self._is_greeted else 0)

    def __del__(self) -> None:
        if not self._is_closed:
            warnings.warn(f"a connection to {self.address} was not closed", ResourceWarning, source=self, stacklevel=2)
            for each in (self._socket, self._events):
                each.close(0)
            for pipe in (self._wakes, self._waker):
                pipe.close()

    def _put(self, parts: list[Any]) -> None:
        until = time.monotonic() + SEND_S
        while True:
            if self._end is not None:
                raise self._end
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
                return
            except zmq.Again:
                self._until_writable(until)

    def _until_writable(self, until: float) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLOUT)
        poller.register(self._events, zmq.POLLIN)
        ready = dict(poller.poll(int(max(0.0, until - time.monotonic()) * 1000) + 1))
        if self._events in ready:
            raise self._cut()
        if not ready:
            raise WireLost(f"the listener at {self.address} must read what it gets, but did not for {SEND_S:.0f} s")

    def _take(self, timeout_s: float | None) -> list[memoryview] | None:
        """The parts of what came; None after `timeout_s`, or when another thread woke this one."""
        ready = dict(self._poller.poll(None if timeout_s is None else int(timeout_s * 1000)))
        if self._wakes.fileno() in ready:
            self._wakes.recv(4096)
        while self._posted:
            kind, body, number = self._posted.popleft()
            self.send(kind, body, number=number)
        if self._socket in ready:  # what came before the end is read before it
            parts = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
            if bytes(parts[0][:1]) == FAREWELL:
                raise WireLost(
                    f"the listener at {self.address} ended the connection: {bytes(parts[0][1:]).decode(errors='replace')}"
                )
            return parts
        if self._end is not None or self._events in ready:
            raise self._cut()
        return None

    def _cut(self) -> WireError:
        """What ended it; the same again afterwards."""
        self._end = self._end or self._read_end()
        return self._end

    def _read_end(self) -> WireError:
        event = recv_monitor_message(self._events)["event"]
        if event in (
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
            zmq.EVENT_HANDSHAKE_FAILED_AUTH,
        ):
            return WireError(f"{self.address}: {WRONG_SECRET}")
        return WireLost(f"the connection to {self.address} was cut; its listener has ended, or the network fails")
