"""What a run leaves for people: the reward curve as a picture and as text, the summary file and its table.

Called by the pipeline at the end of a run (and now and then before). Pure functions of figures that were already
measured; the files are replaced atomically, so a reader never sees half of one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from buffers.disk import replacing
from learner.reporting.run_record import RunRecord

WINDOW = 10
"""Steps in a moving average."""


def moving_average(values: Sequence[float], *, window: int = WINDOW) -> list[float]:
    """Mean of each value and of those before it, `window` in all; the first ones have fewer."""
    return [sum(part) / len(part) for part in (values[max(0, end - window) : end] for end in range(1, len(values) + 1))]


def reward_curve_png(path: Path, rewards: Sequence[float], *, optimum: float | None, title: str) -> None:
    """Draw mean score over steps (the first step is 1). Raises ValueError without any step."""
    _refuse_empty(rewards)
    with _axes(path, title=title) as axes:
        axes.plot(range(1, len(rewards) + 1), rewards, "o", color="#7aa6d8", markersize=4, alpha=0.7, label="one step")
        averages = moving_average(rewards)
        axes.plot(range(1, len(rewards) + 1), averages, color="#1f4e8c", linewidth=2.2, label=f"mean of {WINDOW} steps")
        if optimum is not None:
            axes.axhline(optimum, color="#2e8b57", linestyle="--", linewidth=1.4, label=f"optimum {optimum:g}")
        axes.set_xlim(0.5, len(rewards) + 0.5)


def curves_png(path: Path, runs: Sequence[tuple[str, RunRecord]]) -> None:
    """Draw several runs, each with its label: each step as a dot, its moving average as a line, validations as squares."""
    with _axes(path, title=f"mean of {WINDOW} steps; dots: each step, squares: validation") as axes:
        for number, (label, run) in enumerate(runs):
            color = f"C{number % 10}"
            steps, rewards = [int(line["step"]) for line in run.steps], [line["reward/mean"] for line in run.steps]
            axes.plot(steps, rewards, ".", color=color, alpha=0.35)
            axes.plot(steps, moving_average(rewards), color=color, linewidth=2.0, label=label)
            for line in run.validations:
                axes.plot(
                    line.get("val/step", line["step"]), line["val/mean"], "s", color=color, markerfacecolor="white"
                )


@contextmanager
def _axes(path: Path, *, title: str) -> Iterator[Any]:
    """Axes of mean score over steps; drawn into `path` at the end."""
    from matplotlib.figure import Figure  # not pyplot, which takes half a second more to import
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel="step", ylabel="mean score of the batch")
    yield axes
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    with replacing(path) as scratch:
        figure.savefig(scratch, dpi=150, format="png")


def reward_curve_text(rewards: Sequence[float], *, optimum: float | None, width: int = 72, height: int = 12) -> str:
    """The curve for a terminal, at most `width` wide: `*` is the mean of a column's steps, `-` the optimum."""
    _refuse_empty(rewards)
    columns = min(max(width - 9, 1), len(rewards))
    means = [_column_mean(rewards, column=column, columns=columns) for column in range(columns)]
    known = [*means, *([] if optimum is None else [optimum])]
    low, high = min(0.0, *known), max(known)
    high = high if high > low else low + 1.0

    def row_of(value: float) -> int:
        return round((high - value) / (high - low) * (height - 1))

    grid = [[" "] * columns for _ in range(height)]
    if optimum is not None:
        grid[row_of(optimum)] = ["-"] * columns
    for column, mean in enumerate(means):
        grid[row_of(mean)][column] = "*"
    labels = [f"{high - (high - low) * row / max(height - 1, 1):7.2f}" for row in range(height)]
    lines = [f"{label} |{''.join(cells).rstrip()}" for label, cells in zip(labels, grid, strict=True)]
    last = str(len(rewards))
    return "\n".join(
        [*lines, f"{'':7} +{'-' * columns}", f"{'step':>7}  1{last.rjust(max(columns - 1, len(last) + 1))}"]
    )


def write_summary(path: Path, summary: Mapping[str, object]) -> None:
    """Write the run's final figures as JSON. Raises ValueError for NaN and infinity: a summary holds finite numbers."""
    text = json.dumps(dict(summary), indent=2, allow_nan=False) + "\n"
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def summary_table(summary: Mapping[str, object], *, title: str) -> Table:
    """The final figures as a table of two columns; nested mappings become `outer.inner` rows."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in flat(summary).items():
        if value != {}:
            table.add_row(name, _shown(value))
    return table


def _refuse_empty(rewards: Sequence[float]) -> None:
    if not rewards:
        raise ValueError("a reward curve needs >= 1 step, got 0; call it after the first step")
    bad = [value for value in rewards if not math.isfinite(value)]
    if bad:
        raise ValueError(f"rewards must be finite, got {bad[0]}; leave such steps out")


def _column_mean(rewards: Sequence[float], *, column: int, columns: int) -> float:
    part = rewards[column * len(rewards) // columns : (column + 1) * len(rewards) // columns]
    return sum(part) / len(part)


def flat(tree: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, Mapping) and value
        found |= flat(value, prefix=f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def _shown(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
