"""How much time asynchrony saves: the same steps with and without a barrier, at three tail shapes of environment latency.

`python -m benchmarks.async_overlap [--quick] [--json PATH]`. Every figure comes from whole runs of the product (engine,
agents, environment, learner), `python -m learner.run` in processes of their own, one at a time, synchronous and
asynchronous ones in turn. The two differ in `buffer.max_policy_lag` only: 0 is the barrier.

A step's time is the mean over all steps but the first, so start-up is not in it. What a move of the environment takes is set
from the step time measured without latency: an episode of the long tail lasts SLOW_STEPS such steps, on any machine. The
last part gives the learner more to do than generation (epochs) and shows how long it still waits. Invariant: both flows
of a pair have the same settings, the same seed and the same slow episodes. It judges nothing and keeps no runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness import medians, parser_of, play, table, whole_run
from env_adapters.walk.game import MAX_MOVES

ASYNC_LAG = 12
"""Bound of the asynchronous runs, in versions. A slow episode lasts up to SLOW_STEPS steps: at 12 hardly any becomes too old to
train."""
BOUND_LAG = 2
"""Bound of the learner-bound run, where generation is always that far ahead."""
SLOW_STEPS = 8.0
"""Length of a slow episode that plays all moves, in steps of the run without latency: 80 ms for an ordinary move where a step
takes 4 s, a quick tool call, and 4 s for a move of the long tail."""
LEARNER_BOUND = 2.5
"""Length of an update in the learner-bound run, in steps of generation. Above 2, as on two cores the learner takes one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How long a move takes: `share` of the episodes take `factor` times as long as the others."""

    name: str
    share: float
    factor: float


READ = [f"time/{name}_s" for name in ("step", "train", "prepare", "wait", "engine_idle")]
READ += ["staleness/mean", "staleness/max"]
"""Metrics of a step."""
NONE = Shape(name="none", share=0.0, factor=1.0)
MODERATE = Shape(name="moderate", share=0.1, factor=10.0)
LONG_TAIL = Shape(name="long_tail", share=0.02, factor=50.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Settings of all runs, and where they are."""

    folder: Path
    steps: int
    overrides: tuple[str, ...]

    def run(self, shape: Shape, *, lag: int, move_ms: float, seed: int, extra: tuple[str, ...] = ()) -> dict[str, Any]:
        """One whole run, and its figures. Raises RunFailed."""
        name = f"bench-{shape.name}-{lag}-{seed}-{len(list(self.folder.iterdir()))}"
        tail = ["--latency-ms", str(move_ms), "--tail", f"{shape.share}:{shape.factor}", "--seed", str(seed)]
        command = ["{python}", "-m", "env_adapters.walk.server", *tail]
        settings = [f"run.steps={self.steps}", f"run.seed={seed}", f"env.command={json.dumps(command)}"]
        settings += [f"buffer.max_policy_lag={lag}", "sft.steps=20", *self.overrides, *extra]
        load, began = os.getloadavg()[0], time.monotonic()
        figures: dict[str, Any] = read_figures(whole_run(self.folder, name, *settings))
        figures |= {"load_before": load, "load_after": os.getloadavg()[0]}
        shown = " ".join([f"{shape.name:>13} {'async' if lag else 'sync':>5} seed {seed}", *extra])
        print(
            f"{shown}: {figures['step_s']:.2f} s a step, learner idle {figures['learner_idle']:.0%}, engine idle "
            f"{figures['engine_idle']:.0%}, load {load:.1f} to {figures['load_after']:.1f}, "
            f"{time.monotonic() - began:.0f} s in all",
            flush=True,
        )
        return figures


def read_figures(steps: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of a run's steps. Times (seconds) and shares (0 to 1 of the time) are those of the steps after the first,
    so nothing of the start-up is in them. `epoch_s`: a pass over a batch, without its preparation; `engine_idle`: no
    generation is under way."""
    later = [step for step in steps if step["step"] > 1]
    if not later:
        raise ValueError("a run must make at least 2 steps, got 1; set --steps 2")
    of = {name: [float(step[name]) for step in later] for name in READ}
    # the engine's idle time is counted from report to report, which may be more than a step's own time
    reported_s = sum(map(max, of["time/step_s"], of["time/engine_idle_s"]))
    return {
        "step_s": mean(of["time/step_s"]),
        "epoch_s": mean(of["time/train_s"]) - mean(of["time/prepare_s"]),
        "learner_idle": sum(of["time/wait_s"]) / sum(of["time/step_s"]),
        "engine_idle": sum(of["time/engine_idle_s"]) / reported_s,
        "mean_lag": mean(of["staleness/mean"]),
        "max_lag": max(of["staleness/max"]),
    }


def move_ms_for(step_s: float) -> float:
    """Milliseconds per move with which an episode of the long tail, if it plays all moves, lasts SLOW_STEPS steps."""
    return round(1000 * SLOW_STEPS * step_s / (MAX_MOVES * LONG_TAIL.factor), 1)


def epochs_for(step_s: float, *, epoch_s: float) -> int:
    """Passes over a batch with which an update lasts LEARNER_BOUND steps of generation."""
    return max(1, math.ceil(LEARNER_BOUND * step_s / epoch_s))


def compare(bench: Bench, *, shape: Shape, move_ms: float, seeds: range) -> dict[str, Any]:
    """Runs both flows in turn, once per seed: medians of each figure, and the quotient of the medians of the step times."""
    sync, overlapped = [], []
    for seed in seeds:
        sync.append(bench.run(shape, lag=0, move_ms=move_ms, seed=seed))
        overlapped.append(bench.run(shape, lag=ASYNC_LAG, move_ms=move_ms, seed=seed))
    ratios = [one["step_s"] / other["step_s"] for one, other in zip(sync, overlapped, strict=True)]
    parts = {"sync": summarise(sync), "async": summarise(overlapped)}
    return {
        "move_ms": move_ms,
        "speedup": parts["sync"]["step_s"] / parts["async"]["step_s"],
        "speedups": ratios,
        **parts,
    }


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure; the runs themselves are kept."""
    return medians(runs, *runs[0]) | {"runs": runs}


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """All parts. The first run without latency sets the latencies of the others."""
    quick, repeats = arguments.quick, 1 if arguments.quick else arguments.repeats
    bench = Bench(folder=folder, steps=arguments.steps, overrides=tuple(arguments.overrides))
    results: dict[str, Any] = {}
    if quick:
        without = replace(bench, steps=min(bench.steps, 3)).run(NONE, lag=ASYNC_LAG, move_ms=0.0, seed=1)
    else:
        results["none"] = compare(bench, shape=NONE, move_ms=0.0, seeds=range(1, 2))
        without = results["none"]["async"]["runs"][0]
    move_ms = move_ms_for(without["step_s"])
    if not quick:
        results["moderate"] = compare(bench, shape=MODERATE, move_ms=move_ms, seeds=range(1, 2))
    results["long_tail"] = compare(bench, shape=LONG_TAIL, move_ms=move_ms, seeds=range(1, repeats + 1))
    figures = {f"speedup_{name}": part["speedup"] for name, part in results.items()}
    if not quick:
        epochs = epochs_for(without["step_s"], epoch_s=without["epoch_s"])
        bound = bench.run(NONE, lag=BOUND_LAG, move_ms=0.0, seed=1, extra=(f"learner.epochs={epochs}",))
        results["learner_bound"] = {"epochs": epochs, "async": summarise([bound])}
        figures["learner_idle_when_generation_is_fast"] = bound["learner_idle"]
    print(shown(results))
    yield {**figures, "parts": results}


def shown(parts: dict[str, Any]) -> str:
    """The results for a person."""
    return table(
        [
            {
                "shape": name,
                "ms/move": part.get("move_ms", 0.0),
                "flow": flow,
                "speed-up": f"{part['speedup']:.2f}x" if flow == "async" and "speedup" in part else "",
                **{each: part[flow][each] for each in ("step_s", "learner_idle", "engine_idle", "mean_lag", "max_lag")},
            }
            for name, part in parts.items()
            for flow in ("sync", "async")
            if flow in part
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("async_overlap", doc=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="the long tail only, once, with fewer steps (under 3 minutes)"
    )
    parser.add_argument("--steps", type=int, default=None, help="steps of each run, at least 2 (default 12, quick 5)")
    parser.add_argument(
        "--repeats", type=int, default=2, help="pairs of runs at the long tail, each with a seed of its own"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="configuration of all runs")
    arguments = parser.parse_args(argv)
    arguments.steps = arguments.steps or (5 if arguments.quick else 12)
    if arguments.steps < 2 or arguments.repeats < 1:
        parser.error(f"--steps must be >= 2 and --repeats >= 1, got {arguments.steps} and {arguments.repeats}")
    about = f"{arguments.steps} steps a run, the first one not counted"
    return play("async_overlap", arguments, measure, about=about)


if __name__ == "__main__":
    sys.exit(main())
