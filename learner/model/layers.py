"""What a model is counted by, in any architecture of transformers: its layers, heads, and the experts that a token uses.

Used by `learner.model` and `learner.placement.model_shape`. Invariant: only classes of transformers and shapes are asked, and of
the configuration the number of experts for a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from configs.model_folder import EXPERTS_PER_TOKEN


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Layers of a model or of a part of it, towers' too; no layer is in another."""
    found = {name: part for name, part in module.named_modules() if isinstance(part, GradientCheckpointingLayer)}
    return [part for name, part in found.items() if not any(name.startswith(f"{outer}.") for outer in found)]


class Heads(NamedTuple):
    """Those of one layer's attention; none: 0 each."""

    queries: int
    keys: int
    width: int


def told(config: Any, name: str) -> Any:
    """What a configuration says of its layers, the first of them where they differ; None: nothing."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' answer where layers differ
        return getattr(config.per_layer_config[0], name, None)


def heads_of(config: Any) -> Heads:
    """Those that a text configuration says."""
    queries = told(config, "num_attention_heads")
    if not queries:
        return Heads(0, 0, 0)
    width = told(config, "head_dim") or config.hidden_size // queries
    return Heads(queries, told(config, "num_key_value_heads") or queries, width)


def experts_per_token(config: Any) -> int | None:
    """Routed experts that a token uses; None: the model has none."""
    found = next((value for name in EXPERTS_PER_TOKEN if (value := told(config, name)) is not None), None)
    return max(found) if isinstance(found, list) else found


def used_weights(layer: nn.Module, config: Any) -> int:
    """Weights of a layer's matrices that one token meets."""
    used = experts_per_token(config)
    total = 0
    for weight in layer.parameters():
        if weight.dim() == 3 and used is not None and weight.shape[0] > used and weight.shape[1] > 1:
            total += weight.numel() // weight.shape[0] * used
        elif weight.dim() >= 2:
            total += weight.numel()
    return total
