"""One run as a person sees it: folder, display, signals, and the report at the end. Called by `learner.run`."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from buffers.errors import UnderstudyError
from configs.schema import Config
from learner.display import Display
from learner.pipeline import Pipeline
from learner.report import reward_curve_png, reward_curve_text, summary_table, write_summary
from learner.tracker import Tracker


def run_session(config: Config) -> int:
    """Run the pipeline in a fresh folder; returns the exit code."""
    console = Console()
    folder = fresh_folder(Path(config.run.dir) / config.run.name)
    logging.basicConfig(
        filename=folder / "log.txt", level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(), sort_keys=False))
    console.print(
        f"understudy: run '{config.run.name}', {config.run.steps} steps, results in {folder}", highlight=False
    )
    with (
        Tracker(folder) as tracker,
        Display(config.run.steps, title=config.run.name, optimum=config.run.reward_optimum) as display,
    ):
        pipeline = Pipeline(config, folder=folder, display=display, tracker=tracker)
        code, errors = asyncio.run(_supervise(pipeline))
    summary = {**pipeline.history.summary(), "stopped": code == 130}
    write_summary(folder / "summary.json", summary)
    if pipeline.history.rewards:
        report(console, pipeline.history.rewards, summary=summary, folder=folder)
    for error in errors:
        console.print(f"error: {error}", style="bold red", highlight=False, markup=False)
    if code == 130:
        say_how_to_go_on(console, config, folder=folder)
    return code


async def _supervise(pipeline: Pipeline) -> tuple[int, list[str]]:
    """Run to the end; SIGINT and SIGTERM ask for a clean stop, a second one is the default (at once)."""
    loop = asyncio.get_running_loop()
    asked = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal asked
        asked = True
        loop.remove_signal_handler(number)
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        pipeline.stop()

    running = asyncio.create_task(pipeline.run(), name="pipeline")
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await running
    except asyncio.CancelledError:
        if not asked:
            raise
    except BaseExceptionGroup as group:
        return 1, _messages(group)
    except UnderstudyError as error:
        return 1, [str(error)]
    return (130 if asked else 0), []


def _messages(group: BaseExceptionGroup[BaseException]) -> list[str]:
    """The leaf errors as lines; anything that is not ours is raised as the defect that it is."""
    lines = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            lines += _messages(error)
        elif isinstance(error, UnderstudyError):
            lines.append(str(error))
        else:
            raise group
    return lines


def fresh_folder(folder: Path) -> Path:
    """An empty folder of this name; an earlier run of the same name is moved aside, never overwritten."""
    if folder.exists():
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(folder.stat().st_mtime))
        aside = folder.with_name(f"{folder.name}.{stamp}")
        number = 1
        while aside.exists():
            number += 1
            aside = folder.with_name(f"{folder.name}.{stamp}-{number}")
        folder.rename(aside)
    folder.mkdir(parents=True)
    return folder


def report(console: Console, rewards: list[float], *, summary: dict[str, Any], folder: Path) -> None:
    """The reward curve in the terminal and as PNG, and the table of figures."""
    optimum = summary["reward_optimum"]
    reward_curve_png(folder / "reward.png", rewards, optimum=optimum, title=f"{summary['name']}: mean reward per step")
    print(reward_curve_text(rewards, optimum=optimum), file=sys.stdout)
    console.print(summary_table(summary, title=f"run '{summary['name']}'"))
    console.print(f"reward curve: {folder / 'reward.png'}   checkpoint: {folder / 'checkpoint'}", highlight=False)


def say_how_to_go_on(console: Console, config: Config, *, folder: Path) -> None:
    """After Ctrl-C: where the weights are, and the command that continues from them."""
    checkpoint = folder / "checkpoint"
    if not checkpoint.is_dir():
        console.print(
            "stopped before the first step; nothing was trained. Run the same command again.", highlight=False
        )
        return
    console.print(
        f"stopped. To go on from these weights:\n  python -m learner.run --config {folder / 'config.yaml'} "
        f"model.path={checkpoint} warm_start.traces='' run.name={config.run.name}-2",
        highlight=False,
        soft_wrap=True,
    )
