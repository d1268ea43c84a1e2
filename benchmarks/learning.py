"""Which algorithms learn: every recipe on the demo's game, over some seeds, with data of the present version and older.

`python -m benchmarks.learning [--recipes grpo ...] [--lags 0 1 4] [--seeds 0 1 2] [--steps 40] [--json PATH]`. The player and the
delay line are those of `benchmarks.staleness`: no engine, so that all runs of a seed begin alike and their data is exactly `lag`
updates old. A recipe (`configs/recipes.py`) sets what its paper sets; learning rate, batch and critic's rate are the demo's for
all. Reported for each: the first update after which the mean of WINDOW batches was TARGET or more, and the mean reward of the last
WINDOW batches. `demo` is the demo's own configuration. `cpo` is not among them: the game's tasks have no hints.

`--join REPORT ...` plays nothing: it makes one table of reports that were written by parts, some seeds or lags each;
the rewards of single steps are left out.

`--whole-runs` plays the product instead (engine, agents, environment, learner; `python -m learner.run`, one run at a time), with
`buffer.max_policy_lag` as the lag, which is then the most that there may be. Invariant: it tunes nothing; what does not learn is
shown too.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.harness import Report, RunFailed, end_on_sigterm, parser_of, run_to_end
from benchmarks.staleness import Bench
from configs.load import FOLDER, load_config
from configs.recipes import RECIPES

TARGET = 0.9
"""Share of the optimum, as a mean over WINDOW steps: the demo's target."""
WINDOW = 5
DEMO = "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """One run. `solved_at`: None when no WINDOW steps in a row reached the target."""

    recipe: str
    lag: int
    seed: int
    reward_last: float
    solved_at: int | None
    wall_s: float
    rewards: list[float]


def overrides_of(recipe: str) -> list[str]:
    """What a recipe changes of the demo's configuration."""
    return [] if recipe == DEMO else [f"learner.recipe={recipe}"]


def solved_at(rewards: Sequence[float], *, target: float) -> int | None:
    """The step (from 1) that ends the first WINDOW steps whose mean is the target or more."""
    means = ((end, mean(rewards[end - WINDOW : end])) for end in range(WINDOW, len(rewards) + 1))
    return next((end for end, reward in means if reward >= target), None)


def learned(rewards: list[float], *, recipe: str, lag: int, seed: int, wall_s: float) -> Learned:
    """The figures of a run. Raises ValueError when it made fewer than WINDOW steps."""
    if len(rewards) < WINDOW:
        raise ValueError(f"a run must make at least {WINDOW} steps, got {len(rewards)}; set --steps 40")
    return Learned(
        recipe=recipe, lag=lag, seed=seed, reward_last=mean(rewards[-WINDOW:]),
        solved_at=solved_at(rewards, target=TARGET), wall_s=wall_s, rewards=rewards,
    )  # fmt: skip


class DelayLine:
    """Learns without an engine, from data that is exactly `lag` updates old."""

    def __init__(self, folder: Path, *, steps: int, overrides: Sequence[str]) -> None:
        self._folder = folder
        self._steps = steps
        self._overrides = list(overrides)
        self._starts: dict[int, Path] = {}

    def __call__(self, recipe: str, *, lag: int, seed: int) -> Learned:
        """One run to its end."""
        began = time.monotonic()
        config = load_config(FOLDER / "demo.yaml", overrides=[*overrides_of(recipe), *self._overrides])
        bench = Bench(folder=self._folder, config=config, steps=self._steps)
        if seed not in self._starts:
            self._starts[seed] = Bench(
                folder=self._folder, config=load_config(FOLDER / "demo.yaml"), steps=self._steps
            ).start(seed)
        run = bench.run(self._starts[seed], k=lag, correction=config.learner.correction, seed=seed)
        return learned(run.rewards, recipe=recipe, lag=lag, seed=seed, wall_s=time.monotonic() - began)


class WholeRuns:
    """Learns with the product, in a process of its own. Raises RunFailed."""

    def __init__(self, folder: Path, *, steps: int, overrides: Sequence[str]) -> None:
        self._folder = folder
        self._settings = [f"run.dir={folder}", f"run.steps={steps}", *overrides]

    def __call__(self, recipe: str, *, lag: int, seed: int) -> Learned:
        """One run to its end."""
        name = f"{recipe}-{lag}-{seed}"
        settings = [*self._settings, f"run.name={name}", f"run.seed={seed}", f"buffer.max_policy_lag={lag}"]
        began = time.monotonic()
        run_to_end(
            [sys.executable, "-m", "learner.run", *overrides_of(recipe), *settings], log=self._folder / f"{name}.log"
        )
        lines = (self._folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rewards = [line["reward/mean"] for line in map(json.loads, lines) if "reward/mean" in line]
        return learned(rewards, recipe=recipe, lag=lag, seed=seed, wall_s=time.monotonic() - began)


def summarise(runs: Sequence[Learned]) -> list[dict[str, Any]]:
    """One line for each recipe and lag: the seeds' steps to the target, and their last rewards."""
    cells: dict[tuple[str, int], list[Learned]] = {}
    for run in runs:
        cells.setdefault((run.recipe, run.lag), []).append(run)
    return [
        {
            "recipe": recipe,
            "lag": lag,
            "seeds": len(own),
            "solved_at": [run.solved_at for run in own],
            "reward_last": mean(run.reward_last for run in own),
            "worst_last": min(run.reward_last for run in own),
        }
        for (recipe, lag), own in cells.items()
    ]


def table(cells: Sequence[dict[str, Any]]) -> str:
    """The results for a person: a row for each recipe, three columns for each lag."""
    lags = sorted({cell["lag"] for cell in cells})
    heads = [f"lag {lag}: {what}" for lag in lags for what in (f"steps to {TARGET}", "last", "worst")]
    lines = ["| recipe | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for recipe in dict.fromkeys(cell["recipe"] for cell in cells):
        row = [recipe]
        for lag in lags:
            cell = next((cell for cell in cells if (cell["recipe"], cell["lag"]) == (recipe, lag)), None)
            if cell is None:
                row += ["", "", ""]
                continue
            steps = ", ".join("never" if step is None else str(step) for step in cell["solved_at"])
            row += [steps, f"{cell['reward_last']:.3f}", f"{cell['worst_last']:.3f}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def figures_of(runs: Sequence[Learned]) -> dict[str, Any]:
    """What a report says of them."""
    cells = summarise(runs)
    return {"cells": cells, "table": table(cells).splitlines(), "runs": [asdict(run) for run in runs]}


def joined(reports: Sequence[Path]) -> tuple[list[Learned], dict[str, Any]]:
    """The runs of all reports, by recipe, lag and seed, and their settings. Raises ValueError for two that hold the same run,
    or that were made with other settings."""
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in reports]
    settings = {name: parts[0]["settings"][name] for name in ("steps", "whole_runs", "override")}
    names = [DEMO, *RECIPES]
    found: dict[tuple[int, int, int], Learned] = {}
    for path, part in zip(reports, parts, strict=True):
        for name, value in settings.items():
            if (other := part["settings"][name]) != value:
                raise ValueError(
                    f"--join needs reports of the same {name}, got {value} and, in {path}, {other}; play one again"
                )
        for run in (Learned(**{**each, "rewards": []}) for each in part["runs"]):
            if (key := (names.index(run.recipe), run.lag, run.seed)) in found:
                raise ValueError(
                    f"--join needs each run once, got {run.recipe}, lag {run.lag}, seed {run.seed} twice; leave one out"
                )
            found[key] = run
    runs = [found[key] for key in sorted(found)]
    seen = {
        "recipes": list(dict.fromkeys(run.recipe for run in runs)),
        "lags": sorted({run.lag for run in runs}),
        "seeds": sorted({run.seed for run in runs}),
    }
    return runs, seen | settings


def main(argv: list[str] | None = None) -> int:
    """All runs in turn, one seed of each recipe and lag after another; the table; the JSON file after each run."""
    names = [DEMO, *RECIPES]
    parser = parser_of("learning", doc=__doc__)
    parser.add_argument("--recipes", nargs="+", default=names, choices=names)
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 4], help="updates between sampling and training")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40, help="updates of each run (default 40)")
    parser.add_argument("--whole-runs", action="store_true", help="play the product instead of the delay line")
    parser.add_argument("--override", action="append", default=[], metavar="section.key=value", help="of all runs")
    parser.add_argument(
        "--join", nargs="+", type=Path, default=None, metavar="REPORT", help="make one table of these reports"
    )
    arguments = parser.parse_args(argv)
    if arguments.join:
        try:
            known, settings = joined(arguments.join)
        except ValueError as error:
            parser.error(str(error))
        Report("learning", about="from reports").write(arguments.json, settings=settings, figures=figures_of(known))
        print(table(summarise(known)))
        return 0
    if arguments.steps < WINDOW or min(arguments.lags) < 0:
        parser.error(f"--steps must be >= {WINDOW} and --lags >= 0, got {arguments.steps} and {arguments.lags}")
    end_on_sigterm()
    torch.set_num_threads(1)
    report = Report("learning", about=f"target: mean reward of {WINDOW} steps >= {TARGET}")
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "join")}
    runs: list[Learned] = []
    folder = Path(tempfile.mkdtemp(prefix="understudy-bench-"))
    make: Callable[..., Any] = WholeRuns if arguments.whole_runs else DelayLine
    learn = make(folder, steps=arguments.steps, overrides=arguments.override)
    try:
        for seed in arguments.seeds:
            for recipe in arguments.recipes:
                for lag in arguments.lags:
                    runs.append(run := learn(recipe, lag=lag, seed=seed))
                    reached = "never" if run.solved_at is None else run.solved_at
                    print(
                        f"{recipe}, lag {lag}, seed {seed}: {TARGET} at {reached}, last {run.reward_last:.3f}, {run.wall_s:.0f} s",
                        flush=True,
                    )
                    # what there is, if the next fails
                    report.write(arguments.json, settings=settings, figures=figures_of(runs))
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(summarise(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
