"""The model under training: a Hugging Face causal language model and, if asked, a value head on its last hidden state.

Built by `learner.training.trainer`; its forward pass is the only place where log-probabilities and values are computed.
Invariant: a token's log-probability is that of the softmax of logits / temperature, in float32, given the exact ids
before it: what the engine records while sampling. Rows are packed, see `learner.model.packed_attention`; only places
that precede a trained token reach the output matrix. Knows nothing of sharding, losses or batches. Not for models that
transform the output matrix's logits (soft-capping, logit scales): the exactness check shows it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from learner.model.engine_rounding import float32_logits
from learner.model.micro_batch import MicroBatch, Paths
from learner.model.packed_attention import PACKED

LOGITS_AT_ONCE = 2**26
"""256 MiB in float32: 442 tokens of a vocabulary of 151,936, where 8,192 tokens would take 4.6 GiB several times over."""
MOST_CROSSTALK = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Largest difference, relative to the states' size, that another row in the pack may make: far above rounding in each dtype."""


class TokenOutputs(NamedTuple):
    """[m] float32 each, for the m trained tokens in row order. A tuple: FSDP finds no tensors in a dataclass."""

    logprobs: Tensor | None
    entropy: Tensor | None
    values: Tensor | None
    energy: Tensor | None = None
    """1 - 2 pi + sum of pi^2 over the vocabulary: squared norm of the gradient of the log-probability at the logits."""


class Policy(nn.Module):  # type: ignore[misc]
    """`lm` is the Hugging Face model; `value_head` starts at zero: a fresh critic predicts 0."""

    def __init__(self, lm: Any, *, value_head: bool) -> None:
        super().__init__()
        lm.set_attn_implementation(PACKED)
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

    def checkpoint_layers(self) -> None:
        """Gradient checkpointing: the backward pass computes each layer again from its input, arXiv:1604.06174. Call it once,
        before sharding. (transformers' own does it in training mode only, which switches dropout on.)"""
        for layer in self.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    def states(self, micro: MicroBatch) -> Tensor:
        """[T, hidden] last hidden states."""
        options: dict[str, Any] = {"positions": micro.positions, "starts": micro.starts, "longest": micro.longest}
        return hidden_states(self.lm, micro.ids, **options, paths=micro.paths)

    def states_alone(
        self, ids: Tensor, *, positions: Tensor, starts: Tensor, longest: int, paths: Paths | None = None
    ) -> Tensor:
        """What `hidden_states` gives, outside of `forward`, of a sharded policy too: `learner.model.fsdp.shard` registers it."""
        states = hidden_states(self.lm, ids, positions=positions, starts=starts, longest=longest, paths=paths)
        return states.clone()  # no view: FSDP

    def forward(
        self, micro: MicroBatch, *, temperature: float | None, entropy: bool = False, energy: bool = False
    ) -> TokenOutputs:
        """`temperature` None: no log-probabilities, a critic of its own.

        A head that shares the policy's states reads them and does not train them: its errors have one sign when rewards
        rise, and moving every state by them has made a policy that had solved its task forget it in one update (the
        interference of arXiv:2009.04416, whose answer while the policy trains is this one).
        """
        chosen = self.states(micro)[micro.before]  # the state before a token predicts it
        values = None
        if self.value_head is not None:
            judged = chosen if temperature is None else chosen.detach()
            values = self.value_head(judged).float().squeeze(-1).clone()  # no view: FSDP
        if temperature is None:
            return TokenOutputs(None, None, _of_rows(values, micro))
        outputs = self._logprobs(chosen, micro.tokens, temperature=temperature, entropy=entropy, energy=energy)
        logprobs, entropies, energies = (_of_rows(output, micro) for output in outputs)
        return TokenOutputs(logprobs, entropies, _of_rows(values, micro), energies)

    def _logprobs(
        self, states: Tensor, tokens: Tensor, *, temperature: float, entropy: bool, energy: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[m, hidden] states and the [m] tokens after them; never more than LOGITS_AT_ONCE logits, computed again backwards."""
        size = max(1, LOGITS_AT_ONCE // int(self.lm.get_output_embeddings().weight.shape[0]))
        compute = partial(self._chunk, temperature=temperature, entropy=entropy, energy=energy)
        if len(tokens) <= size:
            return compute(states, tokens)
        parts = [
            checkpoint(compute, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(states.split(size), tokens.split(size))
        ]
        logprobs, entropies, energies = zip(*parts)
        return torch.cat(logprobs), torch.cat(entropies) if entropy else None, torch.cat(energies) if energy else None

    def _chunk(
        self, states: Tensor, tokens: Tensor, *, temperature: float, entropy: bool, energy: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logits = float32_logits(self.lm.get_output_embeddings(), states) / temperature
        logprobs = -functional.cross_entropy(logits, tokens, reduction="none")
        squared_norm = 1.0 - 2.0 * logprobs.exp() + logits.softmax(-1).square().sum(-1) if energy else None
        return logprobs, _entropy(logits) if entropy else None, squared_norm


def _of_rows(predicted: Tensor | None, micro: MicroBatch) -> Tensor | None:
    """[u] -> [m]: rows that were one up to a token share what was computed for it."""
    return predicted if predicted is None or micro.shared is None else predicted[micro.shared]


def hidden_states(
    lm: Any, ids: Tensor, *, positions: Tensor, starts: Tensor, longest: int, paths: Paths | None = None
) -> Tensor:
    """[T, hidden] last states of a pack, see `MicroBatch`."""
    shared = {} if paths is None else {"paths": paths}
    states: Tensor = lm.get_decoder()(
        input_ids=ids[None],
        position_ids=positions[None],
        use_cache=False,
        cu_seq_lens_q=starts,
        max_length_q=longest,
        **shared,
    ).last_hidden_state[0]
    return states


def check_rows_apart(policy: Policy) -> None:
    """Two rows of three tokens: the second must be what it is alone. Raises ValueError; recurrent layers carry state over. All
    ranks of a sharded policy enter."""
    device = next(policy.parameters()).device
    ids = torch.arange(6, device=device)
    starts = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
    with torch.no_grad():
        beside = policy.states_alone(ids, positions=ids % 3, starts=starts, longest=3)[3:]
        alone = policy.states_alone(ids[3:], positions=ids[:3], starts=starts[:2], longest=3)
    crosstalk = float((beside - alone).abs().max() / alone.abs().max())
    if not crosstalk <= MOST_CROSSTALK[alone.dtype]:
        raise ValueError(
            f"model.path must name a model whose layers keep packed rows apart, got {type(policy.lm).__name__}, where another "
            f"row changes a state by {crosstalk:.1e} of its size; train a model with transformers' attention interface"
        )


def _entropy(logits: Tensor) -> Tensor:
    """[m, V] -> [m], in nats."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
