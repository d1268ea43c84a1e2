"""What a rank of the learner and an engine hold on a card, item by item, before any of it exists.

Called by `learner.placement.plan`. A rank keeps float32 shards: its part of the weights, of the gradients and of AdamW's two
moments; and in the dtype of its passes a copy for each version that may still be checked (`learner.training.trainer`). What comes
and goes within an update is an estimate and says so; `tests/learner/placement/test_memory.py` holds all of it against a real
rank. Bytes are those of one card.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffers.errors import UnderstudyError
from configs.schema import CPU_KV_CACHE_GB, BufferConfig, LearnerConfig, RolloutConfig

# The sizes of a model, read from its config.json: no weights are read, and none need be there. transformers builds the model
# without memory (on the device `meta`), so that the counts are those of the model that will be loaded, whatever its
# architecture.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Counts of numbers, not of bytes."""

    parameters: int
    """All weights; tied ones count once."""
    outside_layers: int
    """Those outside of the decoder layers: embeddings, output matrix, last norm."""
    largest_layer: int
    layers: int
    hidden: int
    intermediate: int
    """Width of a layer's feed-forward part; of experts, those that a token uses together."""
    heads: int
    queries: int
    """Width of all query heads together."""
    kv_heads: int
    keys: int
    """Width of all key heads together; that of the values is the same."""
    vocabulary: int
    linear_features: int
    """Input and output widths of all linear layers that LoRA adapts, added: an adapter of rank r has r times so many weights."""

    def cache_bytes(self, *, tensor_parallel: int, bytes_each: int) -> int:
        """KV cache of one token on one of the engine's cards. Heads that cannot be divided any more are on several."""
        if not self.kv_heads:
            return 0
        heads = max(1, self.kv_heads // tensor_parallel)
        return 2 * self.layers * (self.keys // self.kv_heads) * heads * bytes_each


def read_shape(folder: Path, *, trust_remote_code: bool = False) -> ModelShape:
    """Raises UnderstudyError for a folder without a config.json that transformers knows."""
    if folder.suffix != ".gguf" and not (folder / "config.json").is_file():
        raise UnderstudyError(
            f"model.path must name a folder with a config.json, got {folder} without one; name one that has it, or a model of "
            f"the Hugging Face hub (OWNER/NAME)"
        )
    import torch
    from torch import nn

    from learner.model.layers import experts_per_token, heads_of, layers_of, told
    from learner.model.load import model_of

    try:
        with torch.device("meta"):
            lm: Any = model_of(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise UnderstudyError(
                f"model.trust_remote_code must be true for {folder}, whose config names code of its own, got false; read it, "
                f"then set model.trust_remote_code=true"
            ) from error
        raise UnderstudyError(
            f"model.path must name a model that transformers knows, got {folder}: {' '.join(str(error).split())[:300]}"
        ) from error
    text = lm.config.get_text_config()
    layers = layers_of(lm)
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    parameters = sum(weight.numel() for weight in lm.parameters())
    head = lm.get_output_embeddings()
    adapted = [module for module in lm.modules() if isinstance(module, nn.Linear) and module is not head]
    heads = heads_of(text)
    experts = experts_per_token(text)
    wide = (
        (told(text, "moe_intermediate_size") if experts else None)
        or told(text, "intermediate_size")
        or 4 * text.hidden_size
    )
    intermediate = (experts or 1) * (max(wide) if isinstance(wide, list) else wide)
    return ModelShape(
        parameters=parameters,
        outside_layers=parameters - sum(sizes),
        largest_layer=max(sizes),
        layers=len(layers),
        hidden=text.hidden_size,
        intermediate=intermediate,
        heads=heads.queries,
        queries=heads.queries * heads.width,
        kv_heads=heads.keys,
        keys=heads.keys * heads.width,
        vocabulary=text.vocab_size,
        linear_features=sum(module.in_features + module.out_features for module in adapted),
    )


BYTES = {"float32": 4, "bfloat16": 2}
MASTER = 4
"""Bytes of a float32 number: the learner's weights, gradients and moments, whatever its passes compute in."""
LOGITS_AT_ONCE = 2**26
"""Logits in one part of a pack, as `learner.model.policy` has it."""
LOGIT_COPIES = 2
"""float32 arrays of that size that live at once: logits and their gradient."""
GATHERED = 6
"""Gathered keys for each token of `learner.token_budget`, at most, as `learner.training.tree_packing` has it."""
CUDA_BYTES = 2**30
"""CUDA's context and NCCL's buffers in a process."""
ENGINE_BYTES = 2 * 2**30
"""vLLM beside weights and cache: context, CUDA graphs, buffers of its sampler."""
BATCHED_TOKENS = 8192
"""Tokens of one engine step, where `rollout.engine_args` says nothing (vLLM's own for large cards)."""
ASLEEP_BYTES = 2 * 2**30
"""What an engine that sleeps keeps of a card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One kind of memory on a card."""

    name: str
    size: int
    is_estimate: bool = False
    stays: bool = True
    """It is there between steps too; else within an update only."""


def total(items: Iterable[Item], *, certain: bool = False) -> int:
    """Bytes of all of them; `certain`: of those that are no estimates."""
    return sum(item.size for item in items if not (certain and item.is_estimate))


def adapter_weights(shape: ModelShape, learner: LearnerConfig) -> int:
    """Weights of a LoRA adapter on all linear layers; 0 without one."""
    return learner.lora.rank * shape.linear_features


def trained_weights(shape: ModelShape, learner: LearnerConfig) -> int:
    """Weights of the policy that have a gradient."""
    head = shape.hidden + 1 if _critic(learner) == "shared" else 0
    return head + (adapter_weights(shape, learner) if learner.lora.rank else shape.parameters)


def _critic(learner: LearnerConfig) -> str:
    return learner.critic if learner.advantage == "gae" else "none"


def of_rank(
    shape: ModelShape,
    learner: LearnerConfig,
    *,
    dtype: str,
    buffer: BufferConfig,
    longest_row: int,
    on_gpu: bool,
    policies: int = 1,
) -> list[Item]:
    """What one of `learner.ranks` holds during an update, which is when it holds most. `policies`: adapters that it trains, with
    `learner.lora.per_role` one for each role."""
    ranks, trained = learner.ranks, trained_weights(shape, learner)
    whole = shape.parameters + adapter_weights(shape, learner)
    head = shape.hidden + 1 if _critic(learner) == "shared" else 0
    items = [
        Item(name="weights, float32", size=MASTER * (whole + head) // ranks),
        Item(name="gradients, float32", size=MASTER * trained // ranks, stays=False),
    ]
    if learner.teacher.path:
        size = MASTER * shape.parameters // ranks
        items.append(Item(name="teacher, as large as the policy", size=size, is_estimate=True))
    if _critic(learner) == "separate":
        items += [
            Item(name="critic: weights, float32", size=MASTER * (whole + shape.hidden + 1) // ranks),
            Item(name="critic: gradients", size=MASTER * _moved(shape, learner) // ranks, stays=False),
        ]
    items += [
        item
        for item, is_away in _movable(shape, learner, dtype=dtype, buffer=buffer, policies=policies)
        if not (is_away and on_gpu)
    ]
    models = 2 if _critic(learner) == "separate" else 1
    each = BYTES[dtype]
    tokens = max(learner.token_budget, longest_row)
    # On a CPU states between layers are float32, see `learner.model.engine_rounding`.
    wide = each if on_gpu else MASTER
    shared = models * tree_keys(shape, learner, tokens=tokens, each=each)
    kept, one = (models * size for size in activations(shape, learner, tokens=tokens, each=each, states=wide))
    if not on_gpu and dtype == "float32":  # its products copy an operand that lies the other way
        one += tokens * shape.intermediate * each
    logits = LOGIT_COPIES * MASTER * min(LOGITS_AT_ONCE, tokens * shape.vocabulary)
    backward = [
        _passing(f"activations of {tokens} tokens", kept),
        *([_passing("keys and values of shared prefixes, at most", shared)] if learner.prefix_tree else []),
        _passing("logits, or later one layer's backward pass", max(logits, one)),
    ]
    end = []
    if ranks > 1 or dtype != "float32":  # else it is not sharded
        backward.append(_passing("layers gathered for a pass", gathered(shape, learner, each=each)))
        end.append(_passing("gradients of what is outside of the layers", gathered_at_end(shape, learner, each=each)))
    return [
        *items,
        *max(backward, end, key=total),
        *([Item(name="CUDA and NCCL", size=CUDA_BYTES, is_estimate=True)] if on_gpu else []),
    ]


def on_host(
    shape: ModelShape, learner: LearnerConfig, *, dtype: str, buffer: BufferConfig, policies: int = 1
) -> list[Item]:
    """What one of `learner.ranks` on a card keeps in the host's memory. `policies`: see `of_rank`."""
    movable = _movable(shape, learner, dtype=dtype, buffer=buffer, policies=policies)
    return [item for item, is_away in movable if is_away]


def _movable(
    shape: ModelShape, learner: LearnerConfig, *, dtype: str, buffer: BufferConfig, policies: int
) -> Iterator[tuple[Item, bool]]:
    """What a rank keeps between steps and may keep on the host, with whether it is to."""
    ranks, trained = learner.ranks, trained_weights(shape, learner)
    copy = BYTES[dtype] * trained * policies
    if policies > 1:
        size = MASTER * trained * (policies - 1) // ranks
        yield Item(name=f"adapters of {policies - 1} more roles, float32", size=size), learner.keep_on == "host"
    both = policies * trained + (_moved(shape, learner) if _critic(learner) == "separate" else 0)
    yield Item(name="optimizer (AdamW)", size=2 * MASTER * both // ranks), learner.offload
    if learner.check_logprobs and (lag := buffer.max_policy_lag):
        name = f"versions kept (buffer.max_policy_lag={lag}), {dtype}"
        yield Item(name=name, size=copy * lag // ranks), learner.keep_on == "host"
    if learner.kl.coef > 0:
        yield Item(name=f"reference (learner.kl.coef), {dtype}", size=copy // ranks), learner.keep_on == "host"


def _moved(shape: ModelShape, learner: LearnerConfig) -> int:
    """Weights of a separate critic that have a gradient."""
    return shape.hidden + 1 + (adapter_weights(shape, learner) if learner.lora.rank else shape.parameters)


def _passing(name: str, size: int) -> Item:
    return Item(name=name, size=size, is_estimate=True, stays=False)


def activations(shape: ModelShape, learner: LearnerConfig, *, tokens: int, each: int, states: int) -> tuple[int, int]:
    """What the forward pass of one pack leaves for its backward pass, and what this takes beside it for one layer. `each`: bytes of
    a number, `states`: of one of the states between layers.

    The coefficients are what autograd saves in a layer of Qwen3, counted with `torch.autograd.graph.saved_tensors_hooks`: four
    arrays as wide as the states and two in float32, four as wide as the feed-forward part, and those of queries, keys and
    values. With checkpointing: the states before each layer; and one layer computed again, with half as much in gradients
    (measured).
    """
    layer: float = shape.hidden * (2 * each + 2 * states + 8) + shape.intermediate * 4 * each
    layer += shape.queries * (4 * each + 4.5) + shape.keys * (3 * each + 4.25)
    if learner.gradient_checkpointing:
        return tokens * shape.layers * shape.hidden * states, int(tokens * 1.5 * layer)
    return int(tokens * shape.layers * layer), int(tokens * layer)


def tree_keys(shape: ModelShape, learner: LearnerConfig, *, tokens: int, each: int) -> int:
    """What a pack of the prefix tree gathers for its segments, which autograd keeps: in each layer, or with checkpointing in
    the one that is computed again; and the gradients of one layer's. As much as the planner allows; rows that share little
    gather less."""
    layers = 1 if learner.gradient_checkpointing else shape.layers
    return GATHERED * tokens * 2 * shape.keys * each * (layers + 1)


def gathered(shape: ModelShape, learner: LearnerConfig, *, each: int) -> int:
    """Whole parameters within a backward pass: what is outside of the layers, with its gradients, which are complete at the end
    only; two layers; and one layer's gradients, also in float32."""
    weights = each * (shape.outside_layers + 2 * shape.largest_layer)
    if learner.lora.rank:
        return weights
    return weights + each * shape.outside_layers + (each + MASTER) * shape.largest_layer


def gathered_at_end(shape: ModelShape, learner: LearnerConfig, *, each: int) -> int:
    """Whole parameters after the layers' backward pass: what is outside of them, its gradients, and these in float32."""
    if learner.lora.rank:
        return each * shape.outside_layers
    return (2 * each + MASTER) * shape.outside_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """What an engine takes of each of its cards."""

    items: list[Item]
    cache_tokens: int | None
    """Tokens that the KV cache holds, of the whole engine; below 0: not even the weights have room. None: there is no attention."""


def of_engine(
    shape: ModelShape,
    rollout: RolloutConfig,
    *,
    dtype: str,
    card: int | None,
    share: float,
    adapter: int = 0,
    versions: int = 1,
) -> EngineMemory:
    """`card`: bytes of the memory of each of its cards, of which it takes `share`; None: a CPU. `adapter`: weights of
    one version of a LoRA adapter, of which it has room for `versions`."""
    each, many = BYTES[dtype], rollout.tensor_parallel
    weights = each * shape.parameters // many
    token = shape.cache_bytes(tensor_parallel=many, bytes_each=each)
    items = [Item(name=f"weights, {dtype}", size=weights)]
    if adapter:
        items.append(
            Item(name=f"adapter, {versions} versions", size=each * adapter * versions // many, is_estimate=True)
        )
    if card is not None:
        tokens = int(rollout.engine_args.get("max_num_batched_tokens") or BATCHED_TOKENS)
        working = ENGINE_BYTES + each * tokens * (4 * shape.hidden + 3 * shape.intermediate // many)
        items.append(Item(name=f"CUDA, graphs, {tokens} tokens at once", size=working, is_estimate=True))
    if rollout.kv_cache_gb is not None or card is None:
        cache = int((rollout.kv_cache_gb or CPU_KV_CACHE_GB) * 2**30)
    else:
        cache = int(share * card) - total(items)
    items.append(
        Item(name="KV cache", size=max(cache, 0), is_estimate=rollout.kv_cache_gb is None and card is not None)
    )
    return EngineMemory(items=items, cache_tokens=cache // token if token else None)
