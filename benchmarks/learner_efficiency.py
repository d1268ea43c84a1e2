"""How much of a processor's matrix-product rate an update reaches, and what of a training step is neither pass nor update.

Called by `benchmarks.learner`: rows of 2,048 tokens that share nothing, and models of 0.1 billion random weights, on one thread.
`mfu_cpu`: useful operations of the update's forward and backward passes over their time, divided by the rate of a square matrix
product in the same process, measured before each step; `outside_share`: the part of a step that is in no pass (making sequences and
advantages, clipping, AdamW). Both are of layers as wide as Qwen3-1.7B's, where attention is 8 % of the operations;
`mfu_cpu_narrow` is of Qwen3-0.6B's, where it is 21 %, and its backward pass computes the scores again, which are not counted twice.
Medians of the steps. It judges nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.harness import call
from benchmarks.learner_sides import GRPO, Rows, make_trainer
from configs.tiny_model import VOCAB_SIZE, make_tiny_model
from learner.model.layers import matmul_rate
from learner.training.trainer import Trainer

WIDE: dict[str, Any] = {"hidden": 2048, "layers": 2, "heads": 16, "kv_heads": 8, "ffn": 6144}
NARROW: dict[str, Any] = {"hidden": 1024, "layers": 10, "heads": 16, "kv_heads": 8, "ffn": 3072}
LENGTH, ROWS = 2048, 2


class ClockedTrainer(Trainer):
    """Its passes (calls of the policy, and backward passes) are timed; its steps are the product's."""

    passes_s = update_passes_s = 0.0

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same call; its time counts. No pass calls another."""

        def timed(*words: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*words, **named)
            finally:
                took = time.perf_counter() - began
                self.passes_s += took
                self.update_passes_s += took if torch.is_grad_enabled() else 0.0

        return timed


def clocked_steps(*, rows: str, steps: int, **where: Any) -> list[dict[str, float]]:
    """What each step but the first took; the rate of matrix products is measured before each."""
    torch.set_num_threads(1)
    given = Rows.read(rows)
    trainer = make_trainer(ClockedTrainer, GRPO | {"token_budget": int(given.lengths.max())}, **where)
    trainer._forward = trainer.timed(trainer._forward)  # type: ignore[method-assign]
    torch.Tensor.backward = trainer.timed(torch.Tensor.backward)  # type: ignore[method-assign]
    flops, taken = trainer._work.update_flops(**given.work), []
    for _ in range(steps + 1):
        matmul_rate.cache_clear()
        rate = matmul_rate(device="cpu", dtype="float32")
        trainer.passes_s = trainer.update_passes_s = 0.0
        began = time.perf_counter()
        trainer.train_step(given.batch(), version=0)
        took = {"step_s": time.perf_counter() - began, "passes_s": trainer.passes_s}
        taken.append({**took, "update_passes_s": trainer.update_passes_s, "matmul_rate": rate, "flops": flops})
    return taken[1:]


def measure_efficiency(*, folder: Path, repeats: int) -> dict[str, Any]:
    """The figures, under the names that the benchmark writes."""
    rng = np.random.default_rng(0)
    masks = [np.arange(LENGTH) >= LENGTH // 2] * ROWS
    ids = [rng.integers(0, VOCAB_SIZE, LENGTH) for _ in masks]
    rows = Rows.of(ids, masks=masks, scores=range(ROWS), groups=[0] * ROWS).write(folder / "efficiency.npz")
    found = {
        name: call(clocked_steps, folder=folder, rows=rows, steps=repeats, model=make_tiny_model(folder / name, **shape))[0]
        for name, shape in {"wide": WIDE, "narrow": NARROW}.items()
    }  # fmt: skip
    mfu = {
        name: median(step["flops"] / step["update_passes_s"] / step["matmul_rate"] for step in steps)
        for name, steps in found.items()
    }
    outside = median(1.0 - step["passes_s"] / step["step_s"] for step in found["wide"])
    return {
        "mfu_cpu": mfu["wide"], "mfu_cpu_narrow": mfu["narrow"], "outside_share": outside, "efficiency_steps": found,
    }  # fmt: skip
