"""Rows from other processes and machines: a socket that takes rounds as the bytes in which they are stored.

`RoundServer` listens beside a `Ledger`, in threads of its own; `RoundClient` is what a process on another node holds. A
frame is answered once its rounds are on disk; until then the client hears every second that they wait. Both sides
prove with each frame that they know the secret: HMAC-SHA256 over the connection's nonces, the frame's number and its
content, so that nothing can be forged, changed, repeated or taken from another connection; what is said is not secret.
Invariants: nothing is unpickled or evaluated; no frame is larger than `MAX_FRAME_BYTES`; a body is decoded and checked
before it is stored. It carries rounds only.

    frame: u32 header bytes, u32 body bytes, 32 bytes MAC, header (JSON), body (of each round: stored body, memo, flags)
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Self

from buffers.errors import EpisodeClosed, EpisodeError, StorageFull, UnderstudyError, UnknownEpisode
from buffers.ledger.encode import stored_body, stored_round
from buffers.ledger.episodes import StoredRound
from buffers.ledger.ledger import Ledger
from buffers.ledger.round_codec import decode
from buffers.records import Round

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_HEADER_BYTES = 1024 * 1024
RECEIVE_S = 30.0
"""Seconds for the rest of a frame that has begun."""
HELLO_S = 10.0
"""Seconds for the whole of a client's proof."""
MAX_UNPROVEN = 64
"""Connections that have proven nothing yet. A further one takes the place of the oldest: a proof takes milliseconds."""
STILL_S = 1.0
"""Seconds between two messages to a waiting client that the ledger still waits for its disk."""
MAX_REASON = 100
"""Characters of why a round ended."""
_NONCE = 32
_MAX_NUMBER = 2**31 - 1
_SIZES = struct.Struct("<II")
_FIELDS = ("episode_id", "round_index", "parent", "finish_reason")
_ERRORS: dict[str, type[UnderstudyError]] = {
    kind.__name__: kind for kind in (EpisodeClosed, EpisodeError, StorageFull, UnderstudyError, UnknownEpisode)
}
"""What a refusal can be; over the wire it is a name and a text."""


class EndpointError(UnderstudyError):
    """The other side is not who it should be, or said what no frame can say."""


class Channel:
    """One connection of either side: frames out, frames in, each numbered and proven."""

    def __init__(self, sock: socket.socket, *, secret: bytes, listens: bool) -> None:
        self._sock = sock
        sock.settimeout(HELLO_S)
        until = time.monotonic() + HELLO_S
        own = secrets.token_bytes(_NONCE)
        sock.sendall(own)
        other = self._exactly(_NONCE, until=until)
        # Which side speaks is part of the key: a frame cannot be sent back to where it came from.
        nonces = other + own if listens else own + other
        self._out = hmac.digest(secret, nonces + (b"answer" if listens else b"ask"), "sha256")
        self._in = hmac.digest(secret, nonces + (b"ask" if listens else b"answer"), "sha256")
        self._sent, self._taken = 0, 0
        # Before anything that takes memory: who cannot prove this is sent away.
        sock.sendall(_mac(self._out, -1, b"hello"))
        if not hmac.compare_digest(self._exactly(32, until=until), _mac(self._in, -1, b"hello")):
            raise EndpointError("both sides must know the run's secret, the other one does not; give it the same file")
        sock.settimeout(RECEIVE_S)

    def send(self, header: dict[str, Any], *, body: Sequence[bytes] = ()) -> None:
        head = json.dumps(header).encode()
        sizes = _SIZES.pack(len(head), sum(map(len, body)))
        mac = _mac(self._out, self._sent, sizes, head, *body)
        self._sent += 1
        self._sock.sendall(b"".join((sizes, mac, head, *body)))

    def receive(self, *, wait: bool = False) -> tuple[dict[str, Any], memoryview] | None:
        """The next frame; None when the other side has closed. `wait`: for as long as it takes until one begins."""
        self._sock.settimeout(None if wait else RECEIVE_S)
        first = self._sock.recv(1)
        if not first:
            return None
        self._sock.settimeout(RECEIVE_S)
        sizes = first + self._exactly(_SIZES.size - 1)
        num_head, num_body = _SIZES.unpack(sizes)
        if num_head > MAX_HEADER_BYTES or num_body > MAX_FRAME_BYTES:
            raise EndpointError(
                f"a frame may have {MAX_HEADER_BYTES} + {MAX_FRAME_BYTES} bytes, got {num_head} + {num_body}"
            )
        mac, head, body = self._exactly(32), self._exactly(num_head), self._exactly(num_body)
        if not hmac.compare_digest(mac, _mac(self._in, self._taken, sizes, head, body)):
            raise EndpointError(
                "a frame must be proven with the run's secret, got another proof; give both sides the same"
            )
        self._taken += 1
        header = json.loads(head)
        if not isinstance(header, dict):
            raise EndpointError("a frame's header must be an object")
        return header, memoryview(body)

    def close(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _exactly(self, number: int, *, until: float | None = None) -> bytes:
        """`until`, of `time.monotonic`: it must be there then, however many pieces it comes in."""
        data = bytearray(number)
        view, got = memoryview(data), 0
        while got < number:
            if until is not None:
                self._sock.settimeout(max(0.001, until - time.monotonic()))
            if (more := self._sock.recv_into(view[got:])) == 0:
                raise EndpointError(f"a frame must be whole, got {got} of {number} bytes before the connection ended")
            got += more
        return bytes(data)


class RoundServer:
    """Listens until `close`. `address`: where. `state`: said with each answer, as JSON."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        state: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._ledger = ledger
        self._secret = secret
        self._state = state
        self._socket = socket.create_server((host, port))
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._open: set[Channel] = set()
        self._unproven: dict[socket.socket, None] = {}
        """The oldest first."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="row endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections."""
        self._ended.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        with self._lock:
            for channel in self._open:
                channel.close()
            for sock in self._unproven:
                _shut(sock)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if self._ended.is_set():
                    return
                logger.warning("the row endpoint cannot take a connection: %s", error)  # no descriptor is free
                self._ended.wait(STILL_S)
                continue
            with self._lock:
                if len(self._unproven) >= MAX_UNPROVEN:
                    _shut(oldest := next(iter(self._unproven)))
                    del self._unproven[oldest]
                self._unproven[sock] = None
            try:
                threading.Thread(target=self._serve, args=(sock,), name="row connection", daemon=True).start()
            except RuntimeError as error:  # the system gives no more threads
                logger.warning("the row endpoint cannot serve a connection: %s", error)
                with self._lock:
                    self._unproven.pop(sock, None)
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        channel = None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(sock, secret=self._secret, listens=True)
            with self._lock:
                self._unproven.pop(sock, None)
                self._open.add(channel)
            while (frame := channel.receive(wait=True)) is not None:
                self._store(channel, *frame)
        except (UnderstudyError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            logger.warning("a row connection ended: %s", error)
        finally:
            with self._lock:
                self._unproven.pop(sock, None)
                self._open.discard(channel)  # type: ignore[arg-type]
            sock.close()

    def _store(self, channel: Channel, header: dict[str, Any], body: memoryview) -> None:
        """Answers why each round was refused; None: it is on disk."""
        rounds: list[StoredRound] = []
        refused: dict[int, EpisodeError] = {}
        start = 0
        for place, entry in enumerate(header["rounds"]):
            *names, size, memo_size, num_flags = _checked(entry)
            stored = bytes(body[start : start + size])
            memo = bytes(body[start + size : start + size + memo_size])
            start += size + memo_size
            trained = None if num_flags is None else bytes(body[start : start + num_flags])
            start += num_flags or 0
            fields = dict(zip(_FIELDS, names, strict=True))
            try:
                rounds.append(stored_body(decode(stored), **fields, memo=memo, trained=trained, body=stored))
            except EpisodeError as error:
                refused[place] = error
        future = self._ledger.put_rounds(rounds)
        while not future.done():
            try:
                future.exception(STILL_S)
            except TimeoutError:
                channel.send({"waiting": self._state()})
        if (failure := future.exception()) is not None:
            channel.send({"refused": _named(failure), "state": self._state()})
            return
        outcomes = iter(future.result())
        errors = [refused[place] if place in refused else next(outcomes) for place in range(len(rounds) + len(refused))]
        channel.send({"errors": [error and _named(error) for error in errors], "state": self._state()})


class RoundClient:
    """Stores rounds in a ledger elsewhere. One thread at a time. `on_state` gets what the endpoint says of its ledger."""

    def __init__(
        self, address: tuple[str, int], *, secret: bytes, on_state: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> None:
        self._on_state = on_state
        sock = socket.create_connection(address, timeout=RECEIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._channel = Channel(sock, secret=secret, listens=False)
        except (EndpointError, OSError):
            sock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put_rounds(self, rounds: Iterable[Round]) -> list[EpisodeError | None]:
        """Sends rounds as `put_stored`. Raises EpisodeError for numbers that could not be trained."""
        return self.put_stored([stored_round(round_) for round_ in rounds])

    def put_stored(self, rounds: Sequence[StoredRound]) -> list[EpisodeError | None]:
        """Store rounds: why each was refused, None for those that are on disk. Raises EndpointError or OSError when it is not
        known whether they are; then the same may be sent again over a new connection. Raises what the ledger says when it takes
        none of them."""
        body: list[bytes] = []
        entries = []
        for stored in rounds:
            memo = stored.memo or b""
            trained = stored.trained
            sizes = len(stored.body), len(memo), None if trained is None else len(trained)
            entries.append([*(getattr(stored, name) for name in _FIELDS), *sizes])
            body += [stored.body, memo, trained or b""]
        self._channel.send({"rounds": entries}, body=body)
        while True:
            if (answer := self._channel.receive()) is None:
                raise EndpointError("the ledger's side must answer, but closed the connection; connect and send again")
            header = answer[0]
            if "waiting" in header:
                self._on_state(header["waiting"])
                continue
            self._on_state(header["state"])
            if "refused" in header:
                raise _error(header["refused"])
            errors = [named and _error(named) for named in header["errors"]]
            return [
                error if error is None or isinstance(error, EpisodeError) else EpisodeError(error) for error in errors
            ]

    def close(self) -> None:
        self._channel.close()


def _checked(entry: Any) -> list[Any]:
    """What a header says of one round, if each part is of its kind: SQLite takes a text for a number. Raises EndpointError."""
    match entry:
        case [str(), int(), int() | None, str() as reason, int(), int(), int() | None] if len(reason) <= MAX_REASON:
            numbers = [part for part in entry[1:3] if part is not None]  # a negative one is the ledger's to refuse
            sizes = [part for part in entry[4:] if part is not None]
            if (
                all(type(number) is int and abs(number) <= _MAX_NUMBER for number in [*numbers, *sizes])
                and min(sizes) >= 0
            ):
                return list(entry)
    raise EndpointError(
        f"a frame's rounds must be an episode's id, the round's and its parent's number, why it ended, and three sizes, got "
        f"{str(entry)[:120]}"
    )


def _shut(sock: socket.socket) -> None:
    """Wakes what waits for the connection, which closes it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _named(error: BaseException) -> list[str]:
    kind = type(error).__name__
    return [kind if kind in _ERRORS else UnderstudyError.__name__, str(error)]


def _error(named: list[str]) -> UnderstudyError:
    kind, text = named
    return _ERRORS[kind](text)


def _mac(key: bytes, number: int, *parts: bytes) -> bytes:
    mac = hmac.new(key, number.to_bytes(8, "little", signed=True), hashlib.sha256)
    for part in parts:
        mac.update(part)
    return mac.digest()
