"""One connection's conversation, without a socket: who is there, of which version, and messages as parts of bytes.

Used by `listener` and `connection`. Both sides send a nonce and their version, then prove with the run's secret that they have
read the other's: HMAC-SHA256 over both greetings, with another key for each side. On a SIGNED way each message carries such a
proof over its number and its content, so that none can be forged, changed, repeated or taken from another connection; on the
other ways the way itself does that. Invariants: nothing is unpickled or evaluated, a message is msgpack; no part is longer
than `MAX_PART_BYTES`, so that a stranger can make a listener hold no more than that.

    greeting: "h" | msgpack [project's version, number of the language, nonce, proof or empty]
    proof:    "p" | 32 bytes        welcome: "w" | 32 bytes        farewell: "g" | text, why
    message:  "m" | 32 bytes if SIGNED, then msgpack [kind, number, body] in parts
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from buffers.wire.address import OtherVersion, WireError

PROJECT = "0.2.0.dev0"
LANGUAGE = 4
"""Raise it when what is said over the wire changes: the greeting, a message's kind, or its body."""
MAX_PART_BYTES = 1 << 20
MAC_BYTES = 32
_NONCE = 32
HELLO, PROOF, WELCOME, FAREWELL, MESSAGE = b"h", b"p", b"w", b"g", b"m"
WRONG_SECRET = (
    "both sides must prove that they know the run's secret, the other one did not; give both the same server.key"
)


class Greeting(msgspec.Struct, array_like=True, frozen=True):
    """The same in all versions, so that each can name the other."""

    project: str
    language: int
    nonce: bytes
    proof: bytes = b""


class Message(msgspec.Struct, array_like=True, frozen=True):
    """What is said: `body` is decoded by those who know the kind."""

    kind: str
    number: int
    body: msgspec.Raw


_GREETINGS = msgspec.msgpack.Decoder(Greeting)
_MESSAGES = msgspec.msgpack.Decoder(Message)


class Session:
    """One side of a connection. `listens`: the side that was connected to. `signed`: see the module."""

    def __init__(self, secret: bytes, *, listens: bool, signed: bool) -> None:
        self._secret = secret
        self._listens = listens
        self._signed = signed
        self._own = Greeting(PROJECT, LANGUAGE, secrets.token_bytes(_NONCE))
        self._out = self._in = b""
        self._num_sent = self._num_taken = 0

    def greeting(self) -> bytes:
        """What this side says first; the listener's holds its proof, so it is made after `take_greeting`."""
        proof = _mac(self._out, -1) if self._listens else b""
        return HELLO + msgspec.msgpack.encode(msgspec.structs.replace(self._own, proof=proof))

    def take_greeting(self, data: bytes) -> None:
        """Raises WireError where the other side proves another secret, OtherVersion for another version that knows it."""
        try:
            other = _GREETINGS.decode(data[1:])
        except msgspec.MsgspecError as error:
            raise WireError(f"a connection must begin with a greeting, got {data[:40]!r} ({error})") from error
        if data[:1] != HELLO or len(other.nonce) != _NONCE:
            raise WireError(f"a connection must begin with a greeting, got {data[:40]!r}")
        asking, answering = (other, self._own) if self._listens else (self._own, other)
        both = msgspec.msgpack.encode([[each.project, each.language, each.nonce] for each in (asking, answering)])
        keys = [hmac.digest(self._secret, b"wire " + side + both, "sha256") for side in (b"asks", b"answers")]
        self._in, self._out = keys if self._listens else reversed(keys)
        if not self._listens and not hmac.compare_digest(other.proof, _mac(self._in, -1)):
            raise WireError(WRONG_SECRET)
        self._theirs = other

    def proof(self) -> bytes:
        """That this side knows the secret; a listener's is that it took the other's."""
        return (WELCOME if self._listens else PROOF) + _mac(self._out, -2)

    def take_proof(self, data: bytes) -> None:
        """Raises WireError for another secret, OtherVersion for another version."""
        if data[:1] != (PROOF if self._listens else WELCOME) or not hmac.compare_digest(data[1:], _mac(self._in, -2)):
            raise WireError(WRONG_SECRET)
        self.check_version()

    def check_version(self) -> None:
        """Raises OtherVersion; of use once the other side has proven itself."""
        theirs = self._theirs
        if (theirs.project, theirs.language) != (PROJECT, LANGUAGE):
            raise OtherVersion(
                f"both sides must run the same version of this project, here it is {PROJECT} (wire {LANGUAGE}), got "
                f"{theirs.project:.40} (wire {theirs.language}) on the other side; check out the same one on both machines"
            )

    def pack(self, kind: str, body: Any, *, number: int) -> list[bytes | memoryview]:
        """A message's parts."""
        whole = memoryview(msgspec.msgpack.encode((kind, number, body)))
        parts: list[bytes | memoryview] = [
            whole[start : start + MAX_PART_BYTES] for start in range(0, len(whole), MAX_PART_BYTES)
        ]
        head = MESSAGE
        if self._signed:
            head += _mac(self._out, self._num_sent, *parts)
            self._num_sent += 1
        return [head, *parts]

    def unpack(self, parts: Sequence[bytes | memoryview]) -> Message:
        """Raises WireError for what is no message, or not the other side's next one."""
        head, *rest = parts
        if self._signed:
            if not hmac.compare_digest(bytes(head[1:]), _mac(self._in, self._num_taken, *rest)):
                raise WireError(
                    f"message {self._num_taken} of a connection must carry the proof of the run's secret, got another one: it was "
                    f"forged, changed or repeated; look for who else is on this network, or set run.trusted_network=false"
                )
            self._num_taken += 1
        try:
            if bytes(head[:1]) != MESSAGE:
                raise WireError(f"a message must follow the greetings, got {bytes(head[:40])!r}")
            return _MESSAGES.decode(rest[0] if len(rest) == 1 else b"".join(rest))
        except msgspec.MsgspecError as error:
            raise WireError(
                f"a message must be msgpack of [kind, number, body], got {len(rest)} parts: {error}"
            ) from error


def _mac(key: bytes, number: int, *parts: bytes | memoryview) -> bytes:
    mac = hmac.new(key, number.to_bytes(8, "little", signed=True), hashlib.sha256)
    for part in parts:
        mac.update(part)
    return mac.digest()
