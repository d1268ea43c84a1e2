"""Adapters on a CPU, several times as fast: the tokens of one adapter are computed together.

Installed in the engine's process by `mocked_server.vllm.process.worker_extension`. vLLM's own way copies an adapter's matrices
once for each token of a step, which takes six times as long as the model itself. A step has few adapters, one for each version that
generations began under: two matrix products for each of them, and each layer, are enough. What is computed is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Groups = list[tuple[int, slice | Tensor]]
"""(slot of an adapter, its rows); rows without an adapter are in none."""


def install() -> None:
    """Replaces vLLM's computation in this process."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    original: Any = PunicaWrapperCPU.update_metadata
    if original.__name__ == "update_metadata_and_groups":
        return

    def update_metadata_and_groups(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self.token_groups = groups_of(self.token_lora_indices)
        self.sampler_groups = groups_of(self.sampler_indices)

    PunicaWrapperCPU.update_metadata = update_metadata_and_groups
    PunicaWrapperCPU.add_lora_linear = _add_to_layer
    PunicaWrapperCPU.add_lora_logits = _add_to_logits


def groups_of(slots: Tensor) -> Groups:
    """[n] slots of n rows, -1 for none."""
    found = [slot for slot in slots.unique().tolist() if slot >= 0]
    if len(found) == 1 and bool((slots == found[0]).all()):
        return [(found[0], slice(0, len(slots)))]
    return [(slot, (slots == slot).nonzero()[:, 0]) for slot in found]


def _add_to_layer(
    self: Any,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: tuple[Tensor, ...],
    lora_b_stacked: tuple[Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """y [n, out] += scale * x [n, in] @ A^T @ B^T, for each slice of a packed layer; A [slots, 1, r, in], B [slots, 1, out, r]."""
    for slot, rows in self.token_groups:
        own, begin = x[rows], 0
        for down, up, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            y[rows, begin : begin + size] += _product(own, down[slot, 0], up[slot, 0], scale=scale).to(y.dtype)
            begin += size


def _add_to_logits(
    self: Any, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **_: Any
) -> None:
    """The same as `_add_to_layer`, for the output matrix."""
    logits, states = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
    for slot, rows in self.sampler_groups:
        added = _product(states[rows], lora_a_stacked[slot, 0], lora_b_stacked[slot, 0], scale=scale)
        logits[rows, : added.shape[1]] += added.to(y.dtype)


def _product(x: Tensor, down: Tensor, up: Tensor, *, scale: float) -> Tensor:
    """The product with A in float32, as vLLM does it."""
    return (scale * torch.nn.functional.linear(x.float(), down.float())).to(up.dtype) @ up.T
