"""The codec of a patch: which elements of a range differ from those of an earlier version, and what they are now.

Used by `buffers.weights.shard_writer` (encode) and `buffers.weights.puller` (apply). Elements are compared and written as bits: a
patch that is applied to its base gives every bit of the new range, NaN and -0.0 included. After Miahi & Belilovsky
(arXiv:2602.03839): of bf16 weights few change in an RL step. A patch of k elements is

    k values, then the gaps between their indices as bytes: a gap g is g // 255 bytes of 255, then one byte g % 255

which is 3 bytes for a changed element of two bytes, where one in 255 or more changes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LONGEST_GAP = 255

Bits = NDArray[np.unsignedinteger]
"""Elements as unsigned integers of their width."""


def num_changed(old: Bits, new: Bits) -> int:
    """Elements that differ. [n], [n]."""
    return int(np.count_nonzero(old != new))


def patch_bytes(*, changed: int, count: int, item_bytes: int) -> int:
    """The most bytes that a patch of `changed` elements of `count` takes."""
    return changed * (item_bytes + 1) + count // LONGEST_GAP


def encode(old: Bits, new: Bits) -> tuple[int, bytes]:
    """(number of changed elements, the patch) that makes `new` of `old`. [n], [n]."""
    indices = np.flatnonzero(old != new)
    gaps = np.diff(indices, prepend=0)
    runs = gaps // LONGEST_GAP
    steps = np.full(len(gaps) + int(runs.sum()), LONGEST_GAP, np.uint8)
    steps[np.arange(len(gaps)) + np.cumsum(runs)] = gaps % LONGEST_GAP
    return len(indices), new[indices].tobytes() + steps.tobytes()


def apply(patch: bytes | memoryview, *, changed: int, target: Bits) -> None:
    """Overwrites the changed elements of `target` [n]. Raises ValueError for what `encode` does not give."""
    split = changed * target.dtype.itemsize
    if len(patch) < split:
        raise ValueError(f"a patch of {changed} elements must have at least {split} bytes, got {len(patch)}")
    values = np.frombuffer(patch[:split], target.dtype)
    steps = np.frombuffer(patch[split:], np.uint8)
    indices = np.cumsum(steps, dtype=np.int64)[steps != LONGEST_GAP]
    if len(indices) != changed or (changed and int(indices[-1]) >= len(target)):
        raise ValueError(f"a patch must have {changed} indices below {len(target)}, got {len(indices)}")
    target[indices] = values
