"""torch's kernel for packed rows has another signature in 2.11 than in 2.13, and both are supported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from learner.model import packed_attention as attention
from learner.model.packed_attention import packed_attention


def test_kernel_is_asked_for_grouped_heads_where_it_wants_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch 2.11 an update in half precision on a GPU would end in a TypeError."""
    told: list[dict[str, Any]] = []

    def of_2_11(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        told.append({"heads": key.shape[1]})
        return query

    def of_2_13(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        told.append({"heads": key.shape[1], "enable_gqa": enable_gqa})
        return query

    monkeypatch.setattr(attention, "has_kernel", lambda query: True)
    states = [torch.randn(1, heads, 4, 8) for heads in (4, 2, 2)]
    for kernel in (of_2_11, of_2_13):
        monkeypatch.setattr(attention, "varlen_attn", kernel)
        starts = torch.tensor([0, 4], dtype=torch.int32)
        packed_attention(torch.nn.Identity(), *states, None, cu_seq_lens_q=starts, max_length_q=4)
    assert told == [{"heads": 2}, {"heads": 2, "enable_gqa": True}]
