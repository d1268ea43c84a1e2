"""Causal attention over rows that lie one after another in one sequence: no row sees another, and nothing is padded.

Registered with transformers under the name `PACKED` and used by `learner.model.policy` for every model. A model hands
over what transformers calls `cu_seq_lens_q` and `max_length_q`: where segments start, and the longest. A segment is a row, or with
`paths` a part of rows that share what is before it: keys and values of its path are gathered, and its last query sees all of
them. Invariant: a row's result is that of the row alone (up to rounding). On a GPU in half precision one kernel does all
segments; elsewhere each is its own call, at the cost of its own length times that of its path. No dropout: the engine samples
without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from learner.model.layers import heads_of

# What one forward pass of one rank takes: rows beside one another, which may continue stems, or tokens that lie one after
# another and whom each attends to. Invariant: every place predicts at most one token.


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The keys of each of n segments, by their places in the pack: those of its ancestors, then its own."""

    places: Tensor
    """[P] int64."""
    starts: Tensor
    """[n + 1] int32: where the path of each segment starts in `places`, and P."""
    longest: int
    """Places of the longest path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """How T tokens one after another are divided. In a segment positions count on by one; without `paths` it is a whole row and
    attends to itself, with them to its own path: everything from the first token of its rows up to its own end."""

    positions: Tensor
    """[1, T] int64: place of each token in its row."""
    starts: Tensor
    """[n + 1] int32: where each segment starts, and T."""
    longest: int
    """Tokens of the longest segment."""
    paths: Paths | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stems:
    """k beginnings of S tokens each, which several rows have in common."""

    ids: Tensor
    """[k, S] int64."""
    of_rows: Tensor
    """[b] int64: the stem that each row continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """b rows of L places behind k * S of stems, m trained tokens of whole rows at u places."""

    ids: Tensor
    """[b, L] int64. With `segments` b is 1; without, the shorter rows are filled up on the right with any token: what comes after
    a token is nothing to it."""
    segments: Segments | None
    before: Tensor
    """[u] int64: the places, of k * S and then b * L, whose states predict trained tokens, each once."""
    tokens: Tensor
    """[u] int64: the tokens that these predict."""
    shared: Tensor | None
    """[m] int64: which of the u predictions is that of each trained token; None: each has its own, in order."""
    index: Tensor
    """[m] int64: place of each trained token in the batch's flat arrays, row by row."""
    stems: Stems | None = None
    """What the rows of `ids` continue; None: they are whole."""
    experts: Tensor | None = None
    """[places, layers, K] int32: the experts that the engine used at each of k * S and then b * L places; see
    `buffers.records.Row`. None: nobody knows any."""
    real: Tensor | None = None
    """[places] bool: false where a row is filled up; None: nowhere."""


PACKED = "packed_rows"
HALF = (torch.float16, torch.bfloat16)
MASKED_AT_ONCE = 512
"""Queries of one call with a mask: half of them, in the mean, is what a query computes beyond what it sees."""
UNKNOWN = ("softcap", "s_aux", "position_bias")
"""What some models ask of attention beside the causal mask, and this does not do: their rows are not packed."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    paths: Paths | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, G, T, D] -> [1, T, H, D]. H is a multiple of G; starts [n + 1] int32.

    Raises ValueError for a model that needs what this attention cannot do.
    """
    wanted = [name for name in UNKNOWN if others.get(name) is not None]
    if wanted or attention_mask is not None:
        raise ValueError(f"{type(module).__name__} attends with {', '.join(wanted) or 'a mask of its own'}")
    query, key = (
        query.to(value.dtype),
        key.to(value.dtype),
    )  # `learner.model.engine_rounding` leaves this rounding to us
    rows, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    seen, most = cu_seq_lens_q, max_length_q
    if paths is not None:
        keys, values = (_gathered(states, places=paths.places) for states in (keys, values))
        seen, most = paths.starts, paths.longest
    if has_kernel(query):
        window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
        options: dict[str, Any] = {"scale": scaling, "window_size": window, **_grouping(varlen_attn)}
        return varlen_attn(rows, keys, values, cu_seq_lens_q, seen, max_length_q, most, **options)[None], None
    if value.dtype in HALF:  # rounded once, at the end, as in vLLM's kernels
        rows, keys, values = (states.float() for states in (rows, keys, values))
    parts = [rows.split(cu_seq_lens_q.diff().tolist())]
    parts += [states.split(seen.diff().tolist()) for states in (keys, values)]
    done = [_segment_attention(*part, scaling=scaling, window=sliding_window) for part in zip(*parts)]
    return torch.cat(done)[None].to(value.dtype), None


def has_kernel(query: Tensor) -> bool:
    """Whether torch has one kernel for all segments here."""
    return bool(query.is_cuda and query.dtype in HALF)


@cache
def _grouping(kernel: Callable[..., Any]) -> dict[str, bool]:
    """torch 2.13 wants to be told of fewer heads of keys than of queries; 2.11 takes them as they are and has no such argument."""
    return {"enable_gqa": True} if "enable_gqa" in signature(kernel).parameters else {}


def _gathered(states: Tensor, *, places: Tensor) -> Tensor:
    """[T, G, D] -> [P, G, D]. As an embedding: what the branches of a place ask for is added up in a fixed order, in float32 on a
    GPU."""
    return functional.embedding(places, states.flatten(1)).unflatten(1, states.shape[1:])


def _segment_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None
) -> Tensor:
    """query [L, H, D], key and value [K, G, D] of its path -> [L, H, D]; the last query sees all keys.

    `window`: how many tokens a token sees, itself included (None: all before it).
    """
    query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
    length, ahead = query.shape[2], key.shape[2] - query.shape[2]
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": True}
    if not ahead and (window is None or window >= length):
        done = functional.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
        return done[0].transpose(0, 1)
    parts = []
    for start in range(0, length, MASKED_AT_ONCE):
        end = min(start + MASKED_AT_ONCE, length)
        first = 0 if window is None else max(0, ahead + start - window + 1)
        seen = slice(first, ahead + end)
        mask = torch.ones(end - start, ahead + end - first, dtype=torch.bool, device=query.device)
        mask = mask.tril(ahead + start - first)
        if window is not None:
            mask = mask.triu(ahead + start - first - window + 1)
        own = query[:, :, start:end], key[:, :, seen], value[:, :, seen]
        parts.append(functional.scaled_dot_product_attention(*own, attn_mask=mask, **options))
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


AttentionInterface.register(PACKED, packed_attention)


# Whether the attention of packed rows is in half precision what it is in float32: two branches of a stem, forward and backward.
# On a GPU another kernel does it then, and one aligns queries with the end of their keys or with the start; where it is the
# wrong one, branches see too little and nothing else goes wrong.

MOST = 0.1
"""Largest difference, relative to the largest entry: far above rounding, far below that of a branch that sees one token fewer."""
STEM, BRANCHES = 5, (4, 3)
WINDOW = 4


def check_kernel(config: Any, *, device: torch.device, dtype: torch.dtype) -> None:
    """Heads as the model of this configuration has them, with and without a window. Raises ValueError."""
    queries, keys, width = heads_of(config.get_text_config())
    size = STEM + sum(BRANCHES)
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, many, size, width, generator=generator).to(device, dtype) for many in (queries, keys, keys)
    ]
    for window in (None, WINDOW):
        half, wide = (_pass([each.to(one) for each in states], window=window) for one in (dtype, torch.float32))
        for found, expected in zip(half, wide):
            difference = float((found.float() - expected).abs().max() / expected.abs().max())
            if not difference <= MOST:
                raise ValueError(
                    f"the attention kernel for {dtype} on {device} must give two branches of a row what float32 gives them, and "
                    f"differs by {difference:.1e} of the largest entry; set model.dtype=float32, or train on another device"
                )


def _pass(states: list[Tensor], *, window: int | None) -> list[Tensor]:
    """What two branches of a stem attend to, and the gradients of a weighted sum of it at query, key and value."""
    device = states[0].device
    query, key, value = leaves = [each.detach().requires_grad_() for each in states]
    forks = (0, STEM, STEM + BRANCHES[0], STEM + sum(BRANCHES))
    stem, *own = (torch.arange(start, end, device=device) for start, end in pairwise(forks))
    paths = [stem, *(torch.cat([stem, branch]) for branch in own)]
    ends = torch.tensor([0, *map(len, paths)], device=device).cumsum(0).int()
    out = packed_attention(
        nn.Identity(),
        query,
        key,
        value,
        None,
        cu_seq_lens_q=torch.tensor(forks, dtype=torch.int32, device=device),
        max_length_q=max(STEM, *BRANCHES),
        paths=Paths(places=torch.cat(paths), starts=ends, longest=max(map(len, paths))),
        sliding_window=window,
    )[0]
    weights = torch.linspace(-1.0, 1.0, out.numel(), device=device).cos().view_as(out)
    return [out.detach(), *torch.autograd.grad((out.float() * weights).sum(), leaves)]
