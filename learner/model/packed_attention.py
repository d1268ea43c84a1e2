"""Causal attention over rows that lie one after another in one sequence: no row sees another, and nothing is padded.

Registered with transformers under the name `PACKED` and used by `learner.model.policy` for every model. A model hands
over what transformers calls `cu_seq_lens_q` and `max_length_q`: where rows start, and the longest. Invariant: a row's
result is that of the row alone (up to rounding). On a GPU in half precision one kernel does all rows; elsewhere each
row is its own call, at the cost of that row's length squared and not of the pack's. No dropout: the engine samples
without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

PACKED = "packed_rows"
HALF = (torch.float16, torch.bfloat16)
UNKNOWN = ("softcap", "s_aux", "position_bias")
"""What some models ask of attention beside the causal mask, and this does not do."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, G, T, D] -> [1, T, H, D]. H is a multiple of G; starts [n + 1] int32.

    Raises ValueError for a model that needs what this attention cannot do.
    """
    wanted = [name for name in UNKNOWN if others.get(name) is not None]
    if wanted or attention_mask is not None:
        raise ValueError(
            f"model.path must name a model with plain causal attention, got {type(module).__name__} with "
            f"{', '.join(wanted) or 'a mask of its own'}; train another model"
        )
    if has_kernel(query):
        rows, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
        window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
        options: dict[str, Any] = {"scale": scaling, "window_size": window, "enable_gqa": True}
        ends = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        return varlen_attn(rows, keys, values, *ends, **options)[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    parts = zip(*(states.split(lengths, dim=2) for states in (query, key, value)))
    done = [_row_attention(*part, scaling=scaling, window=sliding_window) for part in parts]
    return torch.cat(done, dim=2).transpose(1, 2), None


def has_kernel(query: Tensor) -> bool:
    """Whether torch has one kernel for all rows here."""
    return bool(query.is_cuda and query.dtype in HALF)


def _row_attention(query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None) -> Tensor:
    """One row, [1, H, L, D]; `window`: how many tokens a token sees, itself included (None: all before it)."""
    length, mask = query.shape[2], None
    if window is not None and window < length:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )


AttentionInterface.register(PACKED, packed_attention)
