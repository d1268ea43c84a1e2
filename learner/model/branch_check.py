"""Whether attention over a tree of rows is that of the rows: two branches against their rows, forward and backward.

Called by `learner.training.trainer` when a model has been read, before anything is trained. A kernel aligns queries with the end of
their keys or with the start; where it is the wrong one, branches see too little and nothing else goes wrong. Invariant: it
changes nothing. The whole model is checked where it is, the kernel on the rank's own device in its own precision.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from learner.model.micro_batch import Paths
from learner.model.packed_attention import packed_attention
from learner.model.policy import hidden_states

MOST_DIFFERENCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest difference, relative to the largest entry: far above rounding, far below that of a branch that sees one token fewer."""
STEM, BRANCHES = 5, (4, 3)
WINDOW = 4


class _Pack(NamedTuple):
    """What a pass takes beside the tokens, and the stretches of it that belong to each row."""

    starts: list[int]
    longest: int
    paths: Paths | None


def check_branches(lm: Any) -> None:
    """The whole model on two branches of a stem. Raises ValueError for one whose states or gradients differ from the rows'."""
    device = next(lm.parameters()).device
    tree, rows, stretches = _packs(device)
    ids = torch.arange(STEM + sum(BRANCHES), device=device)
    flat = torch.cat([ids[stretch] for stretch in stretches])
    positions = torch.cat([torch.arange(len(stretch), device=device) for stretch in stretches])
    depths = torch.empty_like(ids)
    for stretch in stretches:
        depths[stretch] = torch.arange(len(stretch), device=device)
    one, slope = _model_pass(lm, ids, positions=depths, pack=tree, stretches=stretches)
    other, slopes = _model_pass(lm, flat, positions=positions, pack=rows, stretches=None)
    summed = torch.zeros_like(slope).index_add(0, torch.cat(stretches), slopes)
    for found, expected in ((one, other), (slope, summed)):
        _compare(found, expected=expected, dtype=torch.float32, what=f"the attention of {type(lm).__name__}")


def check_kernel(lm: Any, *, device: torch.device, dtype: torch.dtype) -> None:
    """The attention that the rank will use, for heads as the model has them, with and without a window. Raises ValueError."""
    config = lm.config.get_text_config()
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    tree, rows, stretches = _packs(device)
    generator = torch.Generator().manual_seed(0)
    size = STEM + sum(BRANCHES)
    states = [
        torch.randn(1, many, size, width, generator=generator).to(device, dtype) for many in (heads, groups, groups)
    ]
    flat = torch.cat(stretches)
    for window in (None, WINDOW):
        one, slopes = _kernel_pass(states, pack=tree, window=window, stretches=stretches)
        taken = [each[:, :, flat] for each in states]
        other, apart = _kernel_pass(taken, pack=rows, window=window, stretches=None)
        what = f"the attention kernel for {dtype} on {device}"
        _compare(one, expected=other, dtype=dtype, what=what)
        for found, slope in zip(slopes, apart):
            summed = torch.zeros_like(found, dtype=torch.float32).index_add(2, flat, slope.float())
            _compare(found.float(), expected=summed, dtype=dtype, what=what)


def _packs(device: torch.device) -> tuple[_Pack, _Pack, list[Tensor]]:
    """The tree, its rows one after another, and the places of each row in the tree."""
    stem = torch.arange(STEM, device=device)
    starts = [0, STEM, STEM + BRANCHES[0], STEM + sum(BRANCHES)]
    own = [torch.arange(start, end, device=device) for start, end in pairwise(starts[1:])]
    stretches = [torch.cat([stem, branch]) for branch in own]
    ends = torch.tensor([0, STEM, *(len(stretch) for stretch in stretches)], device=device).cumsum(0)
    longest = max(len(stretch) for stretch in stretches)
    paths = Paths(places=torch.cat([stem, *stretches]), starts=ends.int(), longest=longest)
    tree = _Pack(starts, max(STEM, *BRANCHES), paths)
    rows = _Pack([0, len(stretches[0]), len(stretches[0]) + len(stretches[1])], longest, None)
    return tree, rows, stretches


def _model_pass(
    lm: Any, ids: Tensor, *, positions: Tensor, pack: _Pack, stretches: list[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """States row by row, and the gradient of a weighted sum of them at the embedded tokens."""
    embedded: list[Tensor] = []

    def watch(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    hook = lm.get_input_embeddings().register_forward_hook(watch)
    try:
        starts = torch.tensor(pack.starts, dtype=torch.int32, device=ids.device)
        states = hidden_states(lm, ids, positions=positions, starts=starts, longest=pack.longest, paths=pack.paths)
    finally:
        hook.remove()
    told = states if stretches is None else torch.cat([states[stretch] for stretch in stretches])
    return told.detach(), torch.autograd.grad(_weighted(told), embedded)[0][0]


def _kernel_pass(
    states: list[Tensor], *, pack: _Pack, window: int | None, stretches: list[Tensor] | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    query, key, value = (each.detach().clone().requires_grad_() for each in states)
    starts = torch.tensor(pack.starts, dtype=torch.int32, device=states[0].device)
    options: dict[str, Any] = {"cu_seq_lens_q": starts, "max_length_q": pack.longest, "paths": pack.paths}
    out = packed_attention(nn.Identity(), query, key, value, None, **options, sliding_window=window)[0][0]
    told = out if stretches is None else torch.cat([out[stretch] for stretch in stretches])
    return told.detach().float(), torch.autograd.grad(_weighted(told), (query, key, value))


def _weighted(states: Tensor) -> Tensor:
    """A sum in which every entry has a weight of its own."""
    weights = torch.linspace(-1.0, 1.0, states.numel(), device=states.device, dtype=torch.float32)
    return (states.float().flatten() * weights.cos()).sum()


def _compare(found: Tensor, *, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= MOST_DIFFERENCE.get(dtype, MOST_DIFFERENCE[torch.float32]):
        raise ValueError(
            f"{what} must give two branches of a row what their rows have, and differs by {difference:.1e} of the largest "
            f"entry; set learner.prefix_tree=false, or train on another device"
        )
