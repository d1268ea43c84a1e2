"""Serves the published versions in a folder to the pullers of other nodes, over the wire.

Held by `learner.checkpoints.weight_sync` on the run's node and by `buffers.weights.node_weights` on others that have ranks of the
learner. Weights cross the network in the clear, but each message carries a proof of the run's secret: a cipher would cost ten
times as much. Invariant: nothing but the files of versions in its folder can be read.
"""

from __future__ import annotations

import os
from pathlib import Path

from buffers.errors import WeightsError
from buffers.weights.manifest import published_file
from buffers.wire.address import Way, is_loopback
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
