"""Half precision that rounds where vLLM's layers round.

Called by `learner.training.trainer` before a model is sharded, when its passes are in half precision. A number that the engine
rounds to bfloat16 at one place and transformers at another differs by up to 1 part in 256, and the layers behind it make other
numbers of that: such differences, and not the sums of matrix products, are what sets a token's two log-probabilities apart
(docs/numerics.md has the figures by layer). Three places differ, seen on vLLM's CPU kernels: the norm behind a residual sum reads
the sum before it is rounded; rotary embedding rounds once and not after each product; attention rounds its result only.
`learner.model.packed_attention` does the last. Invariant: weights and their names are untouched, and in float32 these functions
compute what transformers computes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from learner.model.packed_attention import HALF
from learner.model.products import linear

PRE_NORM_LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
"""Layers of transformers that are: norm, attention, sum, norm, feed-forward, sum. Others keep transformers' rounding."""


def round_as_engine(lm: Any) -> bool:
    """Makes a causal language model of transformers round where vLLM does; False: its layers are of another kind, and it is left
    as it is. Call it once, before its layers are checkpointed or sharded."""
    decoder = lm.get_decoder()
    if any(type(layer).__name__ not in PRE_NORM_LAYERS for layer in getattr(decoder, "layers", [None])):
        return False
    decoder.rotary_emb.register_forward_hook(_in_float32)
    decoder.norm.forward = partial(_norm, decoder.norm)
    for layer in decoder.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.forward = partial(_norm, norm)
        layer.forward = partial(_layer, layer)
    return True


def _in_float32(module: nn.Module, given: Any, found: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Cosine and sine, rounded as they are, in float32: products with them are not rounded until attention begins."""
    return tuple(each.float() for each in found)


def _norm(module: Any, states: Tensor) -> Tensor:
    """RMSNorm of [..., hidden] states of any float type, rounded to the weight's type before the weight multiplies it."""
    wide = states.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + module.variance_epsilon)
    normed: Tensor = module.weight * scaled.to(module.weight.dtype)
    return normed


def _layer(layer: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    """[1, T, hidden] -> [1, T, hidden] in float32: the sum that the next layer's norm reads, and rounds for the sum after it."""
    dtype = layer.input_layernorm.weight.dtype
    residual = hidden_states.to(dtype)
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
    summed = residual.float() + attended.float()
    residual = summed.to(dtype)
    return residual.float() + layer.mlp(layer.post_attention_layernorm(summed)).float()


class _WideProduct(torch.autograd.Function):  # type: ignore[misc]
    """Half-precision factors, a product in float32; gradients as the product in half precision has them."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        if states.is_cuda:
            return torch.mm(states, weight.t(), out_dtype=torch.float32)
        return states.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        grad = grad.to(states.dtype)
        wanted_states, wanted_weight = ctx.needs_input_grad
        return grad @ weight if wanted_states else None, grad.t() @ states if wanted_weight else None


def float32_logits(head: nn.Module, states: Tensor) -> Tensor:
    """[..., hidden] states, a model's output matrix -> [..., V] float32 logits that were never rounded to half precision, as the
    engine's are (vLLM's `head_dtype`). A head of another kind gives what it gives."""
    plain = type(head) is nn.Linear and head.bias is None and head.weight.dtype in HALF
    if not plain:
        logits: Tensor = linear(head, states) if type(head) is nn.Linear else type(head).forward(head, states)
        return logits.float()
    wide: Tensor = _WideProduct.apply(states.flatten(0, -2), head.weight)
    return wide.unflatten(0, states.shape[:-1])
