"""What a model is counted by, in any architecture of transformers: its layers, heads, and the experts that a token uses.

Used by `learner.model` and `learner.placement.memory`. Invariant: only classes of transformers and shapes are asked, and of
the configuration the number of experts for a token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from configs.model_folder import EXPERTS_PER_TOKEN
from learner.model.products import product


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


# What a machine can do at most, and what an update asks of it, in floating-point operations. Invariant: only what the
# mathematics needs is counted: no padding, no layer computed twice, no pass without gradient, and half of each attention
# square.

SIDES = {"cuda": 8192, "cpu": 1024}
REPEATS = 3


@cache
def matmul_rate(*, device: str, dtype: str) -> float:
    """FLOP/s of a square matrix product in `dtype`, the median of REPEATS, measured once. On one thread on a CPU."""
    side = SIDES[device.split(":")[0]]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = (torch.randn(side, side, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
        multiply = product if a.dtype == torch.float32 and not a.is_cuda else torch.matmul
        seconds = []
        for _ in range(REPEATS + 2):
            began = time.perf_counter()
            multiply(a, b)
            if a.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return 2.0 * side**3 / median(seconds[2:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a causal language model is made of, as far as its matrix products go; of experts, those that a token uses."""

    weights: int
    """Those of the layers, which each token meets; without the output matrix."""
    width: int
    """All query heads of all layers with attention together."""
    output: int
    """Weights of the output matrix."""
    is_frozen: bool = False
    """The weights have no gradient of their own (LoRA)."""

    @classmethod
    def of(cls, lm: Any) -> Work:
        """That of a model, sharded or not."""
        text = lm.config.get_text_config()
        layers = layers_of(lm.get_decoder())
        heads = heads_of(text)
        attend = sum(any(hasattr(part, "k_proj") for part in layer.modules()) for layer in layers) or len(layers)
        return cls(
            weights=sum(used_weights(layer, text) for layer in layers),
            width=attend * heads.queries * heads.width,
            output=text.hidden_size * text.vocab_size,
            is_frozen=not all(weight.requires_grad for layer in layers for weight in layer.parameters()),
        )

    def update_flops(self, *, tokens: int, squares: int, trained: int) -> float:
        """Forward and backward pass, which is twice the forward. `squares`: the tokens that each token sees are, added, half of
        that; `trained`: the output matrix is applied at these positions only."""
        of_weights = 2.0 * self.weights * tokens
        others = 2.0 * self.width * squares + 2.0 * self.output * trained
        return (2.0 if self.is_frozen else 3.0) * of_weights + 3.0 * others
