"""One rank's part of each published version: its shards, in the published dtype, under the names that the model's files have.

Owned by `learner.training.trainer`, on every rank. Each writes what it holds, and the ranks agree on one number, how much has
changed since the last version. What files have in another layout (experts) is gathered, one weight of the model at a time, and
dealt. With LoRA it is the adapter alone. What is never trained, a vision tower, is never published.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from buffers.weights.manifest import Shard, Tensor
from buffers.weights.patch import Bits
from buffers.weights.shard_writer import BITS, LARGEST_SHARE, Part, ShardWriter
from buffers.weights.store import version_name
from learner.model import fsdp
from learner.model.lora import LoraConfig, description, peft_name
from learner.model.policy import Policy

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What one rank has written, and what all of them found."""

    shard: Shard
    changed_share: float | None
    """Share of the elements that changed since the last version; None: that was not looked at."""
    description: str | None
    """`adapter_config.json`; None: these are whole weights."""


class WeightShards:
    """`policy`: sharded over `world_size` ranks. `adapter`: what describes its adapter, where it has one."""

    def __init__(
        self, policy: Policy, *, dtype: torch.dtype, rank: int, world_size: int, adapter: LoraConfig | None
    ) -> None:
        self._policy = policy
        self._rank = rank
        self._world_size = world_size
        self._dtype = dtype
        self._adapter = adapter
        self._writer = ShardWriter(f"rank-{rank}.bin")

        self._description = None if adapter is None else description(adapter)

    def publish(self, folder: Path, *, base: str | None) -> Published:
        """Writes this rank's shard into `folder`. All ranks enter."""
        parts = self._parts()
        change = self._writer.compare(parts)
        votes = [change.elements, change.changed, change.dense_bytes, change.patch_bytes]
        votes += [self._writer.last is None, base is None or self._writer.last != base]
        device = next(self._policy.parameters()).device
        elements, changed, dense_bytes, patch_bytes, num_new, num_others = fsdp.all_sum(
            torch.tensor(votes, dtype=torch.int64, device=device)
        ).tolist()
        pays = patch_bytes < LARGEST_SHARE * dense_bytes
        shard = self._writer.write(
            folder, parts, name=version_name(folder), as_patch=pays and not num_others, pays=pays or num_new > 0
        )
        share = changed / max(1, elements) if not num_new else None
        return Published(shard=shard, changed_share=share, description=self._description)

    def _parts(self) -> list[Part]:
        """All ranks enter."""
        own = fsdp.local_ranges(self._policy.lm, trained_only=True)
        if self._adapter is not None:
            return [_part(one._replace(name=peft_name(one.name)), dtype=self._dtype) for one in own]
        return [*self._as_in_files(own), *(self._buffers() if self._rank == 0 else ())]

    def _as_in_files(self, own: list[fsdp.LocalRange]) -> Iterator[Part]:
        names, dealt = self._policy.names, 0
        for one in own:
            if (name := names.plain_written(one.name, one.shape)) is not None:
                yield _part(one._replace(name=name), dtype=self._dtype)
                continue
            whole = fsdp.whole(self._policy.lm, one.name, dtype=self._dtype)
            for name, value in names.written(one.name, whole).items():
                if dealt % self._world_size == self._rank:
                    yield _part(fsdp.LocalRange(name, list(value.shape), 0, value), dtype=self._dtype)
                dealt += 1

    def _buffers(self) -> Iterator[Part]:
        """Those that files have, in their own precision: passes do not round them."""
        for name, buffer in fsdp.kept_buffers(self._policy.lm):
            for stored, value in self._policy.names.written(name, buffer).items():
                yield _part(fsdp.LocalRange(stored, list(value.shape), 0, value), dtype=value.dtype)


def _part(one: fsdp.LocalRange, *, dtype: torch.dtype) -> Part:
    tensor = Tensor(name=one.name, dtype=DTYPES[dtype], shape=one.shape)
    return Part(tensor=tensor, start=one.start, count=one.local.numel(), read=partial(_bits, one.local, dtype))


def _bits(local: torch.Tensor, dtype: torch.dtype) -> Bits:
    """[n] the elements in the published dtype, as bits."""
    flat = local.to(dtype).flatten().cpu()
    found: Bits = flat.view(torch.uint8).numpy().view(BITS[flat.element_size()])
    return found
