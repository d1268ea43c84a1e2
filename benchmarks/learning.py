"""Whether the algorithms learn: whole runs of the demo with GRPO, RLOO, REINFORCE++ and PPO with a critic, over some seeds.

`python -m benchmarks.learning [--methods grpo ...] [--seeds 0 1 2] [--json PATH] [section.key=value ...]`. Each run is the
product (engine, agents, environment, learner), `python -m learner.run` in a process of its own, one at a time. Methods
differ in the overrides of METHODS only. Reported for each run: the mean reward of the first 3 and the last 5 steps, of the
best step, the first step from which the mean of 5 steps was 0.9 or more, and the run's time. The target is TARGET of
the optimum over the last 5 steps. Invariant: what is reported is read from the run's own files. It tunes nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.report import Report, end_on_sigterm, parser_of
from benchmarks.whole_run import RunFailed, run_to_end

TARGET = 0.9
"""Share of the optimum, as a mean over the last WINDOW steps: the demo's target."""
WINDOW = 5
METHODS = {
    "grpo": ("learner.advantage=grpo", "learner.critic=none"),
    "rloo": ("learner.advantage=rloo", "learner.critic=none"),
    "reinforce_plus_plus": ("learner.advantage=reinforce_plus_plus", "learner.critic=none"),
    "ppo_critic": ("learner.advantage=gae", "learner.critic=shared"),
}
"""Method -> overrides of the demo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """One run. `solved_at`: None when no WINDOW steps in a row reached the target."""

    method: str
    seed: int
    steps: int
    reward_first: float
    reward_last: float
    reward_best: float
    solved_at: int | None
    wall_s: float
    max_logprob_diff: float
    rewards: list[float]


def solved_at(rewards: list[float], *, target: float) -> int | None:
    """The step (from 1) that ends the first WINDOW steps whose mean is the target or more."""
    means = ((end, mean(rewards[end - WINDOW : end])) for end in range(WINDOW, len(rewards) + 1))
    return next((end for end, reward in means if reward >= target), None)


def read_run(folder: Path, *, method: str, seed: int) -> Learned:
    """The figures of a finished run. Raises ValueError when it made fewer than WINDOW steps."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    if len(rewards) < WINDOW:
        raise ValueError(f"{folder} must hold a run of at least {WINDOW} steps, got {len(rewards)}; set run.steps=40")
    names = ("steps", "reward_first", "reward_last", "reward_best", "wall_s", "max_logprob_diff")
    target = TARGET * (summary["reward_optimum"] or 1.0)
    reached = solved_at(rewards, target=target)
    return Learned(
        method=method, seed=seed, solved_at=reached, rewards=rewards, **{name: summary[name] for name in names}
    )


def learn(method: str, *, seed: int, folder: Path, overrides: list[str]) -> Learned:
    """One run to its end. Raises RunFailed."""
    name = f"{method}-{seed}"
    settings = [f"run.dir={folder}", f"run.name={name}", f"run.seed={seed}", *METHODS[method], *overrides]
    run_to_end([sys.executable, "-m", "learner.run", *settings], log=folder / f"{name}.log")
    learned = read_run(folder / name, method=method, seed=seed)
    print(_line(learned), flush=True)
    return learned


HEADER = f"{'method':>20} {'seed':>4} {'steps':>5} {'first':>6} {'last':>6} {'best':>6} {'0.9 at':>6} {'wall s':>7}"


def _line(run: Learned) -> str:
    reached = "never" if run.solved_at is None else run.solved_at
    return (
        f"{run.method:>20} {run.seed:>4} {run.steps:>5} {run.reward_first:6.3f} {run.reward_last:6.3f} "
        f"{run.reward_best:6.3f} {reached:>6} {run.wall_s:7.0f}"
    )


def summarise(runs: list[Learned]) -> dict[str, Any]:
    """Each method's worst last reward, and how many seeds reached the target with their last steps."""
    methods: dict[str, list[Learned]] = {}
    for run in runs:
        methods.setdefault(run.method, []).append(run)
    return {
        method: {
            "seeds": len(own),
            "at_target": sum(run.reward_last >= TARGET for run in own),
            "worst_last": min(run.reward_last for run in own),
            "mean_last": mean(run.reward_last for run in own),
        }
        for method, own in methods.items()
    }


def main(argv: list[str] | None = None) -> int:
    """All runs in turn, one seed of each method after another; prints a line for each, writes the JSON file."""
    parser = parser_of("learning", doc=__doc__)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--override", action="append", default=[], metavar="section.key=value", help="of all runs")
    arguments = parser.parse_args(argv)
    end_on_sigterm()
    report = Report("learning", about=f"target: mean reward of the last {WINDOW} steps >= {TARGET}")
    print(HEADER, flush=True)
    settings = {"methods": {name: METHODS[name] for name in arguments.methods}, "overrides": arguments.override}
    runs: list[Learned] = []
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as folder:
        for seed in arguments.seeds:
            for method in arguments.methods:
                try:
                    runs.append(learn(method, seed=seed, folder=Path(folder), overrides=arguments.override))
                except RunFailed as error:
                    print(f"error: {error}", file=sys.stderr)
                    return 1
                figures = {"methods": summarise(runs), "runs": [asdict(run) for run in runs]}
                report.write(arguments.json, settings=settings, figures=figures)  # what there is, if the next one fails
    for method, own in summarise(runs).items():
        print(f"{method:>20}: {own['at_target']} of {own['seeds']} seeds at the target, worst {own['worst_last']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
