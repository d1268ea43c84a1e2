"""Training steps of the product's Trainer with a clock around every pass: one side of `benchmarks.learner_efficiency`.

`python -m benchmarks.processes.efficiency_side --rows FILE --model FOLDER --out FILE --address HOST:PORT`. A pass is a call of
the policy, or a backward pass. Of each step but the first: seconds of all passes, of the passes with a gradient (those of the
update), and of the whole step; the rate of matrix products is measured before, between and after the steps. It compares
nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.processes.learner_side import Rows
from benchmarks.processes.rank_side import end, make_trainer, rank_parser
from configs.schema import LearnerConfig
from learner.model.operations import Work, matmul_rate
from learner.training.trainer import Trainer


class Clock:
    """Seconds within passes since `clear`."""

    def __init__(self) -> None:
        self.all_s = self.update_s = 0.0

    def clear(self) -> None:
        self.all_s = self.update_s = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call; its time counts. One within another does not count twice, as no pass calls another."""

        def timed(*words: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*words, **named)
            finally:
                took = time.perf_counter() - began
                self.all_s += took
                self.update_s += took if torch.is_grad_enabled() else 0.0

        return timed


class ClockedTrainer(Trainer):
    """Its passes are timed; its steps are the product's."""

    def clocked(self) -> Clock:
        clock = Clock()
        self._forward = clock.timed(self._forward)  # type: ignore[method-assign]
        torch.Tensor.backward = clock.timed(torch.Tensor.backward)  # type: ignore[method-assign]
        return clock

    @property
    def work(self) -> Work:
        return self._work


def main(argv: list[str] | None = None) -> int:
    """Train, and write what each step took."""
    parser = rank_parser("benchmarks.processes.efficiency_side", about=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = Rows.read(arguments.rows)
    config = LearnerConfig(
        advantage="grpo", critic="none", lr=1e-6, minibatches=1, token_budget=int(rows.lengths.max())
    )
    trainer = make_trainer(ClockedTrainer, config, arguments=arguments)
    clock = trainer.clocked()
    flops = trainer.work.update_flops(
        tokens=int(rows.lengths.sum()), squares=int((rows.lengths**2).sum()), trained=int(rows.mask.sum())
    )
    steps = []
    for _ in range(arguments.steps + 1):
        matmul_rate.cache_clear()
        rate = matmul_rate(device="cpu", dtype=arguments.dtype)
        clock.clear()
        began = time.perf_counter()
        trainer.train_step(rows.batch(), version=0)
        step_s = time.perf_counter() - began
        steps.append(
            {"step_s": step_s, "passes_s": clock.all_s, "update_passes_s": clock.update_s, "matmul_rate": rate}
        )
    arguments.out.write_text(json.dumps({"flops": flops, "steps": steps[1:]}), encoding="utf-8")
    trainer.close()
    return 0


if __name__ == "__main__":
    end(main)
