"""The model under training: a Hugging Face causal language model and, if asked, a value head on its last hidden state.

Built by `learner.model.load`; its forward pass is the only place where log-probabilities and values are computed.
Invariant: a token's log-probability is that of the softmax of the model's own logits / temperature, in float32, given the exact ids
before it: what the engine records while sampling. Only places that precede a trained token reach the output matrix. Knows nothing
of sharding, losses or batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from learner.model.engine_rounding import float32_logits
from learner.model.expert_routing import Routing
from learner.model.file_names import FileNames
from learner.model.layers import experts_per_token, layers_of
from learner.model.packed_attention import PACKED, MicroBatch
from learner.model.products import use_onednn

LOGITS_AT_ONCE = 2**26
"""256 MiB in float32: 442 tokens of a vocabulary of 151,936, where 8,192 tokens would take 4.6 GiB twice."""
LOGITS_IN_CACHE = 2**18
"""1 MiB."""


class TokenOutputs(NamedTuple):
    """[m] float32 each, for the m trained tokens in row order. A tuple: FSDP finds no tensors in a dataclass."""

    logprobs: Tensor | None
    entropy: Tensor | None
    values: Tensor | None
    energy: Tensor | None = None
    """1 - 2 pi + sum of pi^2 over the vocabulary: squared norm of the gradient of the log-probability at the logits."""
    balance: Tensor | None = None
    """[] see `Routing.balance`."""
    ids: Tensor | None = None
    """[m, k] int64: the likeliest tokens in each place, or those that were asked for."""
    choices: Tensor | None = None
    """[m, k] their log-probabilities."""

    def of(self, chosen: Tensor) -> TokenOutputs:
        """Those of some tokens."""
        each = self._replace(balance=None)._asdict().items()
        return self._replace(**{name: whole[chosen] for name, whole in each if whole is not None})


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
        use_onednn(lm)
        head.forward = partial(float32_logits, head)
        self.routing = Routing(lm, layers=layers_of(lm.get_decoder()))
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
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, context_fn=self.routing.again
            )

    def own_logits(self, ids: Tensor) -> Tensor:
        """[L] -> [L, V]: those of one row as transformers computes them. Outside of `forward`, of a sharded policy too:
        `learner.model.fsdp.shard` registers it."""
        self._attend_with(self.attention)
        logits: Tensor = self.lm(input_ids=ids[None], use_cache=False).logits[0]
        return logits.clone()  # no view: FSDP

    def forward(
        self,
        micro: MicroBatch,
        *,
        temperature: float | None,
        likeliest: int = 0,
        ids: Tensor | None = None,
    ) -> TokenOutputs:
        """`temperature` None: no log-probabilities, a critic of its own. `likeliest`: how many tokens have choices, or `ids` [m, k]
        which.

        A head that shares the policy's states reads them and does not train them: its errors have one sign when rewards
        rise, and moving every state by them has made a policy that had solved its task forget it in one update (the
        interference of arXiv:2009.04416, whose answer while the policy trains is this one).
        """
        kind, states = self._states(micro)
        chosen = states[micro.before]  # the state before a token predicts it
        values = None
        if self.value_head is not None:
            judged = chosen if temperature is None else chosen.detach()
            values = self.value_head(judged).float().squeeze(-1).clone()  # no view: FSDP
        if temperature is None:
            return TokenOutputs(None, None, _of_rows(values, micro))
        compute = partial(self._chunk, kind=kind, temperature=temperature, likeliest=likeliest)
        if ids is None:
            outputs = [_of_rows(output, micro) for output in self._in_chunks(compute, chosen, micro.tokens)]
        else:  # what rows share has other choices in each
            outputs = [*self._in_chunks(compute, _of_rows(chosen, micro), _of_rows(micro.tokens, micro), ids)]
        balance = self.routing.balance(num_chosen=experts_per_token(self.lm.config.get_text_config()) or 0)
        logprobs, entropy, energy, *others = outputs
        return TokenOutputs(logprobs, entropy, _of_rows(values, micro), energy, balance, *others)

    def _states(self, micro: MicroBatch) -> tuple[Any, Tensor]:
        """The class of the body's answers, and the last states of all places, [places, hidden]."""
        options: dict[str, Any] = {}
        self._attend_with(self.attention if micro.segments is None else PACKED)
        if (segments := micro.segments) is not None:
            options = {
                "position_ids": segments.positions,
                "cu_seq_lens_q": segments.starts,
                "max_length_q": segments.longest,
            }
            options |= {} if segments.paths is None else {"paths": segments.paths}
        if (stems := micro.stems) is None:
            with self.routing.forcing(micro.experts, real=micro.real):
                found = self._body(input_ids=micro.ids, use_cache=False, **options)
            return type(found), found.last_hidden_state.flatten(0, 1)
        named = inspect.signature(self._body.forward).parameters
        key = "cache_params" if "cache_params" in named else "past_key_values"
        cache = _StemCache(self.lm.config)
        count = stems.ids.numel()
        experts, real = (
            (None, None) if one is None else (one[:count], one[count:]) for one in (micro.experts, micro.real)
        )
        with self.routing.forcing(experts[0], real=real[0]):
            found = self._body(input_ids=stems.ids, use_cache=True, **{key: cache})
        positions = torch.arange(micro.ids.shape[1], device=micro.ids.device).expand(micro.ids.shape)
        options = {"position_ids": positions + stems.ids.shape[1], key: cache.branches(stems.of_rows)}
        with self.routing.forcing(experts[1], real=real[1]):
            behind = self._body(input_ids=micro.ids, use_cache=True, **options)
        return type(found), torch.cat([each.last_hidden_state.flatten(0, 1) for each in (found, behind)])

    def _attend_with(self, name: str) -> None:
        if self.lm.config._attn_implementation != name:
            self.lm.set_attn_implementation(name)

    def _in_chunks(self, compute: Any, states: Tensor, *tokens: Tensor) -> tuple[Tensor | None, ...]:
        """[m, hidden] states and what `compute` needs of the [m] tokens after them; never more than LOGITS_AT_ONCE logits, computed
        again backwards."""
        size = max(1, LOGITS_AT_ONCE // int(self.lm.get_output_embeddings().weight.shape[0]))
        if len(states) <= size:
            found: tuple[Tensor | None, ...] = compute(states, *tokens)
            return found
        parts = [
            checkpoint(compute, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(*(each.split(size) for each in (states, *tokens)))
        ]
        return tuple(None if column[0] is None else torch.cat(column) for column in zip(*parts))

    def _chunk(
        self,
        states: Tensor,
        tokens: Tensor,
        ids: Tensor | None = None,
        *,
        kind: Any,
        temperature: float,
        likeliest: int,
    ) -> tuple[Tensor | None, ...]:
        logits = self._logits_of(states, kind=kind)
        found = _OfLogits.apply(logits, tokens, temperature)
        choices = None
        if likeliest and ids is None:
            ids = logits.topk(min(likeliest, logits.shape[-1])).indices
        if ids is not None:
            choices = (logits / temperature).log_softmax(-1).gather(-1, ids)
        return *found, ids, choices

    def _logits_of(self, states: Tensor, *, kind: Any) -> Tensor:
        """[m, hidden] -> [m, V] by the model's own forward, in which its body answers with these states: scales, caps and biases of
        its logits are its own matter. `kind`: class of the body's answers."""
        body = self._body
        answer = kind(last_hidden_state=states[None])
        body.forward = lambda *given, **options: answer
        try:
            one = torch.zeros(1, 1, dtype=torch.long, device=states.device)
            return self.lm(input_ids=one, use_cache=False).logits.squeeze(0).float()
        finally:
            del body.forward


class _StemCache(DynamicCache):  # type: ignore[misc]
    """What layers keep of stems, keys and states, so that rows continue from it. Before the stems it is empty.

    transformers' own cache, but no pass changes what it reads: an update writes into a copy of the layer's entry. So gradients flow
    through states, rows continue the same stem, and a layer that is computed again meets what it met at first."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.activate_past_recording()  # else convolutions copy their states in place
        self._ends: dict[int, Any] | None = {}
        """The entries of layers behind the stem; None: nobody needs them."""
        self._stems: Tensor | None = None
        """The stem of each row that continues one."""

    def branches(self, stems: Tensor) -> _StemCache:
        """What comes before each of b rows; `stems` [b]: the stem of each. Call it once, behind the pass over the stems."""
        assert self._ends is not None
        ends, self._ends = self._ends, None
        for entry in ends.values():
            entry.crop(0)
            if isinstance(entry, LinearAttentionCacheLayerMixin):
                LinearAttentionCacheLayerMixin.reorder_cache(entry, stems)
        found = copy(self)
        found._stems = stems
        found.layers = [ends.get(number, entry) for number, entry in enumerate(self.layers)]
        return found

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, of each row."""
        entry = self._entry(layer_idx)
        if self._stems is not None:  # here and no sooner: a layer that is computed again keeps none of it in between
            CacheLayerMixin.reorder_cache(entry, self._stems)
        found: tuple[Tensor, Tensor] = entry.update(keys, values, *args, **options)
        return found

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any) -> Tensor:
        """What a layer convolves."""
        found: Tensor = self._entry(layer_idx).update_conv_state(conv_states, state_idx, **options)
        return found

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Tensor:
        """The state itself, where transformers copies it in place."""
        entry = self._entry(layer_idx)
        entry.recurrent_states[state_idx] = recurrent_states
        entry.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states

    def _entry(self, layer_idx: int) -> Any:
        """A copy of a layer's entry, which may change."""
        if self._ends is not None and layer_idx in self._ends:
            return self._ends[layer_idx]
        entry = copy(self.layers[layer_idx])
        vars(entry).update({name: dict(value) for name, value in vars(entry).items() if isinstance(value, dict)})
        if self._ends is not None:
            self._ends[layer_idx] = entry
        return entry


def _of_rows(predicted: Tensor | None, micro: MicroBatch) -> Tensor | None:
    """[u] -> [m]: rows that were one up to a token share what was computed for it."""
    return predicted if predicted is None or micro.shared is None else predicted[micro.shared]


class _OfLogits(torch.autograd.Function):  # type: ignore[misc]
    """[m, V] logits, [m] tokens, a temperature -> [m] log-probabilities, entropies in nats, and energies, which have no gradient.

    As many rows at a time as a cache holds: no array but the logits and their gradient is as large as they are."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        figures = []
        for logs, chosen in _few_rows(logits, tokens, temperature=temperature):
            own, weights = logs.gather(-1, chosen[:, None])[:, 0], logs.exp()
            energy = 1.0 - 2.0 * own.exp() + weights.square().sum(-1)
            figures.append((own, -logs.mul_(weights).sum(-1), energy))
        logprobs, entropy, energy = (torch.cat(column) for column in zip(*figures))
        ctx.save_for_backward(logits, tokens, entropy)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(energy)
        return logprobs, entropy, energy

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor, of_entropy: Tensor, of_energy: Tensor) -> tuple[Tensor, None, None]:
        logits, *known = ctx.saved_tensors
        found = torch.empty_like(logits)
        rows = _few_rows(logits, *known, of_logprobs, of_entropy, found, temperature=ctx.temperature)
        for logs, tokens, mean, gain, bonus, result in rows:
            slope = gain[:, None] + bonus[:, None] * (logs + mean[:, None]) if bonus.any() else gain[:, None]
            torch.mul(logs.exp_(), slope / -ctx.temperature, out=result)
            result.scatter_add_(-1, tokens[:, None], gain[:, None] / ctx.temperature)
        return found, None, None


def _few_rows(logits: Tensor, *others: Tensor, temperature: float) -> Iterator[tuple[Tensor, ...]]:
    """Log-probabilities of the vocabulary and the others, some rows at a time."""
    size = max(1, (LOGITS_IN_CACHE if logits.device.type == "cpu" else LOGITS_AT_ONCE) // logits.shape[-1])
    for few, *each in zip(*(one.split(size) for one in (logits, *others))):
        yield (few if temperature == 1.0 else few / temperature).log_softmax(-1), *each
