"""float32 products of linear layers on a CPU, by oneDNN.

torch gives them to MKL, whose kernels for processors that are not Intel's use half of the width of their registers: on an EPYC
9005 110 GFLOP/s a core where oneDNN has 240. Invariant: numbers and gradients are torch's, up to rounding. What is small, in
half precision or on a card stays torch's own.
"""

from __future__ import annotations

import platform
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

LEAST_WEIGHTS = 2**16
"""A matrix of fewer gains nothing."""
_HAS_ONEDNN = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()


def use_onednn(module: nn.Module) -> None:
    """Has all plain linear layers of a module compute by `linear`."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.forward = partial(linear, layer)


def linear(layer: nn.Linear, states: Tensor) -> Tensor:
    """[..., in] -> [..., out], as the layer's own forward."""
    weight = layer.weight
    is_float32 = states.dtype == weight.dtype == torch.float32
    if not (
        _HAS_ONEDNN
        and is_float32
        and states.device.type == "cpu"
        and states.numel()
        and weight.numel() >= LEAST_WEIGHTS
    ):
        return nn.Linear.forward(layer, states)
    found: Tensor = _Product.apply(states.flatten(0, -2), weight).unflatten(0, states.shape[:-1])
    return found if layer.bias is None else found + layer.bias


def product(rows: Tensor, columns: Tensor) -> Tensor:
    """[m, k], [n, k] -> [m, n], float32 on a CPU."""
    if not _HAS_ONEDNN:
        return rows @ columns.t()
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, columns, None, "none", [], "")
    return found


class _Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        return product(states, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        of_states, of_weight = ctx.needs_input_grad
        return product(grad, weight.t()) if of_states else None, product(grad.t(), states.t()) if of_weight else None
