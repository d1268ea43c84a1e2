"""Serves the published versions in a folder to the pullers of other nodes, over the wire.

Held by `learner.checkpoints.weight_sync` on the run's node and by `buffers.weights.node_weights` on others that have ranks of the
learner. Weights cross the network in the clear, but each message carries a proof of the run's secret: a cipher would cost ten
times as much. Invariant: nothing but the files of versions in its folder can be read.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from buffers.errors import UnderstudyError, WeightsError
from buffers.weights.dense_file import room_for
from buffers.weights.manifest import MANIFEST, Manifest, Shard, decode_manifest, published_file
from buffers.weights.puller import FolderSource
from buffers.wire.address import Way, is_loopback
from buffers.wire.client import Client
from buffers.wire.rpc import Later, remote
from buffers.wire.service import Service

MAX_READ_BYTES = 4 << 20
"""Most bytes of one answer."""


class VersionServer(Service):
    """Listens from the start until `close`. `folder`: of a `VersionStore`, or of the shards of this node's ranks."""

    def __init__(self, folder: Path, *, secret: bytes, host: str) -> None:
        super().__init__(
            name="published weights", secret=secret, way=Way.LOCAL if is_loopback(host) else Way.SIGNED, host=host
        )
        self._folder = folder
        self.listen()

    @remote
    def read(self, name: str, file: str, offset: int, size: int) -> Later[bytes]:
        """`size` bytes of a version's file from `offset` on; fewer at its end."""
        path = published_file(self._folder, name, file)
        if not 0 <= size <= MAX_READ_BYTES or offset < 0:
            raise WeightsError(
                f"a read must have 0 to {MAX_READ_BYTES} bytes from 0 on, got {size} from {offset} of {file}"
            )

        def data() -> bytes:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                return os.pread(descriptor, size, offset)
            finally:
                os.close(descriptor)

        return Later([], data)


# The other side: versions on other nodes, which a puller takes its manifests and shards from. What was fetched is as it was sent;
# what it says is judged by the puller, by the manifest's checksums.

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
        self._clients: dict[str, Client] = {}

    def turn_to(self, home: str, shards: Mapping[str, str]) -> None:
        """`home`: the address of the server that has the manifests, empty: they are here. `shards`: file -> the address of the
        server that has it, where that is another one."""
        self._home, self._shards = home, shards

    def close(self) -> None:
        """End its connections."""
        for client in self._clients.values():
            client.close()
        self._clients = {}

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
        except UnderstudyError as error:
            with suppress(KeyError):
                self._clients.pop(address).close()
            raise WeightsError(
                f"{file} of version {name} must come from {address}, and did not: {error}; it is published again"
            ) from error

    def _read(self, address: str, name: str, file: str, *, size: int) -> Iterator[bytes]:
        client = self._clients.get(address)
        if client is None:
            client = Client(address, secret=self._secret, answer_s=ANSWER_S)
            self._clients[address] = client
        starts = iter(range(0, size, MAX_READ_BYTES))
        ahead = 1 if file == MANIFEST else AHEAD
        reads: deque[int] = deque()
        while True:
            for start in islice(starts, ahead - len(reads)):
                part = {"offset": start, "size": min(MAX_READ_BYTES, size - start)}
                reads.append(client.begin(VersionServer.read, name=name, file=file, **part))
            if not reads:
                return
            data = client.answer(VersionServer.read, reads.popleft())
            yield data
            if len(data) < MAX_READ_BYTES:  # its end
                return
