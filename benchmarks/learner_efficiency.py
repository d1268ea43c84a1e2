"""How much of a processor's matrix-product rate an update reaches, and what of a training step is neither pass nor update.

Called by `benchmarks.learner`: rows of 2,048 tokens that share nothing, and models of 0.1 billion random weights, on one thread.
`mfu_cpu`: useful operations of the update's forward and backward passes over their time, divided by the rate of a square matrix
product in the same process, measured before each step; `outside_share`: the part of a step that is in no pass (making sequences and
advantages, clipping, AdamW). Both are of layers as wide as Qwen3-1.7B's, where attention is 8 % of the operations;
`mfu_cpu_narrow` is of Qwen3-0.6B's, where it is 21 %, and its backward pass computes the scores again, which are not counted twice.
Medians of the steps. It judges nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.processes.learner_side import Rows
from configs.tiny_model import VOCAB_SIZE, make_tiny_model

WIDE: dict[str, Any] = {"hidden": 2048, "layers": 2, "heads": 16, "kv_heads": 8, "ffn": 6144}
NARROW: dict[str, Any] = {"hidden": 1024, "layers": 10, "heads": 16, "kv_heads": 8, "ffn": 3072}
LENGTH, ROWS = 2048, 2


def measure_efficiency(
    run: Callable[[list[list[str]]], None], *, folder: Path, address: str, repeats: int
) -> dict[str, Any]:
    """The figures, under the names that the benchmark writes. `run` starts a command and waits for its end."""
    rng = np.random.default_rng(0)
    mask = np.tile((np.arange(LENGTH) >= LENGTH // 2).astype(np.uint8), ROWS)
    rows = Rows(
        ids=rng.integers(0, VOCAB_SIZE, ROWS * LENGTH).astype(np.int32), mask=mask, lengths=np.full(ROWS, LENGTH),
        prompts=np.full(ROWS, LENGTH // 2), scores=np.arange(ROWS, dtype=np.float32), groups=np.zeros(ROWS, dtype=np.int64),
    )  # fmt: skip
    rows.write(folder / "efficiency_rows.npz")
    found = {}
    for name, shape in {"wide": WIDE, "narrow": NARROW}.items():
        model, out = make_tiny_model(folder / name, **shape), folder / f"{name}.json"
        words = ["--rows", folder / "efficiency_rows.npz", "--model", model, "--out", out, "--address", address]
        words += ["--steps", repeats]
        run([[sys.executable, "-m", "benchmarks.processes.efficiency_side", *map(str, words)]])
        found[name] = json.loads(out.read_text(encoding="utf-8"))
    mfu = {
        name: median(of["flops"] / step["update_passes_s"] / step["matmul_rate"] for step in of["steps"])
        for name, of in found.items()
    }
    outside = median(1.0 - step["passes_s"] / step["step_s"] for step in found["wide"]["steps"])
    print(
        f"efficiency: {mfu['wide']:.3f} of the matrix-product rate, {mfu['narrow']:.3f} with narrow layers; {outside:.3f} of a "
        f"step outside",
        flush=True,
    )
    return {
        "mfu_cpu": mfu["wide"],
        "mfu_cpu_narrow": mfu["narrow"],
        "outside_share": outside,
        "efficiency_steps": {name: of["steps"] for name, of in found.items()},
    }
