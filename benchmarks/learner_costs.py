"""What a rank of the learner takes: one of two beside one alone, and six shapes beside what `--dry-run` says of them.

Called by `benchmarks.learner`; and, where it is asked for, a row as long as Qwen3's context. Each rank is a process of its own
(`rank_memory`), and its figure the most that it ever held (its resident set), from before the model is read to the end of the last
step, without what the interpreter and torch hold before there is a model. On a GPU the peak is that of torch's tensors there; what
torch reserved for them, and what the card has in use beside it (CUDA's context, NCCL), are reported too. It judges nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.harness import RUN_LIMIT_S, call
from benchmarks.learner_sides import GRPO, MIB, Rows, make_trainer, most_resident_mb, resident_mb
from configs.schema import BufferConfig, LearnerConfig
from configs.tiny_model import VOCAB_SIZE, make_tiny_model
from learner.model.layers import matmul_rate
from learner.placement.memory import Item, of_rank, read_shape, total
from learner.training.trainer import Trainer

LONG_ROW_LIMIT_S = 6 * 3600.0
METRICS = ("learner/mfu", "learner/tokens", "time/train_s", "time/prepare_s")
"""Of the last step."""
UNSHARED = {"advantage": "grpo", "critic": "none", "minibatches": 1, "prefix_tree": False}
"""Its rows share nothing; what a tree of rows gathers is a bound, and no prediction."""
LARGE_MODEL = {"hidden": 1024, "layers": 24, "heads": 16, "kv_heads": 8, "ffn": 3072}
"""0.3B weights: 24 of the layers of Qwen3-0.6B, whose vocabulary would be a third more."""
SMALL_MODEL = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 1536}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model, and how it is trained."""

    model: Mapping[str, int]
    learner: Mapping[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (256,) * 4
    first: tuple[int, ...] = ()
    """The rows of the first step, where they are others."""
    lag: int = 0
    dtype: str = "float32"


SHAPES = {
    "wide": Shape(model={**SMALL_MODEL, "hidden": 1024, "layers": 3, "heads": 16, "ffn": 4096}),
    "deep": Shape(model={**SMALL_MODEL, "layers": 16}),
    "tokens": Shape(model=SMALL_MODEL, lengths=(512,) * 8),
    "versions": Shape(model=SMALL_MODEL, lag=2, learner={"kl": {"coef": 0.01}}),
    "checkpointing": Shape(model=SMALL_MODEL, lengths=(512,) * 8, learner={"gradient_checkpointing": True}),
    "adapter": Shape(model=SMALL_MODEL, lengths=(512,) * 8, learner={"lora": {"rank": 16}}),
}

QWEN3_06B = {"hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "ffn": 3072}
QWEN3_VOCABULARY = 151_936
LONG = Shape(
    model=QWEN3_06B, lengths=(32_768, 64), first=(64, 64), dtype="bfloat16", learner={"gradient_checkpointing": True}
)
"""A row as long as Qwen3's context. The row beside it has another score, so that both are trained; the first step is of short rows,
after which AdamW has its moments."""


def made_up_rows(lengths: Sequence[int], *, seed: int) -> Rows:
    """Rows of these lengths, of each of which the second half was sampled."""
    rng, numbers = np.random.default_rng(seed), np.arange(len(lengths))
    masks = [np.arange(length) >= length // 2 for length in lengths]
    ids = [rng.integers(0, VOCAB_SIZE, length) for length in lengths]
    return Rows.of(ids, masks=masks, scores=numbers % 2, groups=numbers // 2)


def rank_memory(
    *, learner: dict[str, Any], lengths: list[int], first: list[int], lag: int, threads: int, device: str, **where: Any
) -> dict[str, float]:
    """One rank: a step on rows of the lengths `first`, then steps on the others."""
    torch.set_num_threads(threads)
    before = resident_mb()
    trainer = make_trainer(Trainer, learner, device=device, keep_versions=lag + 1, **where)
    figures = {"before_mb": before, "loaded_mb": resident_mb() - before, "loading_peak_mb": most_resident_mb() - before}
    for version in range(lag + 2):
        rows = made_up_rows(lengths if version else first, seed=version)
        began = time.monotonic()
        metrics = trainer.train_step(rows.batch(version=version), version=version)
        figures["step_s"] = time.monotonic() - began
    figures |= {name.partition("/")[2]: metrics[name] for name in METRICS}
    figures["peak_mb"] = most_resident_mb() - before
    if device.startswith("cuda"):
        free, whole = torch.cuda.mem_get_info()
        figures |= {
            "peak_mb": torch.cuda.max_memory_allocated() / MIB,
            "reserved_mb": torch.cuda.max_memory_reserved() / MIB,
            "beside_mb": (whole - free - torch.cuda.memory_reserved()) / MIB,
        }
    return figures


def peaks(
    shape: Shape,
    *,
    folder: Path,
    model: Path,
    ranks: int = 1,
    threads: int = 1,
    device: str = "cpu",
    limit_s: float = RUN_LIMIT_S,
) -> list[dict[str, float]]:
    """What each rank takes."""
    return call(
        rank_memory, folder=folder, ranks=ranks, limit_s=limit_s, model=model, learner=_learner(shape),
        lengths=shape.lengths, first=shape.first or shape.lengths, lag=shape.lag, threads=threads, device=device,
        dtype=shape.dtype,
    )  # fmt: skip


def _learner(shape: Shape) -> dict[str, Any]:
    """Its keys. One pack has all rows, where the shape says nothing else."""
    return {**UNSHARED, "token_budget": sum(shape.lengths), **shape.learner}


def predicted_mb(shape: Shape, *, model: Path) -> float:
    """What `--dry-run` says of a rank on a CPU."""
    return total(predicted_items(shape, model=model, on_gpu=False)) / MIB


def predicted_items(shape: Shape, *, model: Path, on_gpu: bool) -> list[Item]:
    """The same, item by item."""
    buffer = BufferConfig(max_policy_lag=shape.lag)
    rank = {"dtype": shape.dtype, "buffer": buffer, "longest_row": max(shape.lengths), "on_gpu": on_gpu}
    return of_rank(read_shape(model), LearnerConfig(**_learner(shape)), **rank)


def measure_memory(*, folder: Path) -> dict[str, Any]:
    """`rank_peak_share`, `predicted_peak_error` (the largest of the shapes), and all figures that they come from."""
    large = Shape(model=LARGE_MODEL, lengths=(64, 64))
    model = make_tiny_model(folder / "large", **large.model)
    alone, both = (peaks(large, folder=folder, model=model, ranks=many) for many in (1, 2))
    share = max(one["peak_mb"] for one in both) / alone[0]["peak_mb"]
    found: dict[str, Any] = {"rank_peak_share": share, "rank_alone_mb": alone[0], "rank_of_two_mb": both}
    print(f"a rank of two takes {share:.3f} of one alone ({alone[0]['peak_mb']:.0f} MB)", flush=True)
    errors = {}
    for name, shape in SHAPES.items():
        model = make_tiny_model(folder / name, **shape.model)
        took, said = peaks(shape, folder=folder, model=model)[0]["peak_mb"], predicted_mb(shape, model=model)
        errors[name] = {"took_mb": took, "predicted_mb": said, "error": said / took - 1.0}
        print(f"{name:>14}: took {took:.0f} MB, predicted {said:.0f}, {said / took - 1.0:+.1%}", flush=True)
    return found | {"predicted_peak_error": max(abs(one["error"]) for one in errors.values()), "shapes": errors}


def measure_long_row(*, folder: Path) -> dict[str, Any]:
    """`long_row_error`, of the peak that is predicted for a row of 32,768 tokens of a model of Qwen3-0.6B's sizes, and what the
    step took. Both cores for more than an hour, and 16 GB."""
    model = qwen3(folder / "long", QWEN3_06B, dtype="float32")
    (took,) = peaks(LONG, folder=folder, model=model, threads=2, limit_s=LONG_ROW_LIMIT_S)
    said = predicted_mb(LONG, model=model)
    error = said / took["peak_mb"] - 1.0
    print(f"a row of {max(LONG.lengths)} tokens: {took}, predicted {said:.0f} MB, {error:+.1%}", flush=True)
    return {"long_row_error": error, "long_row_predicted_mb": said, "long_row": took}


def qwen3(
    folder: Path, sizes: Mapping[str, int], *, device: str = "cpu", dtype: str = "bfloat16", seed: int = 0
) -> Path:
    """A model of random weights with Qwen3's vocabulary, made on the device: at 1.7B that is seconds in place of a minute."""
    make_tiny_model(folder, hidden=64, layers=1)  # for its tokenizer
    config = Qwen3Config(
        hidden_size=sizes["hidden"], num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"], intermediate_size=sizes["ffn"], vocab_size=QWEN3_VOCABULARY, head_dim=128,
        max_position_embeddings=40_960, tie_word_embeddings=True, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    del model
    if device != "cpu":
        torch.cuda.empty_cache()
    return folder


# How much of a processor's matrix-product rate an update reaches, and what of a training step is neither pass nor
# update. Called by `benchmarks.learner`: rows of 2,048 tokens that share nothing, and models of 0.1 billion random
# weights, on one thread. `mfu_cpu`: useful operations of the update's forward and backward passes over their time,
# divided by the rate of a square matrix product in the same process, measured before each step; `outside_share`: the
# part of a step that is in no pass (making sequences and advantages, clipping, AdamW). Both are of layers as wide as
# Qwen3-1.7B's, where attention is 8 % of the operations; `mfu_cpu_narrow` is of Qwen3-0.6B's, where it is 21 %, and its
# backward pass computes the scores again, which are not counted twice. Medians of the steps. It judges nothing.

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
