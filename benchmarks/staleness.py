"""What old data costs, and what the correction for it gives back: learning with batches exactly 1, 2 and 4 updates old.

`python -m benchmarks.staleness [--lags 1 2 4] [--seeds 0 1 2] [--steps 40] [--json PATH]`. One process, no engine: a Hugging
Face model plays the demo's game (`benchmarks.processes.walk_player`), the product's learner trains with the demo's settings, and a
delay line stands between them: the update that makes version v + 1 trains what version v - k sampled (the first k updates
train version 0's). Compared are the data of the present version (k = 0), and for each k decoupled PPO with truncated
importance weights (`tis`) against PPO on the ratio to the behaviour policy (`naive`). `final` is the mean reward of
EVALUATED fresh episodes of other tasks under the last weights, `mean` that of all episodes sampled on the way.

Invariant: runs of a seed start from the same weights and see the same tasks in the same order. It judges by numbers only:
`within_noise` says that a method's worst seed is not below the worst seed of k = 0 by more than two standard errors.
"""

from __future__ import annotations

import math
import shutil
import socket
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.harness import Report, end_on_sigterm, parser_of
from benchmarks.processes.walk_player import Player
from buffers.records import Row, Task, TrainBatch
from buffers.tasks.parquet import write_traces
from configs.load import FOLDER, load_config
from configs.schema import Config
from configs.tiny_model import make_tiny_model
from env_adapters.walk.game import walk_tasks, walk_traces
from learner.checkpoints.store import WEIGHTS
from learner.training.trainer import Trainer

CORRECTIONS = ("tis", "naive")
EVALUATED = 256
"""Episodes that measure the last weights: a share of 0.95 is known to about 0.014."""
NUM_TASKS, NUM_TRACES = 4000, 800


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run. `k`: how many updates old its data were."""

    k: int
    correction: str
    seed: int
    final: float
    mean: float
    largest_weight: float
    """The largest ratio of the policy at the start of a step to the one that sampled."""
    wall_s: float
    rewards: list[float]
    """Mean reward of each batch, in the order of sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Settings of all runs, and where their files are."""

    folder: Path
    config: Config
    steps: int

    def trainer(self, model: Path, *, k: int, correction: str, seed: int) -> Trainer:
        knobs = {"correction": correction, "check_logprobs": False}
        return Trainer(
            self.config.learner.model_copy(update=knobs),
            model_path=str(model),
            dtype="float32",
            temperature=1.0,
            seed=seed,
            keep_versions=k + 1,
            address=free_address(),
            rank=0,
            world_size=1,
            device="cpu",
        )

    def start(self, seed: int) -> Path:
        """The demo's model after its warm start: where all runs of the seed begin."""
        folder = self.folder / f"start-{seed}"
        traces = self.folder / f"traces-{seed}.parquet"
        write_traces(traces, list(walk_traces(NUM_TRACES, seed=0)))
        fresh = make_tiny_model(self.folder / f"fresh-{seed}", seed=seed)
        trainer = self.trainer(fresh, k=0, correction="tis", seed=seed)
        warm = self.config.warm_start
        trainer.warm_start(traces, steps=warm.steps, batch_size=32, lr=warm.lr, seed=seed)
        trainer.save_pretrained(folder)
        trainer.close()
        return folder

    def run(self, start: Path, *, k: int, correction: str, seed: int) -> Run:
        """Learns behind a delay line of k batches."""
        began = time.monotonic()
        weights = self.folder / "weights"
        trainer = self.trainer(start, k=k, correction=correction, seed=seed)
        player, random = Player(start), torch.Generator().manual_seed(seed)
        buffer, tasks = self.config.buffer, walk_tasks(NUM_TASKS, seed=0)
        line: deque[TrainBatch] = deque()
        rewards, largest = [], 0.0
        for version in range(self.steps):
            while len(line) <= k:  # before the first update k + 1 batches, then one
                first = len(rewards) * buffer.groups_per_step
                some = [tasks[(first + number) % len(tasks)] for number in range(buffer.groups_per_step)]
                rows = player.play(
                    some, group_size=buffer.group_size, version=version, random=random, first_group=first
                )
                rewards.append(mean(row.score for row in rows))
                if self.config.learner.advantage == "remax":
                    rows += baselines(player, some, version=version, first_group=first)
                line.append(TrainBatch(rows=rows))
            figures = trainer.train_step(line.popleft(), version=version)
            largest = max(largest, figures["policy/is_weight_max"])
            trainer.save_pretrained(weights)
            player.load(weights / WEIGHTS)
        trainer.close()
        final = evaluate(player, seed=seed)
        return Run(
            k=k,
            correction=correction,
            seed=seed,
            final=final,
            mean=mean(rewards),
            largest_weight=largest,
            wall_s=time.monotonic() - began,
            rewards=rewards,
        )


def baselines(player: Player, tasks: list[Task], *, version: int, first_group: int) -> list[Row]:
    """A greedy episode of each task."""
    rows = player.play(
        tasks, group_size=1, version=version, random=torch.Generator(), first_group=first_group, greedy=True
    )
    return [replace(row, greedy=True, episode_id=f"{row.group_id}-greedy") for row in rows]


def evaluate(player: Player, *, seed: int) -> float:
    """Mean reward of fresh episodes, each of a task of its own that no run trains."""
    tasks: list[Task] = walk_tasks(EVALUATED, seed=1)
    rows = player.play(tasks, group_size=1, version=0, random=torch.Generator().manual_seed(seed))
    return mean(row.score for row in rows)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def within_noise(finals: list[float], *, on_policy: list[float]) -> bool:
    """Whether the worst seed is that of k = 0 but for twice the error of a difference of two shares of EVALUATED episodes."""
    worst, other = min(finals), min(on_policy)
    share = (worst + other) / 2
    return worst >= other - 2 * math.sqrt(2 * share * (1 - share) / EVALUATED)


def summarise(runs: list[Run]) -> list[dict[str, Any]]:
    """One line for each k and correction: final rewards of the seeds, and what they say beside those of k = 0."""
    cells: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.k, run.correction), []).append(run)
    on_policy = [run.final for run in runs if run.k == 0]
    return [
        {
            "k": k,
            "correction": correction,
            "finals": [run.final for run in own],
            "final": mean(run.final for run in own),
            "mean": mean(run.mean for run in own),
            "largest_weight": max(run.largest_weight for run in own),
            "within_noise": within_noise([run.final for run in own], on_policy=on_policy) if on_policy else None,
        }
        for (k, correction), own in cells.items()
    ]


def table(cells: list[dict[str, Any]]) -> str:
    """The results for a person."""
    lines = [
        f"{'updates old':>11} {'correction':>10} {'final':>6} {'mean':>6} {'weights to':>10} {'in noise':>8}  seeds"
    ]
    for cell in cells:
        seeds = " ".join(f"{final:.3f}" for final in cell["finals"])
        name = "-" if cell["k"] == 0 else cell["correction"]
        noise = {None: "?", True: "yes", False: "no"}[cell["within_noise"]]
        lines.append(
            f"{cell['k']:>11} {name:>10} {cell['final']:6.3f} {cell['mean']:6.3f} {cell['largest_weight']:10.1f} "
            f"{noise:>8}  {seeds}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """All runs in turn, the table, the JSON file."""
    parser = parser_of("staleness", doc=__doc__)
    parser.add_argument("--lags", nargs="+", type=int, default=[1, 2, 4], help="how many updates old, beside 0")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--corrections", nargs="+", default=list(CORRECTIONS), help="of learner.correction")
    parser.add_argument("--steps", type=int, default=40, help="updates of each run (default 40)")
    parser.add_argument("--override", action="append", default=[], metavar="section.key=value")
    arguments = parser.parse_args(argv)
    if min(arguments.lags) < 1 or arguments.steps < 1:
        parser.error(f"--lags and --steps must be >= 1, got {arguments.lags} and {arguments.steps}")
    end_on_sigterm()
    torch.set_num_threads(1)
    report = Report("staleness", about=f"{arguments.steps} updates a run")
    config = load_config(FOLDER / "demo.yaml", overrides=arguments.override)
    plan = [(0, "tis"), *((k, correction) for k in arguments.lags for correction in arguments.corrections)]
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as folder:
        bench = Bench(folder=Path(folder), config=config, steps=arguments.steps)
        for seed in arguments.seeds:
            start = bench.start(seed)
            for k, correction in plan:
                run = bench.run(start, k=k, correction=correction, seed=seed)
                print(f"seed {seed}, {k} old, {correction}: {run.final:.3f}, {run.wall_s:.0f} s", flush=True)
                runs.append(run)
                figures = {"cells": summarise(runs), "runs": [asdict(run) for run in runs]}
                report.write(arguments.json, settings=settings, figures=figures)  # what there is, if the next one fails
            shutil.rmtree(start)
    print(table(summarise(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
