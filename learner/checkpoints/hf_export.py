"""Weights on disk, written whole or not at all: one file for the engine, a folder for everybody else.

Called by `learner.training.trainer` on every rank (gathering needs all); rank 0 writes. Invariant: a reader sees the
old or the new content, never a part. Names are Hugging Face's parameter names; a tied output matrix is left out, as
Hugging Face does. Not resumable training state: no optimizer, no step counter.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from learner.checkpoints.store import ADAPTER_WEIGHTS, WEIGHTS
from learner.model import fsdp
from learner.model.lora import Adapter, LoraConfig, merged, peft_names, write_description


def gather(module: nn.Module, *, dtype: torch.dtype, keep: bool, scaling: float = 1.0) -> dict[str, Tensor]:
    """All ranks enter; those with `keep` false get an empty dict and hold one parameter at a time.

    An adapter is merged into the copies, never into the module: `scaling` is the adapter's.
    """
    parameters = fsdp.gather_parameters(module)
    if not keep:
        deque(parameters, maxlen=0)
        return {}
    return {name: whole.to(dtype) for name, whole in merged(parameters, scaling=scaling)}


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
    lm: Any,
    tokenizer: Any,
    weights: dict[str, Tensor],
    value_head: dict[str, Tensor],
    adapters: Mapping[str, Adapter],
    dtype: torch.dtype,
) -> None:
    """Replaces `folder` with what `from_pretrained` and vLLM load: the merged weights.

    Below it `critic/value_head.safetensors`, and `adapters`, which peft loads, by the names of their folders, when there are such:
    vLLM takes all `*.safetensors` of the folder itself for weights of the model.
    """
    partial = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = copy.deepcopy(lm.config)
    config.dtype = dtype
    config.save_pretrained(partial)
    if lm.generation_config is not None:
        lm.generation_config.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    write_weights(partial / WEIGHTS, weights=weights)
    if value_head:
        write_weights(partial / "critic" / "value_head.safetensors", weights=value_head)
    for name, adapter in adapters.items():
        write_weights(partial / name / ADAPTER_WEIGHTS, weights=adapter.weights)
        write_description(partial / name, config=adapter.config)
    _replace(folder, new=partial)


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
