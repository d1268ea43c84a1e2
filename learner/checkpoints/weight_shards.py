"""One rank's part of each published version: its shards, in the published dtype, under the names that the model's files have.

Owned by `learner.training.trainer`, on every rank. Each writes what it holds, and the ranks agree on one number, how much has
changed since the last version. What files have in another layout (experts) is gathered, one weight of the model at a time, and
dealt. With LoRA it is the adapter alone. What is never trained, a vision tower, is never published.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from buffers.weights import manifest
from buffers.weights.manifest import Shard
from buffers.weights.patch import Bits
from buffers.weights.shard_writer import BITS, LARGEST_SHARE, Part, ShardWriter
from buffers.weights.store import version_name
from learner.checkpoints.store import ADAPTER_WEIGHTS, WEIGHTS
from learner.model import fsdp
from learner.model.lora import Adapter, LoraConfig, description, merged, peft_name, peft_names, write_description
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
    tensor = manifest.Tensor(name=one.name, dtype=DTYPES[dtype], shape=one.shape)
    return Part(tensor=tensor, start=one.start, count=one.local.numel(), read=partial(_bits, one.local, dtype))


def _bits(local: torch.Tensor, dtype: torch.dtype) -> Bits:
    """[n] the elements in the published dtype, as bits."""
    flat = local.to(dtype).flatten().cpu()
    found: Bits = flat.view(torch.uint8).numpy().view(BITS[flat.element_size()])
    return found


# Weights on disk, written whole or not at all: one file for the engine, a folder for everybody else. Invariants: a reader sees
# the old or the new content, never a part; a folder is the one that the model came from, with other weights: their names and
# layout, and every other file, are the source's own. Not resumable training state: no optimizer, no step counter.

COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".md")
"""Ends of the names of a folder's files that are no weights."""
NOT_COPIED = (".index.json", "adapter_config.json", "trainer_state.json")
"""What tells of weights that are not there any more."""
DTYPE_KEYS = ("dtype", "torch_dtype")


def gather(module: nn.Module, *, dtype: torch.dtype, keep: bool) -> dict[str, Tensor]:
    """All ranks enter; those with `keep` false get an empty dict and hold one parameter at a time."""
    parameters = fsdp.gather_parameters(module)
    if not keep:
        deque(parameters, maxlen=0)
        return {}
    return {name: whole.to(dtype) for name, whole in parameters}


def gather_policy(policy: Policy, *, dtype: torch.dtype, keep: bool, scaling: float) -> dict[str, Tensor]:
    """The model's weights, as `gather`, with the names and layout of its files; towers that are not trained, and buffers that files
    have, among them. An adapter is merged into the copies, never into the module: `scaling` is the adapter's."""
    if not keep:
        return gather(policy.lm, dtype=dtype, keep=False)
    weights: dict[str, Tensor] = {}
    for name, one in merged(fsdp.gather_parameters(policy.lm), scaling=scaling):
        weights |= policy.names.written(name, one.to(dtype))
    for name, buffer in fsdp.kept_buffers(policy.lm):
        weights |= policy.names.written(name, buffer.cpu())
    return {
        name: weight.clone() if weight.untyped_storage().nbytes() > weight.nbytes else weight
        for name, weight in weights.items()
    }


def gather_adapter(lm: nn.Module, *, config: LoraConfig, keep: bool) -> Adapter | None:
    """A copy of the adapter alone, in float32, on ranks with `keep`. All ranks enter."""
    parameters = fsdp.gather_parameters(lm, trained_only=True)
    weights = {name: whole.clone() for name, whole in parameters if keep}
    return Adapter(config=config, weights=peft_names(weights)) if keep else None


def write_weights(path: Path, *, weights: dict[str, Tensor]) -> None:
    """Replaces `path` with a safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")
    save_file(weights, partial, metadata={"format": "pt"})
    os.replace(partial, path)


def write_folder(
    folder: Path,
    *,
    source: Path,
    weights: dict[str, Tensor],
    value_head: dict[str, Tensor],
    adapters: Mapping[str, Adapter],
    dtype: torch.dtype,
) -> None:
    """Replaces `folder` with what `from_pretrained` and vLLM load: the merged weights, and all else from `source`.

    Below it `critic/value_head.safetensors`, and `adapters`, which peft loads, by the names of their folders, when there are such:
    vLLM takes all `*.safetensors` of the folder itself for weights of the model.
    """
    partial = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.name.endswith(COPIED) and not file.name.endswith(NOT_COPIED):
            shutil.copyfile(file, partial / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (partial / "config.json").write_text(json.dumps(_in_dtype(config, dtype), indent=2) + "\n", encoding="utf-8")
    write_weights(partial / WEIGHTS, weights=weights)
    if value_head:
        write_weights(partial / "critic" / "value_head.safetensors", weights=value_head)
    for name, adapter in adapters.items():
        write_weights(partial / name / ADAPTER_WEIGHTS, weights=adapter.weights)
        write_description(partial / name, config=adapter.config)
    _replace(folder, new=partial)


def _in_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A configuration that says how its weights are stored: plainly, in this dtype."""
    name = str(dtype).removeprefix("torch.")
    told = {key: _in_dtype(value, dtype) if isinstance(value, dict) else value for key, value in config.items()}
    told = {key: name if key in DTYPE_KEYS else value for key, value in told.items() if key != "quantization_config"}
    return told if "model_type" not in told or any(key in told for key in DTYPE_KEYS) else {**told, "dtype": name}


def _replace(folder: Path, *, new: Path) -> None:
    """A folder that holds files cannot be renamed over: the old one steps aside first."""
    if not folder.exists():
        new.rename(folder)
        return
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old)
