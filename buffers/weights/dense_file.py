"""A dense version in one safetensors file, in memory: made empty or opened, written by ranges, compared with checksums.

Used by `buffers.weights.puller`. The file's own header says where its tensors lie; nothing is deserialized but that JSON.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from buffers.errors import WeightsError
from buffers.weights.manifest import Manifest, Piece, Tensor, safetensors_header

Bytes = NDArray[np.uint8]


class DenseFile:
    """`tensors`: those that it has to hold. Raises WeightsError when its header says otherwise."""

    def __init__(self, path: Path, tensors: Sequence[Tensor], *, writable: bool = False) -> None:
        self._content = mapped(path, writable=writable)
        length = int.from_bytes(self._content[:8].tobytes(), "little")
        try:
            header = json.loads(self._content[8 : 8 + length].tobytes())
            found = {
                name: (entry["dtype"], entry["shape"], entry["data_offsets"])
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise WeightsError(
                f"{path} must begin with a safetensors header, got {error!r}; publish it again"
            ) from error
        self._begins: dict[str, int] = {}
        for tensor in tensors:
            dtype, shape, (begin, end) = found.pop(tensor.name, ("", [], (0, 0)))
            if (dtype, shape, end - begin) != (tensor.dtype, tensor.shape, tensor.num_bytes):
                raise WeightsError(
                    f"{path} must hold {tensor.name} as {tensor.dtype}{tensor.shape}, got {dtype}{shape}; publish it densely"
                )
            self._begins[tensor.name] = 8 + length + begin
        if found:
            raise WeightsError(
                f"{path} must hold the tensors of its version, got {sorted(found)[:3]} besides; publish it densely"
            )
        self._items = {tensor.name: tensor.item_bytes for tensor in tensors}
        self._sizes = {tensor.name: tensor.num_bytes for tensor in tensors}

    def range(self, piece: Piece) -> Bytes:
        """The bytes of a piece's elements, which may be written."""
        item = self._items[piece.tensor]
        begin = self._begins[piece.tensor] + piece.start * item
        return self._content[begin : begin + piece.count * item]

    def copy_from(self, other: DenseFile) -> None:
        """Takes all tensors of another one that has the same."""
        for name, begin in self._begins.items():
            there, size = other._begins[name], self._sizes[name]
            self._content[begin : begin + size] = other._content[there : there + size]

    def verify(self, manifest: Manifest) -> None:
        """Raises WeightsError unless the weights are, bit for bit, those that the ranks published."""
        for shard in manifest.shards:
            for piece in shard.pieces:
                if zlib.crc32(self.range(piece).data) != piece.result_checksum:
                    raise corrupt(manifest, shard.file, f"the checksum of {piece.tensor}, once made,")


def create_dense_file(path: Path, tensors: Sequence[Tensor], *, what: str) -> None:
    """A file with a header and room for the tensors, all of it taken. Raises WeightsError where there is none."""
    header = safetensors_header(tensors)
    size = len(header) + sum(tensor.num_bytes for tensor in tensors)
    with room_for(size, folder=path.parent, what=what), path.open("xb") as file:
        file.write(header)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, size)  # else a full disk would kill the process that writes to the memory


def mapped(path: Path, *, writable: bool = False) -> Bytes:
    """[bytes] the file's content."""
    if path.stat().st_size == 0:
        return np.zeros(0, np.uint8)
    content: Bytes = np.memmap(path, np.uint8, mode="r+" if writable else "r")
    return content


def corrupt(manifest: Manifest, file: str, what: str) -> WeightsError:
    """The error of a version whose bytes are not those that were published."""
    return WeightsError(
        f"version {manifest.name}: {what} must be as in its manifest, and is not in {file}; publish it again, densely"
    )


# Room for weights in a folder: asked for before anything is written, so that a full /dev/shm is one clear error.


@contextmanager
def room_for(num_bytes: int, *, folder: Path, what: str) -> Iterator[None]:
    """Write `num_bytes` below `folder` inside. Raises WeightsError where they do not fit, or the system takes no more."""
    there = os.statvfs(folder)
    free = there.f_bavail * there.f_frsize
    if free < num_bytes:
        raise WeightsError(_message(num_bytes, folder=folder, what=what, got=f"{free / 1e6:.1f} MB free"))
    try:
        yield
    except OSError as error:
        raise WeightsError(_message(num_bytes, folder=folder, what=what, got=str(error))) from error


def _message(num_bytes: int, *, folder: Path, what: str, got: str) -> str:
    return (
        f"{what} must have {num_bytes / 1e6:.1f} MB of room in {folder}, got {got}; free memory there, or mount a larger "
        f"/dev/shm (of a container: --shm-size)"
    )
