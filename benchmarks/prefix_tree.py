"""What the learner's prefix tree saves, what it costs where nothing is shared, and that it changes no gradient.

A part of `benchmarks.learner`, which calls `measure_tree`. An update on a tree and one on packed rows are timed in turn in one
process; a figure is the quotient of the medians. Models that carry states continue stems, and else have their rows beside one
another (`tree_speedup_hybrid_...`). Rows are made up: `agent_rows` as an agent like Claude Code leaves them, scaled
down; `group_rows` one prompt with eight answers. `tree_vs_trl`: an update of TRL's on its own prefix trie, of agents' rows,
over ours, each side's median, in turn with it (`benchmarks/rivals/trl_tree_side.py` says what of TRL it is). It judges nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.families import make_family
from benchmarks.harness import call
from benchmarks.learner_sides import GRPO, Rows, make_trainer, stem_rows
from configs.tiny_model import VOCAB_SIZE, make_tiny_model
from learner.model.load import load_policy
from learner.model.policy import Policy
from learner.training.batch_tensors import BatchTensors, token_table
from learner.training.packing import Sequences
from learner.training.trainer import Before, Trainer
from learner.training.tree_packing import PrefixTree, TreeSequences

TRL_SIDE = Path(__file__).parent / "rivals" / "trl_tree_side.py"
EPISODES, BRANCHES = 8, 9
SYSTEM, TASK, ROUND, TAIL = 17_000, 400, 2_500, 400
"""Tokens of an agent's row: system prompt with the tools, the task, what a branch has more of the history than the one before it,
and what its own end has. Nine rows of 30,400 tokens in the mean, as a recorded episode of 24 rounds."""
MEDIUM: dict[str, Any] = {"hidden": 768, "layers": 12, "ffn": 1536, "heads": 12, "kv_heads": 6}
"""64 million weights in its layers."""
SMALL: dict[str, Any] = {"hidden": 128, "layers": 2, "ffn": 256, "heads": 4, "kv_heads": 2}
HEADS: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        **HEADS, "intermediate_size": 1536, "num_hidden_layers": 12,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 3,
    },
    "falcon_h1": {
        **HEADS, "intermediate_size": 1536, "num_hidden_layers": 8, "mamba_n_heads": 16, "mamba_d_head": 64,
        "mamba_d_ssm": 1024, "mamba_d_state": 64, "mamba_chunk_size": 128,
    },
}  # fmt: skip
"""Models of about 40 million weights whose layers carry states: a group's rows continue a stem."""
RANDOM_TREES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """Sizes of the rows: for CPUs, agents' rows are made shorter by `scale`."""

    scale: float = 96.0
    prompt: int = 2048
    answer: int = 256
    apart: int = 16
    """Rows that share nothing."""


def agent_rows(*, scale: float) -> Rows:
    """Eight episodes of nine branches: each has more of its episode's history than the one before, and an end of its own."""
    rng = np.random.default_rng(0)
    system, task, more, tail = (max(2, round(size / scale)) for size in (SYSTEM, TASK, ROUND, TAIL))
    shared, rows = _random(rng, system), []
    for _ in range(EPISODES):
        history = np.concatenate([shared, _random(rng, task + BRANCHES * more)])
        for branch in range(1, BRANCHES + 1):
            rows.append(np.concatenate([history[: system + task + branch * more], _random(rng, tail)]))
    masks = [np.arange(len(ids)) >= len(ids) - tail for ids in rows]
    return Rows.of(rows, masks=masks, scores=rng.integers(0, 2, len(rows)), groups=[0] * len(rows))


def group_rows(*, prompt: int, answer: int) -> Rows:
    """Eight answers to one prompt."""
    return stem_rows(groups=1, rows=8, stem=prompt, tails=(answer, answer), trained=1.0)


def apart_rows(*, num: int) -> Rows:
    """Rows of 64 to 256 tokens that share nothing."""
    return stem_rows(groups=num // 8, rows=8, stem=0, tails=(64, 256))


def _random(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, VOCAB_SIZE, size)


class TreeTrainer(Trainer):
    """Makes one update, by itself, in either way."""

    def timed_update(self, table: BatchTensors, *, prefix_tree: bool) -> tuple[float, float]:
        """Seconds of an update, from the rows to the new weights, the making of the tree too; and tokens of the rows over those
        computed."""
        nothing = torch.zeros_like(table.behaviour)
        before = Before(table.behaviour, nothing, nothing, nothing)
        self._wait()
        began = time.perf_counter()
        layout = replace(self.layout, shares=prefix_tree)
        laid_out = replace(table, sequences=self._laid_out(table.sequences, table=table, layout=layout))
        self._learn(laid_out, before=before)
        self._wait()
        return time.perf_counter() - began, laid_out.sequences.raw_over_unique

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def timed_updates(*, rows: str, repeats: int, token_budget: int, **where: Any) -> dict[str, list[float]]:
    """Both ways in turn: one trainer with one set of weights, and only `learner.prefix_tree` differs."""
    trainer = make_trainer(TreeTrainer, GRPO | {"token_budget": token_budget}, **where)
    table = token_table(Rows.read(rows).batch(), min_version=0)
    trainer.timed_update(table, prefix_tree=True)  # makes the optimizer's state
    figures: dict[str, list[float]] = {"packed_s": [], "tree_s": [], "raw_over_unique": []}
    for _ in range(repeats):
        figures["packed_s"].append(trainer.timed_update(table, prefix_tree=False)[0])
        seconds, ratio = trainer.timed_update(table, prefix_tree=True)
        figures["tree_s"].append(seconds)
        figures["raw_over_unique"].append(ratio)
    return figures


def measure_tree(
    *, folder: Path, shape: TreeShape, model: dict[str, Any], trl: Path | None = None, **sides: Any
) -> dict[str, Any]:
    """The figures, under the names that the benchmark writes. `trl`: the interpreter of TRL's environment, None: without it;
    `sides`: repeats, token_budget, device and dtype of both."""
    path = make_tiny_model(folder / "tree_model", **model)
    measured = {
        "agents": (path, agent_rows(scale=shape.scale)),
        "group8": (path, group_rows(prompt=shape.prompt, answer=shape.answer)),
        "1": (path, apart_rows(num=shape.apart)),
    }
    for family, sizes in HYBRIDS.items():
        hybrid = make_family(family, folder / family, **(sizes if model == MEDIUM else {}))
        measured[f"hybrid_{family}"] = hybrid, group_rows(prompt=shape.prompt // 2, answer=shape.answer // 2)
    figures: dict[str, Any] = {"tree_grad_diff": grad_difference(make_tiny_model(folder / "small", **SMALL))}
    for name, (path, rows) in measured.items():
        given = {"folder": folder, "rows": rows.write(folder / "tree_rows.npz"), "model": path, **sides}
        (found,) = call(timed_updates, **given)
        packed, tree, ratio = (median(found[key]) for key in ("packed_s", "tree_s", "raw_over_unique"))
        if trl is not None and name in ("agents", "group8"):
            (theirs,) = call(TRL_SIDE, python=trl, **given)
            found |= {f"trl_{key}": value for key, value in theirs.items()}
            figures["tree_vs_trl" if name == "agents" else f"tree_vs_trl_{name}"] = median(theirs["tree_s"]) / tree
        figures |= (
            {"tree_cost_ratio_1": tree / packed}
            if name == "1"
            else {f"tree_speedup_{name}": packed / tree, f"tree_tokens_{name}": ratio}
        )
        figures[f"tree_seconds_{name}"] = found
        way = "padded" if "hybrid" in name else "packed"
        print(
            f"prefix tree, {name}: {way} {packed:.3f} s, tree {tree:.3f} s, {ratio:.2f} times fewer tokens", flush=True
        )
    return figures


def grad_difference(model: Path, *, device: str = "cpu", dtype: str = "float32") -> float:
    """The largest difference of gradients over random trees of several levels, as a share of the gradient's norm."""
    policy = load_policy(model, device=torch.device(device)).to(getattr(torch, dtype))
    found = []
    for number in range(RANDOM_TREES):
        rows = _random_tree(np.random.default_rng((0, number)))
        tree = TreeSequences(rows, tree=PrefixTree(rows.ids), groups=np.zeros(len(rows.ids), dtype=np.int64))
        one, other = (_gradient(policy, sequences) for sequences in (tree, rows))
        found.append(float((one - other).norm() / other.norm()))
    return max(found)


def _random_tree(rng: np.random.Generator) -> Sequences:
    ids = [_random(rng, 200)]
    while len(ids) < 24:
        other = ids[rng.integers(len(ids))]
        ids.append(
            np.concatenate(
                [other[: rng.integers(len(other) // 2, len(other))], _random(rng, int(rng.integers(2, 100)))]
            )
        )
    masks = [((rng.random(len(row)) < 0.5) & (np.arange(len(row)) > 0)).astype(np.uint8) for row in ids]
    return Sequences([row.astype(np.int32) for row in ids], masks=masks)


def _gradient(policy: Policy, sequences: Sequences) -> torch.Tensor:
    policy.zero_grad()
    device = next(policy.parameters()).device
    weights = torch.randn(sequences.num_trained, generator=torch.Generator().manual_seed(0)).to(device)
    for piles in sequences.plan(range(len(sequences.ids)), num_ranks=1, token_budget=2048):
        micro = sequences.micro_batch(piles[0], device=device)
        (policy(micro, temperature=1.0).logprobs * weights[micro.index]).sum().backward()
    return torch.cat([each.grad.flatten().double() for each in policy.parameters() if each.grad is not None])
