"""Writes one rank's shard of a version, and remembers what it wrote for as long as patches against that can pay.

Used by `learner.checkpoints.weight_shards` on every rank. The rank gives its parts, ranges of tensors, one after another: no
more than one of them is held beside the copy of what was published last. That copy costs the rank's share of the weights in the
published dtype, and is dropped for a while when more than a third of them had changed, as it always is in float32, where every
step of the optimizer moves every weight.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from buffers.weights import patch
from buffers.weights.dense_file import room_for
from buffers.weights.manifest import Piece, Shard, Tensor, safetensors_header
from buffers.weights.patch import Bits

LARGEST_SHARE = 1 / 3
"""A patch that takes a larger share of the dense bytes does not pay."""
MEASURED_EVERY = 20
"""Versions between two looks at how much changes, where too much does."""
BITS = {8: np.uint64, 4: np.uint32, 2: np.uint16}
"""Bytes of an element -> what it is compared as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Elements [start, start + count) of a tensor. `read` gives their bits, [count] and contiguous."""

    tensor: Tensor
    start: int
    count: int
    read: Callable[[], Bits]

    @property
    def num_bytes(self) -> int:
        return self.count * self.tensor.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a rank's parts are beside the copy of the version that it published last. Sums over ranks are the version's."""

    elements: int
    changed: int
    dense_bytes: int
    patch_bytes: int
    """The most that a patch takes."""


class ShardWriter:
    """`file`: the name of this rank's file in each version."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._last: dict[str, Bits] = {}
        self._last_name: str | None = None
        """The version that `_last` is of."""
        self._rests = 0
        """Versions that will not be compared."""

    @property
    def last(self) -> str | None:
        """The version of which there is a copy."""
        return self._last_name

    def compare(self, parts: Sequence[Part]) -> Change:
        """How the parts differ from the copy; all of them, where there is none."""
        elements, changed, patched = 0, 0, 0
        for part in parts:
            last = self._last.get(part.tensor.name)
            differ = part.count if last is None else patch.num_changed(last, part.read())
            patched += patch.patch_bytes(changed=differ, count=part.count, item_bytes=part.tensor.item_bytes)
            elements += part.count
            changed += differ
        dense = sum(part.num_bytes for part in parts)
        return Change(elements=elements, changed=changed, dense_bytes=dense, patch_bytes=patched)

    def write(self, folder: Path, parts: Sequence[Part], *, name: str, as_patch: bool, pays: bool) -> Shard:
        """Writes the parts into `folder`, as a patch against the copy or dense. They are version `name`'s. `pays`: whether a
        copy of them is worth its room. Raises WeightsError when the folder has too little of that."""
        self._rests = max(0, self._rests - 1) if pays else MEASURED_EVERY - 1
        whole = not as_patch and all(part.count == part.tensor.count for part in parts)
        tensors = [part.tensor for part in parts]
        header = safetensors_header(tensors) if whole else b""
        room = len(header) + sum(part.num_bytes for part in parts)
        copies: dict[str, Bits] = {}
        pieces: list[Piece] = []
        with room_for(room, folder=folder, what=f"version {name}"), (folder / self._file).open("xb") as file:
            file.write(header)
            at = len(header)
            for part in parts:
                bits = part.read()
                piece, content = self._piece(part, bits, offset=at, as_patch=as_patch)
                file.write(content)
                at += piece.size
                pieces.append(piece)
                if self._rests == 0:
                    copies[part.tensor.name] = bits.copy()
        self._last, self._last_name = copies, name if self._rests == 0 else None
        return Shard(file=self._file, size=at, tensors=tensors, pieces=pieces, is_safetensors=whole)

    def _piece(self, part: Part, bits: Bits, *, offset: int, as_patch: bool) -> tuple[Piece, bytes | memoryview]:
        raw = bits.data.cast("B") if len(bits) else memoryview(b"")
        result = zlib.crc32(raw)
        changed, content = None, raw
        checksum = result
        if as_patch:
            changed, encoded = patch.encode(self._last[part.tensor.name], bits)
            content, checksum = memoryview(encoded), zlib.crc32(encoded)
        piece = Piece(
            tensor=part.tensor.name,
            start=part.start,
            count=part.count,
            offset=offset,
            size=len(content),
            checksum=checksum,
            result_checksum=result,
            num_changed=changed,
        )
        return piece, content
