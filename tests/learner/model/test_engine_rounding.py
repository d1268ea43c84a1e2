"""Rules of learner/model/engine_rounding.py: nothing changes in float32; in bfloat16 numbers are rounded where vLLM's layers do.

That the engine's log-probabilities are then the learner's is shown by a whole run in bfloat16 (tests/project/test_run_weights.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from learner.model.engine_rounding import float32_logits, round_as_engine
from learner.model.policy import Policy
from learner.training.packing import Sequences
from tests.support.learner_parts import VOCABULARY, random_lm

ROWS = torch.randint(0, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1))
PACK = Sequences(list(ROWS.int().numpy()), masks=[np.array([0, *[1] * 11], dtype=np.uint8)] * 3).micro_batch(
    range(3), device=torch.device("cpu")
)


def lm_with_norms() -> Any:
    """Norms whose weights are not 1, by which the order of rounding is seen."""
    lm = random_lm()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            if "norm" in name:
                weight.copy_(1.0 + 0.3 * torch.randn(weight.shape, generator=generator))
    return lm


def test_in_float32_log_probabilities_and_gradients_are_those_of_transformers() -> None:
    found = []
    for rounds in (False, True):
        lm = lm_with_norms()
        policy = Policy(lm, value_head=False)
        assert not rounds or round_as_engine(lm)
        outputs = policy(PACK, temperature=1.0)
        outputs.logprobs.sum().backward()
        found.append([outputs.logprobs.detach(), *(weight.grad for weight in lm.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def rounded(wide: Tensor) -> Tensor:
    """To bfloat16's numbers, in float32."""
    return wide.bfloat16().float()


def rms(states: Tensor, norm: Any) -> Tensor:
    scaled = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return rounded(norm.weight * rounded(scaled))


def turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[H, T, D], rotated by position and rounded once."""
    first, second = states.chunk(2, -1)
    return rounded(states * cos + torch.cat((-second, first), -1) * sin)


def states_by_hand(lm: Any, ids: Tensor) -> Tensor:
    """[T, hidden] last states of one row, each number in float32 and rounded to bfloat16 where vLLM's CPU kernels round it."""
    own = {name: rounded(weight.detach().float()) for name, weight in lm.named_parameters()}
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            weight.copy_(own[name])
    sizes, length = lm.config, len(ids)
    angles = torch.arange(length)[:, None] * lm.model.rotary_emb.inv_freq[None]
    cos, sin = (rounded(torch.cat((wave, wave), -1)) for wave in (angles.cos(), angles.sin()))
    residual = lm.model.embed_tokens.weight[ids]
    summed = residual
    for layer in lm.model.layers:
        attention = layer.self_attn
        states = rms(summed, layer.input_layernorm)
        query, key, value = (
            rounded(functional.linear(states, each.weight)).view(length, -1, sizes.head_dim)
            for each in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query = turned(rms(query, attention.q_norm).transpose(0, 1), cos, sin)
        key = turned(rms(key, attention.k_norm).transpose(0, 1), cos, sin)
        seen = functional.scaled_dot_product_attention(
            query[None], key[None], value.transpose(0, 1)[None], is_causal=True, enable_gqa=True
        )[0]
        attended = rounded(functional.linear(rounded(seen).transpose(0, 1).flatten(1), attention.o_proj.weight))
        summed = residual + attended
        residual = rounded(summed)
        states = rms(summed, layer.post_attention_layernorm)
        gate, up = (
            rounded(functional.linear(states, each.weight)) for each in (layer.mlp.gate_proj, layer.mlp.up_proj)
        )
        fed = rounded(rounded(functional.silu(gate)) * up)
        summed = residual + rounded(functional.linear(fed, layer.mlp.down_proj.weight))
        residual = rounded(summed)
    return rms(summed, lm.model.norm)


@pytest.mark.parametrize("rounds", [True, False])
def test_in_bfloat16_states_are_rounded_where_the_engine_rounds_them(rounds: bool) -> None:
    ids = ROWS[0]
    with torch.no_grad():
        expected = states_by_hand(lm_with_norms(), ids)
        lm = lm_with_norms()
        frequencies = lm.model.rotary_emb.inv_freq.clone()
        lm.bfloat16().model.rotary_emb.inv_freq = frequencies  # FSDP rounds parameters only
        policy = Policy(lm, value_head=False)
        assert not rounds or round_as_engine(lm)
        states = policy._states(PACK)[1][: len(ids)]
    assert states.dtype == torch.bfloat16
    same = float((states.float() == expected).float().mean())
    assert (same > 0.97) if rounds else (same < 0.6), same  # a matrix product adds up in another order, now and then


def test_other_layers_are_left_as_they_are() -> None:
    lm = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)).eval()
    lm.get_decoder = lambda: type("Decoder", (), {"layers": lm.transformer.h})()
    assert not round_as_engine(lm)
    assert "forward" not in vars(lm.transformer.h[0])


def test_logits_are_not_rounded_and_gradients_are_those_of_the_rounded_product() -> None:
    torch.manual_seed(0)
    head = nn.Linear(32, 50, bias=False).bfloat16()
    states = torch.randn(7, 32).bfloat16().requires_grad_()
    wide = states.detach().float() @ head.weight.detach().float().t()
    logits = float32_logits(head, states)
    torch.testing.assert_close(logits, wide, atol=1e-6, rtol=1e-6)
    assert not torch.equal(logits, logits.bfloat16().float())
    slope = torch.randn(7, 50)
    logits.backward(slope)
    found = states.grad, head.weight.grad
    states.grad = head.weight.grad = None
    head(states).float().backward(slope)
    torch.testing.assert_close(found, (states.grad, head.weight.grad))


def test_a_head_that_is_no_plain_matrix_is_asked_itself() -> None:
    head = nn.Linear(8, 9).bfloat16()
    states = torch.randn(2, 8).bfloat16()
    torch.testing.assert_close(float32_logits(head, states), head(states).float())
