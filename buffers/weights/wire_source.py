"""Versions on other nodes: what a puller takes its manifests and shards from.

Used by `buffers.weights.__main__`. Invariant: what was fetched is as it was sent; what it says is judged by the puller, by the
manifest's checksums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from buffers.errors import WeightsError
from buffers.weights.manifest import MANIFEST, Manifest, Shard, decode_manifest, published_file
from buffers.weights.puller import FolderSource
from buffers.weights.room import room_for
from buffers.weights.version_server import BYTES, MAX_READ_BYTES, READ, Read
from buffers.wire.address import WireError, WireLost
from buffers.wire.connection import Connection

AHEAD = 4
"""Reads under way at once."""
MAX_MANIFEST_BYTES = 64 << 20
ANSWER_S = 60.0
"""Seconds for one answer."""


class WireSource:
    """`folder`: what this node has published itself. Others are taken from where `turn_to` says. See
    `buffers.weights.puller.Source`."""

    def __init__(self, folder: Path, *, secret: bytes) -> None:
        self._folder = folder
        self._secret = secret
        self._home = ""
        self._shards: Mapping[str, str] = {}
        self._connections: dict[str, Connection] = {}

    def turn_to(self, home: str, shards: Mapping[str, str]) -> None:
        """`home`: the address of the server that has the manifests, empty: they are here. `shards`: file -> the address of the
        server that has it, where that is another one."""
        self._home, self._shards = home, shards

    def close(self) -> None:
        """End its connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def manifest(self, name: str) -> Manifest:
        """Raises WeightsError when there is no such version, or nobody answers."""
        if published_file(self._folder, name, MANIFEST).is_file() or not self._home:
            return FolderSource(self._folder).manifest(name)
        data = b"".join(self._chunks(self._home, name, MANIFEST, size=MAX_MANIFEST_BYTES))
        return decode_manifest(data, where=f"{name} of {self._home}")

    def fetch(self, name: str, shard: Shard, *, to: Path) -> None:
        """Puts the shard's file at `to`. Raises WeightsError."""
        address = self._shards.get(shard.file, self._home)
        if not address or published_file(self._folder, name, shard.file).is_file():
            return FolderSource(self._folder).fetch(name, shard, to=to)
        with room_for(shard.size, folder=to.parent, what=f"version {name}"), to.open("xb") as file:
            for data in self._chunks(address, name, shard.file, size=shard.size):
                file.write(data)

    def _chunks(self, address: str, name: str, file: str, *, size: int) -> Iterator[bytes]:
        """The file's bytes, as far as it has them."""
        try:
            yield from self._read(address, name, file, size=size)
        except WireError as error:
            with suppress(KeyError):
                self._connections.pop(address).close()
            raise WeightsError(
                f"{file} of version {name} must come from {address}, and did not: {error}; it is published again"
            ) from error

    def _read(self, address: str, name: str, file: str, *, size: int) -> Iterator[bytes]:
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = Connection(address, secret=self._secret)
        asked = answered = 0
        while answered < size:
            while asked < size and asked - answered < AHEAD * MAX_READ_BYTES:
                connection.send(READ, Read(name, file, asked, min(MAX_READ_BYTES, size - asked)))
                asked += MAX_READ_BYTES
                if file == MANIFEST:
                    break
            message = connection.receive(ANSWER_S)
            if message is None:
                raise WireLost(f"no answer within {ANSWER_S:.0f} s")
            if message.kind != BYTES:
                raise WireLost(msgspec.msgpack.decode(message.body, type=str))
            data = msgspec.msgpack.decode(message.body, type=bytes)
            yield data
            answered += MAX_READ_BYTES
            if len(data) < MAX_READ_BYTES:  # its end
                return
