"""`understudy compare runs/a runs/b`: what differs between runs in configuration and figures, and one picture of their curves.

Reads what runs leave in their folders (config.yaml, metrics.jsonl, summary.json), of finished runs and of running ones, and writes
nothing but the picture. Invariant: a figure is shown as the run wrote it, or as the mean that its name says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from buffers.errors import UnderstudyError
from configs.bounded_yaml import read_yaml
from learner.reporting.display import Terminal, curves_png, flat
from learner.reporting.run_record import CONFIG, METRICS, RunRecord, figures, read_record

LAST_STEPS = 5
"""Steps that a run's last figures are the mean of."""
FIGURES = (
    "reward/mean", "val/mean", "val/best", "batch/equal_groups", "policy/entropy", "policy/kl_ref", "policy/grad_norm",
    "policy/max_logprob_diff", "staleness/mean", "agent_loop/rounds_mean", "batch/trained_tokens",
    "throughput/tokens_per_s", "time/step_s", "time/wait_s",
)  # fmt: skip
"""Metrics of docs/metrics.md that the table shows, where a run has them."""


class CompareError(ValueError):
    """A folder that holds no run; the message is for the user."""


@dataclass(frozen=True, kw_only=True)
class ComparedRun(RunRecord):
    """What one run left."""

    label: str
    """Its folder's name; the path, where two have the same name."""
    config: Mapping[str, Any]
    """Keys with dots -> values."""

    def last(self, name: str) -> float | None:
        """Mean of the last `LAST_STEPS` values of a metric; the last one of a validation. None: it has none."""
        if name.startswith("val/"):
            return next((line[name] for line in reversed(self.validations) if name in line), None)
        values = [line[name] for line in self.steps if name in line][-LAST_STEPS:]
        return sum(values) / len(values) if values else None


def read_run(folder: Path, *, label: str = "") -> ComparedRun:
    """Raises CompareError when the folder holds no run."""
    for name in (CONFIG, METRICS):
        if not (folder / name).is_file():
            raise CompareError(
                f"a run's folder must hold {name}, got {folder} without it; name folders such as runs/demo"
            )
    try:
        config = flat(read_yaml(folder / CONFIG) or {})
        return ComparedRun(**vars(read_record(folder)), label=label or folder.name, config=config)
    except (ValueError, OSError, UnderstudyError) as error:
        raise CompareError(
            f"{folder} must hold the files of a run, config.yaml and others, got one that cannot be read: {error}"
        ) from None


def config_differences(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Key -> its value in each run (`...`: it has none), for keys that are not the same in all. Without the run's own name."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    values = {key: [run.config.get(key, ...) for run in runs] for key in keys if key != "run.name"}
    return {key: each for key, each in values.items() if any(one != each[0] for one in each)}


def config_table(runs: Sequence[ComparedRun]) -> Table:
    """A row for each key that differs."""
    table = Table(title="configuration: what differs", title_justify="left")
    table.add_column("key", style="bold", overflow="fold")
    for run in runs:
        table.add_column(run.label, overflow="fold")
    for key, values in config_differences(runs).items():
        table.add_row(key, *("(no such key)" if value is ... else json.dumps(value) for value in values))
    return table


def figures_table(runs: Sequence[ComparedRun]) -> Table:
    """Steps and time, then the mean of each figure over the last steps."""
    table = Table(title=f"figures: means of the last {LAST_STEPS} steps", title_justify="left")
    table.add_column("figure", style="bold")
    for run in runs:
        table.add_column(run.label, justify="right")
    table.add_row("steps", *(str(len(run.steps)) for run in runs))
    shared = min(len(run.steps) for run in runs)
    if shared and any(len(run.steps) != shared for run in runs):
        until = [[line["reward/mean"] for line in run.steps[:shared]][-LAST_STEPS:] for run in runs]
        table.add_row(f"reward/mean at step {shared}", *(_shown(sum(each) / len(each)) for each in until))
    for name in FIGURES:
        values = [run.last(name) for run in runs]
        if any(value is not None for value in values):
            table.add_row(name, *map(_shown, values))
    table.add_row("seconds in all", *(_shown(figures(run.summary).get("wall_s")) for run in runs))
    return table


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"


def main(argv: Sequence[str] | None = None, *, program: str = "understudy compare") -> int:
    """Exit codes: 0 printed, 2 a folder holds no run."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Print what differs between runs in configuration and figures, and draw their curves.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, two or more: runs/a runs/b")
    parser.add_argument(
        "--picture", type=Path, help="where the curves go (default: compare-A-B.png beside the first run)"
    )
    arguments = parser.parse_args(argv)
    folders: list[Path] = arguments.runs
    if len(folders) < 2:
        parser.error(f"compare needs two runs or more, got only {folders[0]}; name another one")
    names = [folder.resolve().name for folder in folders]
    try:
        runs = [
            read_run(folder, label=name if names.count(name) == 1 else str(folder))
            for folder, name in zip(folders, names, strict=True)
        ]
    except CompareError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    console = Terminal()
    if config_differences(runs):
        console.print(config_table(runs))
    else:
        console.print("configuration: the same but for the name")
    console.print(figures_table(runs))
    if any(run.steps for run in runs):
        picture: Path = arguments.picture or folders[0].resolve().parent / f"compare-{'-'.join(names)}.png"
        curves_png(picture, [(run.label, run) for run in runs])
        console.print(f"curves: {picture}", highlight=False, soft_wrap=True)
    else:
        console.print("curves: none of them has made a step yet", highlight=False)
    return 0
