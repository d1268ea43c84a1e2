"""Rules of learner/model/packed_attention.py: a kernel in half precision that sees or gives back too little is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from learner.model import packed_attention as attention
from learner.model.packed_attention import check_kernel
from tests.support.learner_parts import random_lm

CPU = torch.device("cpu")


def test_the_attention_of_this_machine_passes() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        check_kernel(random_lm().config, device=CPU, dtype=dtype)


def in_half_precision(monkeypatch: pytest.MonkeyPatch, name: str, changed: Any) -> None:
    """Float32 goes on as it is."""
    plain = attention.packed_attention

    def attend(module: Any, query: torch.Tensor, *others: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if query.dtype != torch.float32:
                patch.setattr(attention, name, changed)
            return plain(module, query, *others, **options)

    monkeypatch.setattr("learner.model.packed_attention.packed_attention", attend)


def test_queries_aligned_with_the_first_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the diagonal began at the upper left: a branch sees as many keys as it has tokens."""
    aligned = attention._segment_attention

    def upper_left(query: Any, key: Any, value: Any, **options: Any) -> Any:
        return aligned(query, key[: len(query)], value[: len(query)], **options)

    in_half_precision(monkeypatch, "_segment_attention", upper_left)
    with pytest.raises(ValueError, match=r"kernel for torch.bfloat16 on cpu must give two branches"):
        check_kernel(random_lm().config, device=CPU, dtype=torch.bfloat16)


def test_wrong_gradient_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stem gets the gradient of one branch only: the forward pass is right."""

    def once(states: torch.Tensor, *, places: torch.Tensor) -> torch.Tensor:
        first = torch.tensor([bool((places[:number] == place).sum() < 2) for number, place in enumerate(places)])
        taken = states[places]
        return torch.where(first[:, None, None], taken, taken.detach())

    in_half_precision(monkeypatch, "_gathered", once)
    with pytest.raises(ValueError, match="must give two branches"):
        check_kernel(random_lm().config, device=CPU, dtype=torch.bfloat16)
