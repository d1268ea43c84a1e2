"""Serves the published versions in a folder to the pullers of other nodes, over the wire.

Held by `learner.checkpoints.weight_sync` on the run's node and by `buffers.weights.node_weights` on others that have ranks of the
learner. Weights cross the network in the clear, but each message carries a proof of the run's secret: a cipher would cost ten
times as much. Invariant: nothing but the files of versions in its folder can be read.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from buffers.errors import WeightsError
from buffers.weights.manifest import published_file
from buffers.wire.address import Way, WireAddress, is_loopback
from buffers.wire.listener import Listener, Peer
from buffers.wire.session import Message

MAX_READ_BYTES = 4 << 20
"""Most bytes of one answer."""
READ, BYTES, MISSING = "read", "bytes", "missing"


class Read(msgspec.Struct, array_like=True, frozen=True):
    """A question: `size` bytes of a version's file from `offset` on."""

    name: str
    file: str
    offset: int
    size: int


_READS = msgspec.msgpack.Decoder(Read)


class VersionServer:
    """Listens from the start until `close`. `folder`: of a `VersionStore`, or of the shards of this node's ranks."""

    def __init__(self, folder: Path, *, secret: bytes, host: str) -> None:
        self._folder = folder
        way = Way.LOCAL if is_loopback(host) else Way.SIGNED
        self._listener = Listener(secret=secret, way=way, host=host, on_message=self._take, name="weights wire")

    @property
    def address(self) -> WireAddress:
        """The address that pullers connect to."""
        return self._listener.address

    def close(self) -> None:
        """End all connections."""
        self._listener.close()

    def _take(self, peer: Peer, message: Message) -> None:
        if message.kind != READ:
            raise WeightsError(f"a version's files can be read, and nothing else, got {message.kind:.40}")
        try:
            asked = _READS.decode(message.body)
            peer.send(BYTES, self._bytes(asked), number=message.number)
        except OSError as error:
            peer.send(MISSING, str(error), number=message.number)

    def _bytes(self, asked: Read) -> bytes:
        path = published_file(self._folder, asked.name, asked.file)
        if not 0 <= asked.size <= MAX_READ_BYTES or asked.offset < 0:
            raise WeightsError(f"a read must have 0 to {MAX_READ_BYTES} bytes from 0 on, got {asked}")
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return os.pread(descriptor, asked.size, asked.offset)
        finally:
            os.close(descriptor)
