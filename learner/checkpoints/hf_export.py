"""Weights on disk, written whole or not at all: one file for the engine, a folder for everybody else.

Called by `learner.training.trainer` on every rank (gathering needs all); rank 0 writes. Invariants: a reader sees the
old or the new content, never a part; a folder is the one that the model came from, with other weights: their names and layout, and
every other file, are the source's own. Not resumable training state: no optimizer, no step counter.
"""

from __future__ import annotations

import json
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
from learner.model.policy import Policy

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
