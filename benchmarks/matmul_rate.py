"""What a machine can do at most, and what an update of a Qwen3-like model asks of it, in floating-point operations.

Used by `benchmarks.learner` for the share of the matrix-product rate. Invariant: only what the mathematics needs is counted:
no padding, no layer computed twice, no pass without gradient, and half of each attention square.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import torch

SIDES = {"cuda": 8192, "cpu": 1024}
REPEATS = 10


def matmul_rate(*, device: str, dtype: str) -> float:
    """FLOP/s of a square matrix product in `dtype`, the median of REPEATS. On one thread on a CPU."""
    side = SIDES[device.split(":")[0]]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = (torch.randn(side, side, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
        seconds = []
        for _ in range(REPEATS + 2):
            began = time.perf_counter()
            a @ b
            if a.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return 2.0 * side**3 / median(seconds[2:])


def update_flops(
    lengths: np.ndarray,
    *,
    trained: int,
    vocabulary: int,
    hidden: int,
    layers: int,
    ffn: int,
    heads: int,
    kv_heads: int,
) -> float:
    """Forward and backward pass (3 times the forward) over rows of these lengths; 2 operations per weight and token.

    The output matrix is applied at `trained` positions only.
    """
    width = hidden // heads
    weights = hidden * (2 * heads + 2 * kv_heads) * width + 3 * hidden * ffn
    attention = 2.0 * heads * width * float((lengths.astype(np.float64) ** 2).sum())
    forward = layers * (2.0 * weights * float(lengths.sum()) + attention) + 2.0 * hidden * vocabulary * trained
    return 3.0 * forward
