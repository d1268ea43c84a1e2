"""Rules of learner/model/packed_attention.py: packed rows give what padded rows give, and what each row gives alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from learner.model import packed_attention as attention
from learner.model.load import load_policy
from learner.model.packed_attention import PACKED, packed_attention
from learner.model.policy import Policy
from learner.training.packing import PaddedSequences, Sequences
from tests.support.learner_parts import VOCABULARY, make_model, make_trainer, random_lm

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
LENGTHS = (37, 1, 23, 9, 9, 2, 64)


def _llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def _gemma() -> Any:
    return GemmaForCausalLM(GemmaConfig(**SMALL))


def _mistral() -> Any:
    """Each token sees 8 tokens."""
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8))


def _sequences() -> Sequences:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in LENGTHS]
    masks = [(rng.random(length) < 0.5).astype(np.uint8) * (np.arange(length) > 0) for length in LENGTHS]
    return Sequences(ids, masks=[mask.astype(np.uint8) for mask in masks])


def _outputs(policy: Policy, sequences: Sequences, *, piles: list[list[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities, entropies, values in the batch's order, and the gradients of their weighted sum."""
    policy.zero_grad()
    weights = torch.randn(3, sequences.num_trained, generator=torch.Generator().manual_seed(3))
    found = torch.zeros(3, sequences.num_trained)
    for pile in piles:
        micro = sequences.micro_batch(pile, device=torch.device("cpu"))
        out = policy(micro, temperature=0.9)
        stacked = torch.stack([out.logprobs, out.entropy, out.values])
        (stacked * weights[:, micro.index]).sum().backward()
        found[:, micro.index] = stacked.detach()
    gradients = [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]
    return list(found), gradients


@pytest.mark.parametrize("make", [random_lm, _llama, _gemma, _mistral])
def test_packed_rows_equal_padded_rows_and_rows_alone(make: Callable[[], Any]) -> None:
    """Log-probabilities, entropies, values and gradients."""
    torch.manual_seed(0)
    lm = make().eval()
    sequences, everything = _sequences(), list(range(len(LENGTHS)))
    packed = Policy(lm, value_head=True)
    torch.nn.init.normal_(packed.value_head.weight)
    results = [_outputs(packed, sequences, piles=[[5, 2, 0, 6, 1, 4, 3]])]
    results.append(_outputs(packed, sequences, piles=[[row] for row in everything]))
    results.append(_outputs(packed, PaddedSequences(sequences), piles=[everything]))
    for found, gradients in results[1:]:
        for one, other in zip(results[0][0], found, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
        for one, other in zip(results[0][1], gradients, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5 * float(other.abs().max()) + 1e-6, rtol=0)


def test_another_row_in_the_pack_changes_no_bit_of_a_gradient_to_it() -> None:
    """The gradient of one row's output with respect to another's input is zero, not small."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 10, 8, requires_grad=True) for heads in (4, 2, 2))
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)
    out, _ = packed_attention(torch.nn.Identity(), query, key, value, None, cu_seq_lens_q=starts, max_length_q=6)
    assert out.shape == (1, 10, 4, 8)
    out[:, 4:].sum().backward()
    for states in (query, key, value):
        assert float(states.grad[:, :, :4].abs().max()) == 0.0
        assert float(states.grad[:, :, 4:].abs().max()) > 0.0


@pytest.mark.parametrize("window", [None, 3])
def test_kernel_for_all_rows_is_asked_for_the_same(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """torch's kernel runs on a GPU only; here a stand-in does what torch documents for it."""
    states = [torch.randn(1, heads, 11, 8) for heads in (4, 2, 2)]
    options: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, 5, 11], dtype=torch.int32), "max_length_q": 6}
    options |= {"scaling": 0.3, "sliding_window": window}
    rows, _ = packed_attention(torch.nn.Identity(), *states, None, **options)
    monkeypatch.setattr(attention, "has_kernel", lambda query: True)
    monkeypatch.setattr(attention, "varlen_attn", _varlen_as_documented)
    kernel, _ = packed_attention(torch.nn.Identity(), *states, None, **options)
    assert kernel.shape == rows.shape == (1, 11, 4, 8)
    torch.testing.assert_close(kernel, rows, atol=1e-6, rtol=0)


def _varlen_as_documented(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """(T, H, D); (-1, 0) is causal, (W, 0) causal with W tokens to the left of a token's own."""
    assert max_q == max_k == int(cu_seq_q.diff().max()) and enable_gqa
    left, right = window_size
    out = []
    for start, end in zip(cu_seq_q.tolist(), cu_seq_k[1:].tolist()):
        q, k, v = (states[start:end].transpose(0, 1) for states in (query, key, value))
        k, v = (states.repeat_interleave(len(q) // len(states), dim=0) for states in (k, v))
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (distance >= -right) & ((distance <= left) if left >= 0 else True)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("wish", [{"softcap": 30.0}, {"s_aux": torch.zeros(1)}])
def test_attention_that_this_cannot_do_is_refused(wish: dict[str, Any]) -> None:
    states = torch.randn(1, 1, 2, 4)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"Identity attends with {next(iter(wish))}"):
        packed_attention(
            torch.nn.Identity(), states, states, states, None, cu_seq_lens_q=starts, max_length_q=2, **wish
        )


def test_saved_folder_does_not_ask_for_packed_attention(tmp_path: Path) -> None:
    trainer = make_trainer(make_model(tmp_path / "tiny"))
    try:
        trainer.save_pretrained(tmp_path / "out")
    finally:
        trainer.close()
    assert PACKED not in (tmp_path / "out" / "config.json").read_text()
    load_policy(tmp_path / "out", device=torch.device("cpu"))
