"""The model under training: a Hugging Face causal language model and, if asked, a value head on its last hidden state.

Built by `learner.model.load`; its forward pass is the only place where log-probabilities and values are computed.
Invariant: a token's log-probability is that of the softmax of the model's own logits / temperature, in float32, given the exact ids
before it: what the engine records while sampling. Only places that precede a trained token reach the output matrix. Knows nothing
of sharding, losses or batches.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from learner.model.engine_rounding import float32_logits
from learner.model.file_names import FileNames
from learner.model.layers import layers_of
from learner.model.micro_batch import MicroBatch
from learner.model.packed_attention import PACKED

LOGITS_AT_ONCE = 2**26
"""256 MiB in float32: 442 tokens of a vocabulary of 151,936, where 8,192 tokens would take 4.6 GiB several times over."""


class TokenOutputs(NamedTuple):
    """[m] float32 each, for the m trained tokens in row order. A tuple: FSDP finds no tensors in a dataclass."""

    logprobs: Tensor | None
    entropy: Tensor | None
    values: Tensor | None
    energy: Tensor | None = None
    """1 - 2 pi + sum of pi^2 over the vocabulary: squared norm of the gradient of the log-probability at the logits."""


class Policy(nn.Module):  # type: ignore[misc]
    """`lm` is the Hugging Face model; `value_head` starts at zero: a fresh critic predicts 0. `attention`: transformers' name of
    the kernel for rows that are not packed. `names`: of its weights in its folder."""

    def __init__(self, lm: Any, *, value_head: bool, names: FileNames | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.names = FileNames(lm) if names is None else names
        self.attention: str = lm.config._attn_implementation
        self._body_name = next(name for name, part in lm.named_children() if layers_of(part))
        head = lm.get_output_embeddings()
        text = {id(weight) for part in (lm.get_decoder(), head) for weight in part.parameters()}
        for weight in lm.parameters():  # a vision tower's: it stays as it is
            weight.requires_grad_(id(weight) in text)
        head.forward = partial(float32_logits, head)
        self.value_head: Any = None
        if value_head:
            self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of the model and of its towers, each of which is sharded on its own."""
        return layers_of(self.lm)

    @property
    def _body(self) -> Any:
        """The part of the model that makes states; the rest makes logits of them."""
        return getattr(self.lm, self._body_name)

    def checkpoint_layers(self) -> None:
        """Gradient checkpointing: the backward pass computes each layer again from its input, arXiv:1604.06174. Call it once,
        before sharding. (transformers' own does it in training mode only, which switches dropout on.)"""
        for layer in self.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    def own_logits(self, ids: Tensor) -> Tensor:
        """[L] -> [L, V]: those of one row as transformers computes them. Outside of `forward`, of a sharded policy too:
        `learner.model.fsdp.shard` registers it."""
        self._attend_with(self.attention)
        logits: Tensor = self.lm(input_ids=ids[None], use_cache=False).logits[0]
        return logits.clone()  # no view: FSDP

    def forward(
        self, micro: MicroBatch, *, temperature: float | None, entropy: bool = False, energy: bool = False
    ) -> TokenOutputs:
        """`temperature` None: no log-probabilities, a critic of its own.

        A head that shares the policy's states reads them and does not train them: its errors have one sign when rewards
        rise, and moving every state by them has made a policy that had solved its task forget it in one update (the
        interference of arXiv:2009.04416, whose answer while the policy trains is this one).
        """
        found = self._states(micro)
        chosen = found.last_hidden_state.flatten(0, 1)[micro.before]  # the state before a token predicts it
        values = None
        if self.value_head is not None:
            judged = chosen if temperature is None else chosen.detach()
            values = self.value_head(judged).float().squeeze(-1).clone()  # no view: FSDP
        if temperature is None:
            return TokenOutputs(None, None, _of_rows(values, micro))
        compute = partial(self._chunk, kind=type(found), temperature=temperature, entropy=entropy, energy=energy)
        outputs = self._in_chunks(compute, chosen, micro.tokens)
        logprobs, entropies, energies = (_of_rows(output, micro) for output in outputs)
        return TokenOutputs(logprobs, entropies, _of_rows(values, micro), energies)

    def _states(self, micro: MicroBatch) -> Any:
        """What the body of the model answers, with [b, L, hidden] `last_hidden_state`."""
        options: dict[str, Any] = {}
        self._attend_with(self.attention if micro.segments is None else PACKED)
        if (segments := micro.segments) is not None:
            options = {
                "position_ids": segments.positions,
                "cu_seq_lens_q": segments.starts,
                "max_length_q": segments.longest,
            }
            options |= {} if segments.paths is None else {"paths": segments.paths}
        return self._body(input_ids=micro.ids, use_cache=False, **options)

    def _attend_with(self, name: str) -> None:
        if self.lm.config._attn_implementation != name:
            self.lm.set_attn_implementation(name)

    def _in_chunks(self, compute: Any, states: Tensor, tokens: Tensor) -> tuple[Tensor | None, ...]:
        """[m, hidden] states and the [m] tokens after them; never more than LOGITS_AT_ONCE logits, computed again backwards."""
        size = max(1, LOGITS_AT_ONCE // int(self.lm.get_output_embeddings().weight.shape[0]))
        if len(tokens) <= size:
            found: tuple[Tensor | None, ...] = compute(states, tokens)
            return found
        parts = [
            checkpoint(compute, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(states.split(size), tokens.split(size))
        ]
        return tuple(None if column[0] is None else torch.cat(column) for column in zip(*parts))

    def _chunk(
        self, states: Tensor, tokens: Tensor, *, kind: Any, temperature: float, entropy: bool, energy: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logits = self._logits_of(states, kind=kind) / temperature
        logprobs = -functional.cross_entropy(logits, tokens, reduction="none")
        squared_norm = 1.0 - 2.0 * logprobs.exp() + logits.softmax(-1).square().sum(-1) if energy else None
        return logprobs, _entropy(logits) if entropy else None, squared_norm

    def _logits_of(self, states: Tensor, *, kind: Any) -> Tensor:
        """[m, hidden] -> [m, V] by the model's own forward, in which its body answers with these states: scales, caps and biases of
        its logits are its own matter. `kind`: class of the body's answers."""
        body = self._body
        answer = kind(last_hidden_state=states[None])
        body.forward = lambda *given, **options: answer
        try:
            one = torch.zeros(1, 1, dtype=torch.long, device=states.device)
            return self.lm(input_ids=one, use_cache=False).logits[0].float()
        finally:
            del body.forward


def _of_rows(predicted: Tensor | None, micro: MicroBatch) -> Tensor | None:
    """[u] -> [m]: rows that were one up to a token share what was computed for it."""
    return predicted if predicted is None or micro.shared is None else predicted[micro.shared]


def _entropy(logits: Tensor) -> Tensor:
    """[m, V] -> [m], in nats."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
