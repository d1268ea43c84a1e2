"""Made-up weights as parts of several ranks, published as the learner's ranks do, without a learner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from buffers.weights.manifest import Manifest, Shard, Tensor
from buffers.weights.shard_writer import Part, ShardWriter
from buffers.weights.store import VersionStore, version_name

Weights = dict[str, NDArray[np.uint16]]
SHAPES = {"embedding": [101, 8], "norm": [7], "scale": [1]}


def made_weights(*, seed: int = 0) -> Weights:
    """Random bits, as bf16."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 2**16, shape, dtype=np.uint16) for name, shape in SHAPES.items()}


def moved(weights: Weights, *, share: float, seed: int) -> Weights:
    """Others in about `share` of the elements."""
    rng = np.random.default_rng(seed)
    return {
        name: np.where(rng.random(old.shape) < share, old ^ np.uint16(1), old).astype(np.uint16)
        for name, old in weights.items()
    }


def written(folder: Path) -> Shard:
    """Writes random weights into a version's scratch folder, as the one rank."""
    parts = [
        Part(
            tensor=Tensor(name=name, dtype="BF16", shape=list(whole.shape)),
            start=0,
            count=whole.size,
            read=whole.reshape(-1).copy,
        )
        for name, whole in made_weights().items()
    ]
    return ShardWriter("rank-0.bin").write(folder, parts, name=version_name(folder), as_patch=False, pays=False)


class MadeRanks:
    """`num` ranks, each with its rows of every tensor."""

    def __init__(self, store: VersionStore, *, num: int) -> None:
        self.store = store
        self._num = num
        self._writers = [ShardWriter(f"rank-{rank}.bin") for rank in range(num)]

    def parts(self, weights: Weights, *, rank: int) -> list[Part]:
        found = []
        for name, whole in weights.items():
            rows = -(-len(whole) // self._num)
            own = whole[rank * rows : (rank + 1) * rows].reshape(-1)
            start = min(rank * rows, len(whole)) * (whole.size // len(whole))
            tensor = Tensor(name=name, dtype="BF16", shape=list(whole.shape))
            found.append(Part(tensor=tensor, start=start, count=own.size, read=lambda own=own: own))
        return found

    def write(self, folder: Path, weights: Weights, *, as_patch: bool = False) -> list[Shard]:
        return [
            writer.write(
                folder, self.parts(weights, rank=rank), name=version_name(folder), as_patch=as_patch, pays=True
            )
            for rank, writer in enumerate(self._writers)
        ]

    def publish(self, weights: Weights, *, version: int, as_patch: bool = False) -> Manifest:
        base, scratch = self.store.base if as_patch else None, self.store.begin(version)
        return self.store.commit(
            scratch, version=version, base=base, shards=self.write(scratch, weights, as_patch=as_patch)
        )
