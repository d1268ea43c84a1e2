"""Which algorithms learn, and what old data costs: every recipe on the demo's game, over some seeds and bounds of the policy lag.

`python -m benchmarks.learning [--recipes grpo ...] [--lags 0 1 4] [--seeds 0 1 2] [--steps 40] [--family NAME] [--json PATH]`.
Whole runs of the product, one at a time; the lag is `buffer.max_policy_lag`, the most that there may be, and `mean_lag` what there
was. A recipe (`configs/recipes.py`) sets what its paper sets; learning rate, batch and critic's rate are the demo's for all. `demo`
is the demo's own configuration (decoupled PPO with truncated weights), `demo_naive` the same on the ratio to the behaviour policy.
`sdft` is not among them: the game's tasks have no hints. `--family`: a small random model of `benchmarks.families` in place of the
demo's, played by an agent loop (`configs/walk_env.yaml`): the chat template writes every prompt, gpt-oss's too. Reported for each:
the first update after which the mean of WINDOW batches was TARGET or more, and the mean reward of the last WINDOW batches.
Invariant: it tunes nothing; what does not learn is shown too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.families import FAMILIES, make_family
from benchmarks.harness import parser_of, play, whole_run
from configs.recipes import RECIPES

TARGET = 0.9
"""Share of the optimum, as a mean over WINDOW steps: the demo's target."""
WINDOW = 5
SETTINGS = {
    "demo": (),
    "demo_naive": ("learner.correction=naive",),
    **{recipe: (f"learner.recipe={recipe}",) for recipe in RECIPES if recipe != "sdft"},
}
"""Recipe -> what it changes of the demo's configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """One run. `solved_at`: None when no WINDOW steps in a row reached the target."""

    recipe: str
    lag: int
    seed: int
    reward_last: float
    solved_at: int | None
    mean_lag: float
    rewards: list[float]


def solved_at(rewards: Sequence[float], *, target: float) -> int | None:
    """The step (from 1) that ends the first WINDOW steps whose mean is the target or more."""
    means = ((end, mean(rewards[end - WINDOW : end])) for end in range(WINDOW, len(rewards) + 1))
    return next((end for end, reward in means if reward >= target), None)


def learned(steps: Sequence[dict[str, Any]], *, recipe: str, lag: int, seed: int) -> Learned:
    """The figures of a run's steps. Raises ValueError when they are fewer than WINDOW."""
    rewards = [step["reward/mean"] for step in steps]
    if len(rewards) < WINDOW:
        raise ValueError(f"a run must make at least {WINDOW} steps, got {len(rewards)}; set --steps 40")
    return Learned(
        recipe=recipe, lag=lag, seed=seed, reward_last=mean(rewards[-WINDOW:]),
        solved_at=solved_at(rewards, target=TARGET), mean_lag=mean(step["staleness/mean"] for step in steps),
        rewards=rewards,
    )  # fmt: skip


def summarise(runs: Sequence[Learned]) -> list[dict[str, Any]]:
    """One line for each recipe and lag: the seeds' steps to the target, and their last rewards."""
    cells: dict[tuple[str, int], list[Learned]] = {}
    for run in runs:
        cells.setdefault((run.recipe, run.lag), []).append(run)
    return [
        {
            "recipe": recipe,
            "lag": lag,
            "mean_lag": mean(run.mean_lag for run in own),
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
    found = {(cell["recipe"], cell["lag"]): cell for cell in cells}
    for recipe in dict.fromkeys(cell["recipe"] for cell in cells):
        row = [recipe]
        for cell in (found.get((recipe, lag)) for lag in lags):
            steps = ", ".join("never" if step is None else str(step) for step in cell["solved_at"]) if cell else ""
            row += [steps, f"{cell['reward_last']:.3f}", f"{cell['worst_last']:.3f}"] if cell else [""] * 3
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """All runs in turn, one seed of each recipe and lag after another."""
    runs: list[Learned] = []
    family, config, of_all = arguments.family, "demo", list(arguments.override)
    if family:
        config = "configs/walk_env.yaml"
        of_all.append(f"model.path={make_family(family, folder / family)}")
    for seed in arguments.seeds:
        for recipe in arguments.recipes:
            for lag in arguments.lags:
                settings = [f"run.steps={arguments.steps}", f"run.seed={seed}", f"buffer.max_policy_lag={lag}"]
                steps = whole_run(
                    folder, f"{recipe}-{lag}-{seed}", *SETTINGS[recipe], *settings, *of_all, config=config
                )
                runs.append(run := learned(steps, recipe=recipe, lag=lag, seed=seed))
                reached = "never" if run.solved_at is None else run.solved_at
                print(
                    f"{recipe}, lag {lag}, seed {seed}: {TARGET} at {reached}, last {run.reward_last:.3f}", flush=True
                )
                cells = summarise(runs)
                yield {"cells": cells, "table": table(cells).splitlines(), "runs": [asdict(run) for run in runs]}
    print(table(summarise(runs)))


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("learning", doc=__doc__)
    parser.add_argument("--recipes", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 4], help="most updates of sampling to training")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--family", choices=FAMILIES, metavar="NAME", help="a model of this family in place of the demo's"
    )
    parser.add_argument("--steps", type=int, default=40, help="updates of each run (default 40)")
    parser.add_argument("--override", action="append", default=[], metavar="section.key=value", help="of all runs")
    arguments = parser.parse_args(argv)
    if arguments.steps < WINDOW or min(arguments.lags) < 0:
        parser.error(f"--steps must be >= {WINDOW} and --lags >= 0, got {arguments.steps} and {arguments.lags}")
    return play("learning", arguments, measure, about=f"target: mean reward of {WINDOW} steps >= {TARGET}")


if __name__ == "__main__":
    sys.exit(main())
