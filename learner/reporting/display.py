"""`Display`: the terminal output of a live run; and what the run leaves for people: picture, summary file, table.

Called by the pipeline from its event loop. On a terminal it is a live panel, redrawn four times a second by rich's own
thread; elsewhere it is one plain line per step. The invariant: a call only stores numbers (or prints one line), so the
loop is never held up by drawing. It measures nothing.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from buffers.disk import replacing
from buffers.terminal import GuardedStream, shown
from learner.reporting.run_record import RunRecord

# `Terminal`: rich's console, in which only rich itself controls the terminal. Texts and cells are taken as they are (no markup
# in brackets, no `:names:` of emoji), and pass `buffers.terminal.shown`.


class Terminal(Console):
    """`file`: None: the standard output. `options`: of rich's console."""

    def __init__(self, file: TextIO | None = None, **options: Any) -> None:
        stream = sys.stdout if file is None else file
        unguarded = stream.stream if isinstance(stream, GuardedStream) else stream
        super().__init__(file=cast(TextIO, unguarded), markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """All that is printed passes here, the parts of tables and panels too."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown(segment.text))


logger = logging.getLogger(__name__)

BARS, WIDTH = "▁▂▃▄▅▆▇█", 60


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """Everything on the screen. Replaced as a whole: the drawing thread never sees half of an update."""

    phase: str = ""
    phase_began_s: float = 0.0
    step: int = 0
    rewards: tuple[float, ...] = ()
    sft: str = ""
    """How far SFT is."""
    step_times_s: tuple[float, ...] = ()
    mean_lag: float = 0.0
    max_lag: float = 0.0
    tokens_per_s: float = 0.0
    prompts_waiting: int = 0
    episodes_running: int = 0
    groups_ready: int = 0
    engines: tuple[str, ...] = ()
    page: str = ""


class Display:
    """Use as a context manager around the run. Without a terminal: plain lines."""

    def __init__(
        self,
        total_steps: int,
        *,
        title: str = "understudy",
        optimum: float | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._title = title
        self._optimum = optimum
        self._console = console or Terminal()
        self._clock = clock
        self._shown = _Shown()
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            # What libraries print goes where the process sends it, not through the panel.
            self._live = Live(
                get_renderable=self.render,
                console=self._console,
                refresh_per_second=4,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what the run is busy with before its first step; prints `name ... 12.3 s` when it ends."""
        began_s = self._clock()
        self._shown = replace(self._shown, phase=name, phase_began_s=began_s)
        if self._live is None:
            self._say(f"{name} ...")
        outcome = "failed after "
        try:
            yield
            outcome = ""
        finally:
            self._shown = replace(self._shown, phase="")
            self._say(f"{name} ... {outcome}{self._clock() - began_s:.1f} s")

    @property
    def phase_name(self) -> str:
        """What the run is busy with before its first step or after its last one; empty: with steps."""
        return self._shown.phase

    def note(self, line: str) -> None:
        """Something to know: a line on the terminal and in the log."""
        logger.warning(line)
        self._say(line)

    def update(
        self, step: int, *, reward: float, mean_lag: float, max_lag: float, tokens_per_s: float, step_s: float
    ) -> None:
        """One step was made. `reward`: mean score of its batch; lags in policy versions; `step_s`: wall time."""
        before = self._shown
        self._shown = replace(
            before,
            step=step,
            rewards=(*before.rewards, reward),
            step_times_s=(*before.step_times_s, step_s)[-WINDOW:],
            mean_lag=mean_lag,
            max_lag=max_lag,
            tokens_per_s=tokens_per_s,
        )
        if self._live is None:
            self._say(self._line())

    def learned(self, step: int, *, of: int, loss: float, tokens_per_s: float, step_s: float) -> None:
        """One update of SFT was made. `loss`: in nats a token."""
        line = f"SFT {step}/{of}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  {step_s:.2f} s"
        self._shown = replace(self._shown, sft=line)
        if self._live is None:
            self._say(line)

    def held_out(self, step: int, *, loss: float) -> None:
        """The loss of held-out demonstrations under the weights of SFT's `step`."""
        self._say(f"validation of SFT step {step}  loss {loss:.4f}")

    def validated(self, step: int, *, mean: float, best: float) -> None:
        """A validation of the weights of `step` ended: mean score, and mean of each task's best."""
        self._say(f"validation of step {step}  mean {mean:.3f}  best {best:.3f}")

    def played(self, *, scored: int, of: int, running: int, failed: int) -> None:
        """How far an evaluation is, in episodes. `failed`: attempts."""
        self._say(f"{scored} of {of} episodes scored   {running} running   {failed} attempts failed")

    def queues(self, *, prompts_waiting: int, episodes_running: int, groups_ready: int) -> None:
        """How full the pipe is at this moment."""
        self._shown = replace(
            self._shown, prompts_waiting=prompts_waiting, episodes_running=episodes_running, groups_ready=groups_ready
        )

    def engines(self, lines: Sequence[str]) -> None:
        """What each engine does at this moment, in a line."""
        self._shown = replace(self._shown, engines=tuple(lines))

    def page(self, url: str) -> None:
        """The address of the run's live page."""
        self._shown = replace(self._shown, page=url)

    def render(self) -> RenderableType:
        """The panel for what was stored last."""
        shown = self._shown
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold")
        rows.add_column()
        bar = Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(total=self._total_steps, completed=shown.step, width=40), self._progress(shown))
        if shown.phase:
            rows.add_row("start-up", Text(f"{shown.phase} ... {self._clock() - shown.phase_began_s:.0f} s"))
        rows.add_row("step", bar)
        if shown.sft:
            rows.add_row("SFT", Text(shown.sft))
        if shown.rewards:
            rows.add_row("reward", Text(self._reward(shown)))
            rows.add_row("", Text(sparkline(shown.rewards, top=self._optimum), style="cyan"))
            rows.add_row("staleness", Text(f"mean {shown.mean_lag:.2f}   max {shown.max_lag:.0f} versions"))
            rows.add_row("speed", Text(f"{shown.tokens_per_s:,.0f} tokens/s   {shown.step_times_s[-1]:.2f} s/step"))
        rows.add_row(
            "queues",
            Text(
                f"{shown.prompts_waiting} prompts waiting   {shown.episodes_running} episodes running   "
                f"{shown.groups_ready} groups ready"
            ),
        )
        if shown.engines:
            rows.add_row("engines", Text("\n".join(shown.engines)))
        if shown.page:
            rows.add_row("page", Text(shown.page))
        return Panel(Group(rows), title=self._title, title_align="left", expand=False)

    def _progress(self, shown: _Shown) -> Text:
        text = f"{shown.step}/{self._total_steps}"
        if shown.step_times_s:
            left_s = (self._total_steps - shown.step) * sum(shown.step_times_s) / len(shown.step_times_s)
            text += f"   {_duration(left_s)} left"
        return Text(text)

    def _reward(self, shown: _Shown) -> str:
        best = "" if self._optimum is None else f"   optimum {self._optimum:g}"
        return (
            f"last {shown.rewards[-1]:.3f}   mean of {WINDOW} {moving_average(shown.rewards[-WINDOW:])[-1]:.3f}   "
            f"best {max(shown.rewards):.3f}{best}"
        )

    def _line(self) -> str:
        shown = self._shown
        return (
            f"step {shown.step}/{self._total_steps}  reward {shown.rewards[-1]:.3f}  "
            f"lag {shown.mean_lag:.2f}/{shown.max_lag:.0f}  {shown.tokens_per_s:,.0f} tokens/s  "
            f"{shown.step_times_s[-1]:.2f} s  waiting {shown.prompts_waiting}  running {shown.episodes_running}  "
            f"ready {shown.groups_ready}"
        )

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def sparkline(values: Sequence[float], *, top: float | None) -> str:
    """The last WIDTH values as bars, from 0 (or the lowest value) to `top` (or the highest value)."""
    part = values[-WIDTH:]
    low = min(0.0, *part)
    span = max(*part, low if top is None else top) - low or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in part)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# What a run leaves for people: the reward curve as a picture, the summary file and its table. Figures that were already measured;
# the files are replaced atomically, so that a reader never sees half of one.

WINDOW = 10
"""Steps in a moving average."""


def moving_average(values: Sequence[float], *, window: int = WINDOW) -> list[float]:
    """Mean of each value and of those before it, `window` in all; the first ones have fewer."""
    return [sum(part) / len(part) for part in (values[max(0, end - window) : end] for end in range(1, len(values) + 1))]


def reward_curve_png(path: Path, rewards: Sequence[float], *, optimum: float | None, title: str) -> None:
    """Draw mean score over steps (the first step is 1). Raises ValueError without any step, and for scores that are not finite."""
    if not rewards:
        raise ValueError("a reward curve needs >= 1 step, got 0; call it after the first step")
    if bad := [value for value in rewards if not math.isfinite(value)]:
        raise ValueError(f"rewards must be finite, got {bad[0]}; leave such steps out")
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
            table.add_row(name, _cell(value))
    return table


def flat(tree: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, Mapping) and value
        found |= flat(value, prefix=f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def _cell(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
