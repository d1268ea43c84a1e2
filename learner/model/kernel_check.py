"""Whether the attention of packed rows is in half precision what it is in float32: two branches of a stem, forward and backward.

Called by `learner.training.trainer` where passes are in half precision: `learner.training.layout` has compared rows in float32. On
a GPU another kernel does it then, and one aligns queries with the end of their keys or with the start; where it is the wrong one,
branches see too little and nothing else goes wrong.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from learner.model.layers import heads_of
from learner.model.micro_batch import Paths
from learner.model.packed_attention import packed_attention

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
