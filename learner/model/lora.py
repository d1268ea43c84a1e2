"""LoRA: small trained matrices beside frozen ones, by peft; everything of ours that knows their names is here.

Used by `learner.training.trainer` and `learner.checkpoints.weight_shards`. A layer's weight is W + scaling * B @ A with W
frozen (arXiv:2106.09685, section 4.1); B starts at zero, so a fresh adapter is the model itself. Invariant: equal seeds
give equal adapters on every rank. Merging reads the weights and never writes them. No training here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as LoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

PEFT_PREFIX = "base_model.model."
"""Prefix of each name in an adapter file, as `peft.PeftModel.from_pretrained` expects it."""
DESCRIPTION = "adapter_config.json"
ADAPTER = "default"
"""The name by which peft knows the only adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter as peft stores it: its description and its matrices by name."""

    config: LoraConfig
    weights: dict[str, Tensor]


def add_adapter(lm: Any, *, rank: int, alpha: float, seed: int) -> LoraConfig:
    """Puts an adapter on every linear layer but those that `_left_out` names, and freezes everything else.

    scaling = alpha / rank. Raises ValueError when a layer is not a plain linear one.
    """
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules="all-linear",
        exclude_modules=_left_out(lm) or None,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):  # A is random: the same on every rank
        inject_adapter_in_model(config, lm)
        torch.manual_seed(seed)
        for name, module in lm.named_modules():
            if isinstance(module, LoraLayer):
                _start(module, name=name)
    config.base_model_name_or_path = os.path.abspath(lm.name_or_path)  # it is read in other folders too
    config.target_modules = set(config.target_modules or ())
    return config


def _left_out(lm: Any) -> list[str]:
    """Linear layers that have no adapter, beside the output matrix: those of a vision tower; routers, which are linear layers with
    an answer of their own; and the last one of a Mamba mixer, whose matrix a GPU's kernel takes past the layer."""
    text = {*lm.get_decoder().modules(), lm.get_output_embeddings()}
    layers = [(name, part) for name, part in lm.named_modules() if isinstance(part, nn.Linear)]
    mixers = [name for name, part in lm.named_modules() if hasattr(part, "A_log") and hasattr(part, "D")]
    names = [name for name, part in layers if part not in text or type(part) is not nn.Linear]
    return names + [
        name for name, _ in layers if name.rpartition(".")[2] == "out_proj" and name.rpartition(".")[0] in mixers
    ]


def _start(layer: Any, *, name: str) -> None:
    """Gives an adapter its first weights, on a layer that may itself have no memory yet, where peft leaves it without any."""
    if not isinstance(layer.get_base_layer(), nn.Linear):
        raise ValueError(
            f"learner.lora.rank > 0 needs linear layers, got {type(layer.get_base_layer()).__name__} for {name}; "
            f"set learner.lora.rank=0 for this model"
        )
    for part in (layer.lora_A, layer.lora_B):
        if part[ADAPTER].weight.is_meta:
            part[ADAPTER].to_empty(device="cpu")
    layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)


@contextmanager
def without_adapter(lm: nn.Module) -> Iterator[None]:
    """The model without its adapter, on which no gradient is asked for, within the block."""
    layers = [module for module in lm.modules() if isinstance(module, LoraLayer)]
    scalings = [layer.scaling[ADAPTER] for layer in layers]
    for layer in layers:
        layer.scaling[ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scaling in zip(layers, scalings, strict=True):
            layer.scaling[ADAPTER] = scaling


def merged(parameters: Iterable[tuple[str, Tensor]], *, scaling: float) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters by name, in `named_parameters` order -> those of a plain model: W + scaling * B @ A.

    A parameter without an adapter passes as it is.
    """
    held: tuple[str, Tensor] | None = None
    down: Tensor | None = None
    for name, whole in parameters:
        if name.endswith(".base_layer.weight"):
            held = (name.replace(".base_layer", ""), whole)
        elif ".lora_A." in name:
            down = whole
        elif ".lora_B." in name and held is not None and down is not None:
            yield held[0], held[1] + scaling * (whole @ down)
        else:
            yield name.replace(".base_layer", ""), whole


def plain_name(name: str) -> str:
    """The name that a frozen parameter has in the model without an adapter."""
    return name.replace(".base_layer.", ".")


def peft_name(name: str) -> str:
    """The name by which peft reads one of an adapter's matrices."""
    return PEFT_PREFIX + name.replace(".default.", ".")


def peft_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """An adapter's matrices by the names that peft reads."""
    return {peft_name(name): weight for name, weight in weights.items()}


def write_description(folder: Path, *, config: LoraConfig) -> None:
    """`adapter_config.json`."""
    config.save_pretrained(folder)


def description(config: LoraConfig) -> str:
    """The text of `adapter_config.json`."""
    with tempfile.TemporaryDirectory() as folder:
        write_description(Path(folder), config=config)
        return (Path(folder) / DESCRIPTION).read_text(encoding="utf-8")
