"""The model under training: a Hugging Face causal language model and, if asked, a value head on its last hidden state.

Built by `learner.trainer`; its forward pass is the only place where log-probabilities and values are computed.
Invariant: a token's log-probability is that of the softmax of logits / temperature, in float32, given the exact ids
before it: what the engine records while sampling. Only positions that precede a trained token reach the output
matrix. Knows nothing of sharding, losses or batches. Not for models that transform the output matrix's logits
(soft-capping, logit scales): the exactness check shows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.utils import logging


class TokenOutputs(NamedTuple):
    """[m] float32 each, for the m trained tokens in row order. A tuple: FSDP finds no tensors in a dataclass."""

    logprobs: Tensor | None
    entropy: Tensor | None
    values: Tensor | None


class Policy(nn.Module):  # type: ignore[misc]
    """`lm` is the Hugging Face model; `value_head` starts at zero: a fresh critic predicts 0."""

    def __init__(self, lm: Any, *, value_head: bool) -> None:
        super().__init__()
        self.lm = lm
        self.value_head: Any = None
        if value_head:
            self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, each of which is sharded on its own."""
        return list(self.lm.get_decoder().layers)

    def forward(self, ids: Tensor, mask: Tensor, *, temperature: float | None, entropy: bool = False) -> TokenOutputs:
        """ids [B, T] padded on the right, mask [B, T] of trained tokens; `temperature` None: no log-probabilities."""
        hidden = self.lm.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        chosen = hidden[:, :-1][mask[:, 1:]]  # the state before a token is what predicts it
        values = (
            None if self.value_head is None else self.value_head(chosen).float().squeeze(-1).clone()
        )  # no view: FSDP
        if temperature is None:
            return TokenOutputs(None, None, values)
        logits = self.lm.get_output_embeddings()(chosen).float() / temperature
        logprobs = -functional.cross_entropy(logits, ids[:, 1:][mask[:, 1:]], reduction="none")
        return TokenOutputs(logprobs, _entropy(logits) if entropy else None, values)


def load_policy(folder: str | Path, *, value_head: bool, device: torch.device) -> Policy:
    """Reads a Hugging Face folder in float32 (the master weights). Dropout is off: the engine samples without it."""
    logging.disable_progress_bar()
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = Policy(lm, value_head=value_head)
    policy.to(device)
    policy.eval()
    return policy


def _entropy(logits: Tensor) -> Tensor:
    """[m, V] -> [m], in nats."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
