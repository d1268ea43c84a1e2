"""One rank's part of each published version: its shards, in the published dtype, under the names that engines know.

Owned by `learner.training.trainer`, on every rank. Nothing is gathered: the ranks agree on one number, how much has changed since
the last version, and each writes what it holds. With LoRA that is the adapter alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from buffers.weights.manifest import Shard, Tensor
from buffers.weights.patch import Bits
from buffers.weights.shard_writer import BITS, LARGEST_SHARE, Part, ShardWriter
from buffers.weights.store import version_name
from learner.model import fsdp
from learner.model.lora import LoraConfig, description, peft_name

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What one rank has written, and what all of them found."""

    shard: Shard
    changed_share: float | None
    """Share of the elements that changed since the last version; None: that was not looked at."""
    description: str | None
    """`adapter_config.json`; None: these are whole weights."""


class WeightShards:
    """`lm`: sharded over the ranks. `adapter`: what describes its adapter, where it has one."""

    def __init__(self, lm: nn.Module, *, dtype: torch.dtype, rank: int, adapter: LoraConfig | None) -> None:
        self._lm = lm
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
        device = next(self._lm.parameters()).device
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
        return [self._part(one) for one in fsdp.local_ranges(self._lm, trained_only=self._adapter is not None)]

    def _part(self, one: fsdp.LocalRange) -> Part:
        name = one.name if self._adapter is None else peft_name(one.name)
        tensor = Tensor(name=name, dtype=DTYPES[self._dtype], shape=one.shape)
        return Part(
            tensor=tensor, start=one.start, count=one.local.numel(), read=partial(_bits, one.local, self._dtype)
        )


def _bits(local: torch.Tensor, dtype: torch.dtype) -> Bits:
    """[n] the elements in the published dtype, as bits."""
    flat = local.to(dtype).flatten().cpu()
    found: Bits = flat.view(torch.uint8).numpy().view(BITS[flat.element_size()])
    return found
