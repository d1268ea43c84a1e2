"""A policy from a Hugging Face folder, of which each rank reads its own part and no more.

Called by `learner.training.trainer`. The model is built without memory, changed (an adapter, sharding), given memory, and filled
from the folder's files. Invariants: nothing is left as it was allocated: each weight is read, or the folder is refused; buffers
that are computed from the configuration are computed here, and equal on all ranks. What files have in another layout (experts) is
read whole by each rank, one weight after another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from learner.model import fsdp
from learner.model.file_names import FileNames
from learner.model.lora import plain_name
from learner.model.policy import Policy
from learner.model.weight_files import WeightFiles


def load_policy(
    folder: str | Path,
    *,
    value_head: bool = False,
    device: torch.device,
    trust_remote_code: bool = False,
    prepare: Callable[[Policy], None] = lambda policy: None,
) -> Policy:
    """The folder's model in float32 (the master weights), after `prepare` has changed it; where that shards it, all ranks enter.
    Dropout is off: the engine samples without it.

    Raises ValueError for files that lack a weight.
    """
    files = WeightFiles(Path(folder))
    lm = empty_model(Path(folder), trust_remote_code=trust_remote_code)
    policy = Policy(lm, value_head=value_head, names=FileNames(lm, files.names))
    policy.eval()
    unread = frozenset(name for name, weight in policy.lm.named_parameters() if weight.is_meta)
    prepare(policy)
    fsdp.give_memory(policy, device=device)
    policy.lm.tie_weights()  # two names of one weight that is not sharded have become two weights
    read_weights(policy, files=files, unread=unread)
    return policy


def empty_model(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The model of a folder's config.json, parameters without memory (on the device `meta`), buffers as they are computed."""
    logging.disable_progress_bar()

    def without_memory(module: nn.Module, name: str, weight: nn.Parameter | None) -> nn.Parameter | None:
        if weight is None or weight.is_meta:
            return None
        return nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)

    hook = register_module_parameter_registration_hook(without_memory)
    try:
        return model_of(folder, trust_remote_code=trust_remote_code)
    finally:
        hook.remove()


def model_of(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """A model as a folder's config.json or a GGUF file says, of the class that is named there: a wrapper has its own names."""
    trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if folder.suffix == ".gguf":
        config = AutoConfig.from_pretrained(folder.parent, gguf_file=folder.name, **trust)
    else:
        config = AutoConfig.from_pretrained(folder, **trust)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if named is None or (trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {})):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **trust)
    return named._from_config(config, dtype=torch.float32)


def read_weights(policy: Policy, *, files: WeightFiles, unread: frozenset[str]) -> None:
    """Fills what this process holds of the parameters that had no memory, `unread` by the names that they had then, and the
    buffers that are weights too. Raises ValueError, naming a weight that the files lack or have in another shape."""
    lm, names = policy.lm, policy.names
    aliases = _aliases(lm)
    kept = lm.state_dict().keys()
    buffers = {
        name: fsdp.LocalRange(name, list(buffer.shape), 0, buffer)
        for name, buffer in lm.named_buffers()
        if name in kept
    }
    found = [one for one in fsdp.local_ranges(lm) if plain_name(one.name) in unread]
    waiting = {plain_name(alias): one for one in found for alias in aliases[one.name]} | buffers
    with torch.no_grad():
        for first, stored in names.converted():
            whole = names.convert(first, {name: files.whole(name).float() for name in stored})
            for name, values in whole.items():
                if (one := waiting.get(name)) is not None:
                    _check_shape(name, found=list(values.shape), expected=one.shape, files=files)
                    flat = values.reshape(-1)[one.start : one.start + one.local.numel()]
                    one.local.view(-1).copy_(flat)
                    waiting = {alias: other for alias, other in waiting.items() if other is not one}
        for name, one in list(waiting.items()):
            if name not in waiting or (read := names.plain(name)) is None:
                continue
            _check_shape(read, found=files.shape(read), expected=one.shape, files=files)
            flat, place = one.local.view(-1), 0
            for piece in files.pieces(read, start=one.start, count=one.local.numel()):
                flat[place : place + len(piece)].copy_(piece)
                place += len(piece)
            waiting = {alias: other for alias, other in waiting.items() if other is not one}
    if missing := [name for name in waiting if name not in buffers]:
        raise ValueError(
            f"model.path must name a folder with all weights of {type(lm).__name__}, got {files.folder} without {missing[0]}; "
            f"download the model again, or mend its config.json"
        )


def _check_shape(name: str, *, found: list[int], expected: list[int], files: WeightFiles) -> None:
    if found != expected:
        raise ValueError(
            f"{name} in {files.folder} must have the shape that config.json says, {expected}, got {found}; download the model again"
        )


def _aliases(lm: Any) -> dict[str, list[str]]:
    """The first name of each parameter -> all its names: tied ones have several."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, weight in lm.named_parameters(remove_duplicate=False):
        found.setdefault(first.setdefault(id(weight), name), []).append(name)
    return found
