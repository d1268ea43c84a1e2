"""One side of `benchmarks.learner`, in a process of its own: trains on the rows of a file and writes down what it took.

`python -m benchmarks.processes.learner_side WAY --rows FILE --model FOLDER --out FILE ...`, once per rank. Invariant:
every way gets the same rows in the same order and makes the same GRPO update from them; only how rows become
rectangles differs. The first step is a warm-up and is reported apart. It compares nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.processes.rank_side import end, make_trainer, rank_parser
from benchmarks.rivals.padded import equal_piles, padding_share
from buffers.records import Row, TrainBatch
from configs.schema import LearnerConfig
from learner.training.packing import PaddedSequences, Plan, Sequences
from learner.training.trainer import Trainer

MIB = 2**20


class SortedPaddedTrainer(Trainer):
    """The product's layout for models that cannot keep packed rows apart: micro-batches of rows of like length."""

    def _laid_out(self, sequences: Sequences, **options: Any) -> Sequences:
        return PaddedSequences(sequences)


class PaddedTrainer(SortedPaddedTrainer):
    """Micro-batches of equal size, in the batch's order, padded to their longest row. One rank."""

    def _plan(self, sequences: Sequences, *, rows: Any) -> Plan:
        return [[pile] for pile in equal_piles(sequences.lengths, rows=rows, token_budget=self._config.token_budget)]


WAYS: dict[str, type[Trainer]] = {"packed": Trainer, "padded": PaddedTrainer, "sorted_padded": SortedPaddedTrainer}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of the benchmark as flat arrays; `prompts`: tokens of each row before its first sampled one."""

    ids: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray
    scores: np.ndarray
    groups: np.ndarray

    @classmethod
    def read(cls, path: Path) -> Rows:
        with np.load(path) as stored:
            return cls(**{name: stored[name] for name in cls.__annotations__})

    def write(self, path: Path) -> None:
        np.savez(path, **{name: getattr(self, name) for name in self.__annotations__})

    def batch(self) -> TrainBatch:
        """Rows as the buffer would hand them over; recorded log-probabilities are made up and not used."""
        ends = np.cumsum(self.lengths)[:-1]
        parts = zip(np.split(self.ids, ends), np.split(self.mask, ends), strict=True)
        return TrainBatch(rows=[self._row(number, ids=ids, mask=mask) for number, (ids, mask) in enumerate(parts)])

    def _row(self, number: int, *, ids: np.ndarray, mask: np.ndarray) -> Row:
        return Row(
            episode_id=f"{self.groups[number]}-{number}-0",
            group_id=int(self.groups[number]),
            score=float(self.scores[number]),
            ids=ids.astype(np.int32),
            mask=mask.astype(np.uint8),
            logprobs=-5.0 * mask.astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            rounds=np.where(mask, 0, -1).astype(np.int32),
        )


def resident_mb() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def most_resident_mb() -> float:
    """The most memory that this process ever had. (What getrusage says begins with the peak of the process that started it.)"""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024 / MIB


def peak_mb(*, before: float, device: str) -> float:
    """The most memory that the steps took beyond what was there before them (on a GPU: the most in all)."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / MIB
    return most_resident_mb() - before


def trainer_config(arguments: argparse.Namespace) -> LearnerConfig:
    return LearnerConfig(
        ranks=arguments.world_size,
        advantage="grpo",
        critic="none",
        lr=1e-6,
        lr_warmup_steps=0,
        minibatches=1,
        token_budget=arguments.token_budget,
        prefix_tree=arguments.way == "packed",
        correction="none",
        check_logprobs=False,
        gradient_checkpointing=arguments.gradient_checkpointing,
    )


def timed_steps(trainer: Trainer, *, batch: TrainBatch, steps: int) -> list[dict[str, float]]:
    """Seconds of each step and of its update alone, the CPU seconds of this process, and the gradient norm."""
    done = []
    for _ in range(steps + 1):
        cpu_s = time.process_time()
        metrics = trainer.train_step(batch, version=0)  # the same batch each time, never too old
        whole_s, prepare_s = metrics["time/train_s"], metrics["time/prepare_s"]
        figures = {"step_s": whole_s, "update_s": whole_s - prepare_s, "cpu_s": time.process_time() - cpu_s}
        done.append(figures | {"grad_norm": metrics["policy/grad_norm"]})
    return done


def computed_padding(rows: Rows, *, way: str, token_budget: int) -> float:
    if way == "packed":
        return 0.0
    everything = range(len(rows.lengths))
    if way == "padded":
        piles = equal_piles(rows.lengths, rows=everything, token_budget=token_budget)
    else:
        parts = rows.batch().rows
        padded = PaddedSequences(Sequences([row.ids for row in parts], masks=[row.mask for row in parts]))
        piles = [pile for (pile,) in padded.plan(everything, num_ranks=1, token_budget=token_budget)]
    return padding_share(rows.lengths, piles=piles)


def main(argv: list[str] | None = None) -> int:
    """Train, and write the figures on rank 0."""
    parser = rank_parser("benchmarks.processes.learner_side", about=__doc__)
    parser.add_argument("way", choices=list(WAYS))
    for name, default in (("steps", 2), ("token-budget", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    arguments = parser.parse_args(argv)
    rows = Rows.read(arguments.rows)
    trainer = make_trainer(WAYS[arguments.way], trainer_config(arguments), arguments=arguments)
    before = resident_mb()
    warm, *steps = timed_steps(trainer, batch=rows.batch(), steps=arguments.steps)
    figures = {
        "warm_up": warm,
        "steps": steps,
        "peak_memory_mb": peak_mb(before=before, device=arguments.device),
        "padding_share": computed_padding(rows, way=arguments.way, token_budget=arguments.token_budget),
    }
    if arguments.rank == 0:
        arguments.out.write_text(json.dumps(figures), encoding="utf-8")
    trainer.close()
    return 0


if __name__ == "__main__":
    end(main)
