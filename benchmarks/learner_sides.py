"""Rows of the learner's benchmarks, the trainers that take them, and one side of `benchmarks.learner`: steps on the rows of a file.

`train` runs in a process of its own, once per rank. Invariant: every way gets the same rows in the same order and makes the same
GRPO update from them; only how rows become rectangles differs. The first step is a warm-up and is reported apart.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from buffers.records import Row, TrainBatch
from configs.schema import LearnerConfig
from configs.tiny_model import VOCAB_SIZE
from learner.model.load import load_policy
from learner.training.packing import PaddedSequences, Plan, Sequences
from learner.training.trainer import Trainer

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
