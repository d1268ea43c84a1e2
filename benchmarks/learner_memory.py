"""What a rank of the learner takes: one of two beside one alone, and six shapes beside what `--dry-run` says of them.

Called by `benchmarks.learner`; and, where it is asked for, a row as long as Qwen3's context. Each rank is a process of its own
(`benchmarks.processes.memory_side`), and its figure the most that it ever held, without what the interpreter and torch hold before
there is a model. It judges nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.processes.learner_side import MIB
from configs.schema import BufferConfig, LearnerConfig
from configs.tiny_model import VOCAB_SIZE, make_tiny_model
from learner.placement.memory import Item, of_rank, total
from learner.placement.model_shape import read_shape

GRPO = {"advantage": "grpo", "critic": "none", "minibatches": 1, "prefix_tree": False}
"""Its rows share nothing; what a tree of rows gathers is a bound, and no prediction."""
LARGE = {"hidden": 1024, "layers": 24, "heads": 16, "kv_heads": 8, "ffn": 3072}
"""0.3B weights: 24 of the layers of Qwen3-0.6B, whose vocabulary would be a third more."""
SMALL = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 1536}


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
    "wide": Shape(model={**SMALL, "hidden": 1024, "layers": 3, "heads": 16, "ffn": 4096}),
    "deep": Shape(model={**SMALL, "layers": 16}),
    "tokens": Shape(model=SMALL, lengths=(512,) * 8),
    "versions": Shape(model=SMALL, lag=2, learner={"kl": {"coef": 0.01}}),
    "checkpointing": Shape(model=SMALL, lengths=(512,) * 8, learner={"gradient_checkpointing": True}),
    "adapter": Shape(model=SMALL, lengths=(512,) * 8, learner={"lora": {"rank": 16}}),
}

QWEN3_06B = {"hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "ffn": 3072}
QWEN3_VOCABULARY = 151_936
LONG = Shape(
    model=QWEN3_06B, lengths=(32_768, 64), first=(64, 64), dtype="bfloat16", learner={"gradient_checkpointing": True}
)
"""A row as long as Qwen3's context. The row beside it has another score, so that both are trained; the first step is of short rows,
after which AdamW has its moments."""


class Ranks:
    """Starts ranks, and reads what they took. `run_to_end`: runs commands side by side; `address`: a free one."""

    def __init__(
        self, folder: Path, *, run_to_end: Callable[..., None], address: Callable[[], str], device: str = "cpu"
    ) -> None:
        self._folder = folder
        self._device = device
        self._run_to_end = run_to_end
        self._address = address

    def peaks(
        self, name: str, shape: Shape, *, model: Path, ranks: int = 1, threads: int = 1
    ) -> list[dict[str, float]]:
        """The figures of each rank."""
        out, where = self._folder / f"{name}-{ranks}.json", self._address()
        learner = json.dumps(_learner(shape))
        shared = ["--model", model, "--out", out, "--address", where, "--learner", learner, "--dtype", shape.dtype]
        shared += ["--threads", threads, "--first", *(shape.first or shape.lengths)]
        shared += ["--lengths", *shape.lengths, "--lag", shape.lag, "--vocabulary", VOCAB_SIZE, "--world-size", ranks]
        shared += ["--device", self._device]
        own = [sys.executable, "-m", "benchmarks.processes.memory_side", *map(str, shared)]
        self._run_to_end([[*own, "--rank", str(rank)] for rank in range(ranks)], log=self._folder / name)
        return [json.loads(Path(f"{out}.{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]


def _learner(shape: Shape) -> dict[str, Any]:
    """Its keys. One pack has all rows, where the shape says nothing else."""
    return {**GRPO, "token_budget": sum(shape.lengths), **shape.learner}


def predicted_mb(shape: Shape, *, model: Path) -> float:
    """What `--dry-run` says of a rank on a CPU."""
    return total(predicted_items(shape, model=model, on_gpu=False)) / MIB


def predicted_items(shape: Shape, *, model: Path, on_gpu: bool) -> list[Item]:
    """The same, item by item."""
    buffer = BufferConfig(max_policy_lag=shape.lag)
    rank = {"dtype": shape.dtype, "buffer": buffer, "longest_row": max(shape.lengths), "on_gpu": on_gpu}
    return of_rank(read_shape(model), LearnerConfig(**_learner(shape)), **rank)


def measure_memory(ranks: Ranks, *, folder: Path) -> dict[str, Any]:
    """`rank_peak_share`, `predicted_peak_error` (the largest of the shapes), and all figures that they come from."""
    large = Shape(model=LARGE, lengths=(64, 64))
    model = make_tiny_model(folder / "large", **large.model)
    alone, both = (ranks.peaks("large", large, model=model, ranks=many) for many in (1, 2))
    share = max(one["peak_mb"] for one in both) / alone[0]["peak_mb"]
    found: dict[str, Any] = {"rank_peak_share": share, "rank_alone_mb": alone[0], "rank_of_two_mb": both}
    print(f"a rank of two takes {share:.3f} of one alone ({alone[0]['peak_mb']:.0f} MB)", flush=True)
    errors = {}
    for name, shape in SHAPES.items():
        model = make_tiny_model(folder / name, **shape.model)
        took, said = ranks.peaks(name, shape, model=model)[0]["peak_mb"], predicted_mb(shape, model=model)
        errors[name] = {"took_mb": took, "predicted_mb": said, "error": said / took - 1.0}
        print(f"{name:>14}: took {took:.0f} MB, predicted {said:.0f}, {said / took - 1.0:+.1%}", flush=True)
    return found | {"predicted_peak_error": max(abs(one["error"]) for one in errors.values()), "shapes": errors}


def measure_long_row(ranks: Ranks, *, folder: Path) -> dict[str, Any]:
    """`long_row_error`, of the peak that is predicted for a row of 32,768 tokens of a model of Qwen3-0.6B's sizes, and what the
    step took. Both cores for more than an hour, and 16 GB."""
    model = make_tiny_model(folder / "long", **{**QWEN3_06B, "hidden": 64, "layers": 1})  # for its tokenizer
    sizes: dict[str, Any] = {"vocab_size": QWEN3_VOCABULARY, "head_dim": 128, "max_position_embeddings": 40_960}
    names = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
    names |= {"kv_heads": "num_key_value_heads", "ffn": "intermediate_size"}
    sizes |= {names[name]: value for name, value in QWEN3_06B.items()}
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).save_pretrained(model)
    (took,) = ranks.peaks("long", LONG, model=model, threads=2)
    said = predicted_mb(LONG, model=model)
    error = said / took["peak_mb"] - 1.0
    print(f"a row of {max(LONG.lengths)} tokens: {took}, predicted {said:.0f} MB, {error:+.1%}", flush=True)
    return {"long_row_error": error, "long_row_predicted_mb": said, "long_row": took}
