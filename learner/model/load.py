"""A policy from a Hugging Face folder, of which each rank reads its own part and no more.

Called by `learner.training.trainer`. The model is built without memory, changed (an adapter, sharding), given memory, and filled
from the folder's files. Invariants: nothing is left as it was allocated: each weight is read, or the folder is refused; buffers
that are computed from the configuration are computed here, and equal on all ranks. The exception is an architecture whose files
transformers takes apart and joins anew (experts): its weights are read whole by each rank, one rank's memory being that of the
whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.utils import logging

from learner.model import fsdp
from learner.model.lora import plain_name
from learner.model.policy import Policy, check_rows_apart
from learner.model.weight_files import WeightFiles


def load_policy(
    folder: str | Path,
    *,
    value_head: bool = False,
    device: torch.device,
    prepare: Callable[[Policy], None] = lambda policy: None,
) -> Policy:
    """The folder's model in float32 (the master weights), after `prepare` has changed it; where that shards it, all ranks enter.
    Dropout is off: the engine samples without it.

    Raises ValueError for files that lack a weight, and for a model that cannot keep packed rows apart.
    """
    policy = Policy(empty_model(Path(folder)), value_head=value_head)
    policy.eval()
    unread = frozenset(name for name, weight in policy.lm.named_parameters() if weight.is_meta)
    prepare(policy)
    fsdp.give_memory(policy, device=device)
    policy.lm.tie_weights()  # two names of one weight that is not sharded have become two weights
    read_weights(policy.lm, folder=Path(folder), unread=unread)
    check_rows_apart(policy)
    return policy


def empty_model(folder: Path) -> Any:
    """The model of a folder's config.json, parameters without memory (on the device `meta`), buffers as they are computed."""
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(folder)

    def without_memory(module: nn.Module, name: str, weight: nn.Parameter | None) -> nn.Parameter | None:
        if weight is None or weight.is_meta:
            return None
        return nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)

    hook = register_module_parameter_registration_hook(without_memory)
    try:
        lm: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    finally:
        hook.remove()
    if (folder / "generation_config.json").is_file():
        lm.generation_config = GenerationConfig.from_pretrained(folder)
    return lm


def read_weights(lm: Any, *, folder: Path, unread: frozenset[str]) -> None:
    """Fills what this process holds of the parameters that had no memory, `unread` by the names that they had then. Raises
    ValueError, naming a weight that the files lack or have in another shape."""
    if any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(lm)):
        return _read_converted(lm, folder=folder, unread=unread)
    files = WeightFiles(folder)
    aliases = _aliases(lm)
    with torch.no_grad():
        for one in fsdp.local_ranges(lm):
            if (name := plain_name(one.name)) not in unread:
                continue
            stored = _stored_name(name, [plain_name(alias) for alias in aliases[one.name]], lm=lm, files=files)
            if (found := files.shape(stored)) != one.shape:
                raise ValueError(
                    f"{stored} in {folder} must have the shape that config.json says, {one.shape}, got {found}; download the "
                    f"model again"
                )
            flat, place = one.local.view(-1), 0
            for piece in files.pieces(stored, start=one.start, count=one.local.numel()):
                flat[place : place + len(piece)].copy_(piece)
                place += len(piece)
        kept = lm.state_dict().keys()
        for name, buffer in lm.named_buffers():
            if name in kept and name in files.names:
                buffer.copy_(files.whole(name))


def _aliases(lm: Any) -> dict[str, list[str]]:
    """The first name of each parameter -> all its names: tied ones have several."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, weight in lm.named_parameters(remove_duplicate=False):
        found.setdefault(first.setdefault(id(weight), name), []).append(name)
    return found


def _stored_name(name: str, others: Iterable[str], *, lm: Any, files: WeightFiles) -> str:
    """The name in the files: its own, that of a weight tied to it, or one of these as the model without its output matrix has
    it."""
    prefix = f"{lm.base_model_prefix}."
    for each in (name, *others):
        for stored in (each, each.removeprefix(prefix)):
            if stored in files.names:
                return stored
    raise ValueError(
        f"model.path must name a folder with all weights of {type(lm).__name__}, got {files.folder} without {name}; download the "
        f"model again, or mend its config.json"
    )


def _read_converted(lm: Any, *, folder: Path, unread: frozenset[str]) -> None:
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
    with torch.no_grad():
        for one in fsdp.local_ranges(lm):
            if (name := plain_name(one.name)) in unread:
                one.local.view(-1).copy_(weights[name].view(-1)[one.start : one.start + one.local.numel()])
        for name, buffer in lm.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
