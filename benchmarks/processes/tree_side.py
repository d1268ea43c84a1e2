"""Times updates on the rows of a file, each by itself and with what they share computed once, in turn, and writes what they took.

`python -m benchmarks.processes.tree_side --rows FILE --model FOLDER --out FILE ...`, started by `benchmarks.prefix_tree`.
Invariant: both ways are one trainer with one set of weights, and only `learner.prefix_tree` differs; a time has everything from
the rows to the new weights in it, the making of the tree too. It compares nothing.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace

import torch

from benchmarks.processes.learner_side import Rows
from benchmarks.processes.rank_side import end, make_trainer, rank_parser
from configs.schema import LearnerConfig
from learner.training.batch_tensors import BatchTensors, token_table
from learner.training.trainer import Before, Trainer


class TreeTrainer(Trainer):
    """Makes one update, by itself, in either way."""

    def timed_update(self, table: BatchTensors, *, prefix_tree: bool) -> tuple[float, float]:
        """Seconds of an update, and tokens of the rows over those computed."""
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


def main(argv: list[str] | None = None) -> int:
    """Train in both ways, in turn, and write the seconds of each."""
    parser = rank_parser("benchmarks.processes.tree_side", about=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    arguments = parser.parse_args(argv)
    config = LearnerConfig(
        advantage="grpo",
        critic="none",
        lr=1e-6,
        lr_warmup_steps=0,
        minibatches=1,
        token_budget=arguments.token_budget,
        gradient_checkpointing=arguments.gradient_checkpointing,
    )
    trainer = make_trainer(TreeTrainer, config, arguments=arguments)
    table = token_table(Rows.read(arguments.rows).batch(), min_version=0)
    trainer.timed_update(table, prefix_tree=True)  # makes the optimizer's state
    figures: dict[str, list[float]] = {"packed_s": [], "tree_s": [], "raw_over_unique": []}
    for _ in range(arguments.repeats):
        figures["packed_s"].append(trainer.timed_update(table, prefix_tree=False)[0])
        seconds, ratio = trainer.timed_update(table, prefix_tree=True)
        figures["tree_s"].append(seconds)
        figures["raw_over_unique"].append(ratio)
    arguments.out.write_text(json.dumps(figures), encoding="utf-8")
    trainer.close()
    return 0


if __name__ == "__main__":
    end(main)
