"""Rows of the learner's benchmarks, the trainers that take them, and one side of `benchmarks.learner`: steps on the rows of a file.

`train` runs in a process of its own, once per rank. Invariant: every way gets the same rows in the same order and makes the same
GRPO update from them; only how rows become rectangles differs. The first step is a warm-up and is reported apart.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.harness import call
from buffers.records import Row, TrainBatch
from configs.schema import LearnerConfig
from configs.tiny_model import VOCAB_SIZE, make_tiny_model
from learner.model.load import load_policy
from learner.model.policy import Policy
from learner.training.batch_tensors import BatchTensors, token_table
from learner.training.packing import PaddedSequences, Plan, Sequences
from learner.training.trainer import Before, Minibatches, Trainer
from learner.training.tree_packing import PrefixTree, TreeSequences

MIB = 2**20
GRPO: dict[str, Any] = {"advantage": "grpo", "critic": "none", "lr": 1e-6, "lr_warmup_steps": 0, "minibatches": 1}
SomeTrainer = TypeVar("SomeTrainer", bound=Trainer)


class SortedPaddedTrainer(Trainer):
    """The product's layout for models that cannot keep packed rows apart: micro-batches of rows of like length."""

    def _laid_out(self, sequences: Sequences, **options: Any) -> Sequences:
        return PaddedSequences(sequences)


class PaddedTrainer(SortedPaddedTrainer):
    """The rival of packed rows: micro-batches of equal size, in the batch's order, padded to their longest row. One rank."""

    def _plan(self, sequences: Sequences, *, rows: Any) -> Plan:
        return [[pile] for pile in equal_piles(sequences.lengths, rows=rows, token_budget=self._config.token_budget)]


WAYS: dict[str, type[Trainer]] = {"packed": Trainer, "padded": PaddedTrainer, "sorted_padded": SortedPaddedTrainer}


def equal_piles(lengths: np.ndarray, *, rows: Sequence[int], token_budget: int) -> list[list[int]]:
    """Micro-batches of one size, in the rows' order: as many rows as fit the budget when all are as long as the longest."""
    size = max(1, token_budget // int(lengths[list(rows)].max()))
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a benchmark as flat arrays; `prompts`: tokens of each row before its first sampled one."""

    ids: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray
    scores: np.ndarray
    groups: np.ndarray

    @classmethod
    def of(cls, ids: Sequence[np.ndarray], *, masks: Sequence[np.ndarray], scores: Any, groups: Any) -> Rows:
        """Rows from their ids and masks. A prompt ends where the first sampled token is."""
        return cls(
            ids=np.concatenate(ids).astype(np.int32), mask=np.concatenate(masks).astype(np.uint8),
            lengths=np.array([len(row) for row in ids]), prompts=np.array([int(mask.argmax()) for mask in masks]),
            scores=np.asarray(scores, dtype=np.float32), groups=np.asarray(groups),
        )  # fmt: skip

    @classmethod
    def read(cls, path: Path | str) -> Rows:
        with np.load(path) as stored:
            return cls(**{name: stored[name] for name in cls.__annotations__})

    def write(self, path: Path) -> Path:
        np.savez(path, **{name: getattr(self, name) for name in self.__annotations__})
        return path

    def sequences(self) -> Sequences:
        ends = np.cumsum(self.lengths)[:-1]
        return Sequences(np.split(self.ids, ends), masks=np.split(self.mask, ends))

    def batch(self, *, version: int = 0) -> TrainBatch:
        """Rows as the buffer would hand them over; recorded log-probabilities are made up and not used."""
        laid = self.sequences()
        return TrainBatch(
            rows=[
                Row(
                    episode_id=f"{self.groups[number]}-{number}-0", group_id=int(self.groups[number]),
                    score=float(self.scores[number]), ids=ids, mask=mask, logprobs=-5.0 * mask.astype(np.float32),
                    versions=np.where(mask, version, -1).astype(np.int32),
                    rounds=np.where(mask, 0, -1).astype(np.int32),
                )
                for number, (ids, mask) in enumerate(zip(laid.ids, laid.masks, strict=True))
            ]
        )  # fmt: skip

    @property
    def work(self) -> dict[str, int]:
        """What `learner.model.layers.Work.update_flops` counts."""
        squares = int((self.lengths.astype(np.int64) ** 2).sum())
        return {"tokens": int(self.lengths.sum()), "squares": squares, "trained": int(self.mask.sum())}


def stem_rows(
    *, groups: int, rows: int, stem: int, tails: tuple[int, int], trained: float = 0.5, tokens: Any = VOCAB_SIZE
) -> Rows:
    """Groups whose rows part from a common stem; this share of each tail, its end, is trained. `tokens`: what is drawn from."""
    rng = np.random.default_rng(0)
    ids, masks = [], []
    for _ in range(groups):
        start = rng.choice(tokens, stem)
        for tail in rng.integers(*tails, size=rows, endpoint=True):
            ids.append(np.concatenate([start, rng.choice(tokens, tail)]))
            masks.append(np.arange(stem + tail) >= stem + tail - math.ceil(trained * tail))
    return Rows.of(ids, masks=masks, scores=np.arange(len(ids)) % 2, groups=np.repeat(np.arange(groups), rows))


def make_trainer(
    kind: type[SomeTrainer],
    keys: Mapping[str, Any],
    *,
    model: Path | str,
    address: str,
    rank: int = 0,
    world_size: int = 1,
    device: str = "cpu",
    dtype: str = "float32",
    keep_versions: int = 1,
) -> SomeTrainer:
    """A rank's trainer; `keys`: of the learner. On "cuda" each rank has a GPU of its own."""
    return kind(
        LearnerConfig(ranks=world_size, **keys), model_path=str(model), dtype=dtype, temperature=1.0, seed=0,
        keep_versions=keep_versions, address=address, rank=rank, world_size=world_size,
        device=f"cuda:{rank}" if device == "cuda" else device,
    )  # fmt: skip


def policy_logprobs(
    model: Path, sequences: Sequences, *, device: str, dtype: str, token_budget: int = 8192
) -> torch.Tensor:
    """[M] of the trained tokens, in float32 on the CPU."""
    policy = load_policy(model, device=torch.device(device)).to(getattr(torch, dtype))
    found = torch.zeros(sequences.num_trained)
    for piles in sequences.plan(range(len(sequences.ids)), num_ranks=1, token_budget=token_budget):
        micro = sequences.micro_batch(piles[0], device=torch.device(device))
        with torch.no_grad():
            found[micro.index.cpu()] = policy(micro, temperature=1.0).logprobs.float().cpu()
    return found


def resident_mb() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def most_resident_mb() -> float:
    """The most memory that this process ever had. (What getrusage says begins with the peak of the process that started it.)"""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024 / MIB


def side_keys(way: str, *, token_budget: int, gradient_checkpointing: bool) -> dict[str, Any]:
    """Keys of the learner on this side."""
    return GRPO | {
        "token_budget": token_budget, "prefix_tree": way == "packed", "correction": "none", "check_logprobs": False,
        "gradient_checkpointing": gradient_checkpointing,
    }  # fmt: skip


def timed_steps(trainer: Trainer, *, batch: TrainBatch, steps: int) -> list[dict[str, float]]:
    """Seconds of each step and of its update alone, and the gradient norm."""
    done = []
    for _ in range(steps + 1):
        metrics = trainer.train_step(batch, version=0)  # the same batch each time, never too old
        whole_s, prepare_s = metrics["time/train_s"], metrics["time/prepare_s"]
        done.append({"step_s": whole_s, "update_s": whole_s - prepare_s, "grad_norm": metrics["policy/grad_norm"]})
    return done


def train(
    *, way: str, rows: str, steps: int, token_budget: int, gradient_checkpointing: bool, device: str, **where: Any
) -> dict[str, Any]:
    """One rank of a side. `peak_memory_mb`: what the steps took beyond what was there before them (on a GPU: the most in all)."""
    given = Rows.read(rows)
    keys = side_keys(way, token_budget=token_budget, gradient_checkpointing=gradient_checkpointing)
    trainer = make_trainer(WAYS[way], keys, device=device, **where)
    before = resident_mb()
    warm, *timed = timed_steps(trainer, batch=given.batch(), steps=steps)
    on_gpu = device.startswith("cuda")
    return {
        "warm_up": warm,
        "steps": timed,
        "peak_memory_mb": torch.cuda.max_memory_allocated() / MIB if on_gpu else most_resident_mb() - before,
    }


# What the learner's prefix tree saves, what it costs where nothing is shared, and that it changes no gradient (`measure_tree`). An
# update on a tree and one on packed rows are timed in turn in one process; a figure is the quotient of the medians. Rows are made
# up: `agent_rows` as an agent like Claude Code leaves them, scaled down; `group_rows` one prompt with eight answers. `tree_vs_trl`:
# an update of TRL's on its own prefix trie, of agents' rows, over ours, each side's median, in turn with it.

TRL_TREE_SIDE = Path(__file__).parent / "rivals" / "trl_tree_side.py"
EPISODES, BRANCHES = 8, 9
SYSTEM, TASK, ROUND, TAIL = 17_000, 400, 2_500, 400
"""Tokens of an agent's row: system prompt with the tools, the task, what a branch has more of the history than the one before it,
and what its own end has. Nine rows of 30,400 tokens in the mean, as a recorded episode of 24 rounds."""
MEDIUM: dict[str, Any] = {"hidden": 768, "layers": 12, "ffn": 1536, "heads": 12, "kv_heads": 6}
"""64 million weights in its layers."""
SMALL: dict[str, Any] = {"hidden": 128, "layers": 2, "ffn": 256, "heads": 4, "kv_heads": 2}
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
        before = Before(table.behaviour.clone(), *torch.zeros(3, len(table.behaviour)), hinted=None)
        self._wait()
        began = time.perf_counter()
        layout = replace(self.layout, shares=prefix_tree)
        laid_out = replace(table, sequences=self._laid_out(table.sequences, table=table, layout=layout))
        drawn = np.random.default_rng((self._seed, self._own.steps))
        self._learn(laid_out, before=before, minibatches=Minibatches(laid_out, config=self._config, rng=drawn))
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
        "agents": agent_rows(scale=shape.scale),
        "group8": group_rows(prompt=shape.prompt, answer=shape.answer),
        "1": apart_rows(num=shape.apart),
    }
    figures: dict[str, Any] = {"tree_grad_diff": grad_difference(make_tiny_model(folder / "small", **SMALL))}
    for name, rows in measured.items():
        given = {"folder": folder, "rows": rows.write(folder / "tree_rows.npz"), "model": path, **sides}
        (found,) = call(timed_updates, **given)
        packed, tree, ratio = (median(found[key]) for key in ("packed_s", "tree_s", "raw_over_unique"))
        if trl is not None and name != "1":
            (theirs,) = call(TRL_TREE_SIDE, python=trl, **given)
            found |= {f"trl_{key}": value for key, value in theirs.items()}
            figures["tree_vs_trl" if name == "agents" else f"tree_vs_trl_{name}"] = median(theirs["tree_s"]) / tree
        figures |= (
            {"tree_cost_ratio_1": tree / packed}
            if name == "1"
            else {f"tree_speedup_{name}": packed / tree, f"tree_tokens_{name}": ratio}
        )
        figures[f"tree_seconds_{name}"] = found
        print(f"prefix tree, {name}: packed {packed:.3f} s, tree {tree:.3f} s, {ratio:.2f} times fewer", flush=True)
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
