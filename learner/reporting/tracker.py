"""`Tracker`: writes each step's figures to `metrics.jsonl` and to the trackers that the configuration names.

Called by the pipeline once per step. The invariant: one line per step, in order, on disk when `log` returns, and every
number in it finite; a value that is not is left out and counted. It computes and shows nothing. Trackers that are not
installed are refused before anything starts.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from buffers.errors import UnderstudyError

PROJECT = "understudy"


class TrackerError(UnderstudyError):
    """A tracker that the configuration names cannot be used."""


class Sink(Protocol):
    """One place that figures go to."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Tracker:
    """Owns `<folder>/metrics.jsonl` and its sinks. Use it as a context manager, or call `close`.

    `start`: the run is resumed after this step; later lines of the file belong to steps that are made again, and are dropped.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        trackers: Sequence[str] = ("tensorboard",),
        name: str = "run",
        config: Mapping[str, Any] | None = None,
        start: int = 0,
    ) -> None:
        self._path = Path(folder) / "metrics.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.earlier = cut_lines(self._path, after=start)
        """Figures of the steps made before, as they were logged."""
        self._lines = self._path.open("a", encoding="utf-8")
        self._sinks = [
            SINKS[tracker](folder=self._path.parent, name=name, config=dict(config or {}), start=start)
            for tracker in trackers
        ]
        self.num_refused = 0
        """Values left out so far because they were NaN or infinite."""

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write one step and return what was written: floats only, with `tracker/refused` when values were left out."""
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        refused = len(numbers) - len(finite)
        if refused:
            self.num_refused += refused
            finite["tracker/refused"] = float(refused)
        self._lines.write(json.dumps({"step": step, **finite}) + "\n")
        self._lines.flush()
        for sink in self._sinks:
            sink.log(step, finite)
        return finite

    def close(self) -> None:
        """Close everything. A second call does nothing."""
        if not self._lines.closed:
            self._lines.close()
            for sink in self._sinks:
                sink.close()


def check_trackers(names: Sequence[str]) -> None:
    """Raises TrackerError for one whose package is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise TrackerError(
            f"run.trackers must name installed packages, got {missing[0]} (not installed); "
            f"pip install {missing[0]}, or leave it out"
        )


class TensorBoardSink:
    """Event files in `<folder>/tensorboard/`."""

    def __init__(self, *, folder: Path, name: str, config: dict[str, Any], start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # `purge_step`: TensorBoard hides what earlier files say about this step and later ones.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases; its own environment variables choose account and mode."""

    def __init__(self, *, folder: Path, name: str, config: dict[str, Any], start: int) -> None:
        import wandb

        self._run = wandb.init(project=PROJECT, name=name, dir=str(folder), config=config)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """MLflow; `MLFLOW_TRACKING_URI` says where."""

    def __init__(self, *, folder: Path, name: str, config: dict[str, Any], start: int) -> None:
        import mlflow

        self._mlflow = mlflow
        self._traces = folder / "traces.jsonl"
        mlflow.set_experiment(PROJECT)
        mlflow.start_run(run_name=name)
        mlflow.log_dict(config, "config.json")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(figures), step=step)

    def close(self) -> None:
        if self._traces.exists():
            self._mlflow.log_artifact(str(self._traces))
        self._mlflow.end_run()


class SwanlabSink:
    """SwanLab; its own settings choose account and mode."""

    def __init__(self, *, folder: Path, name: str, config: dict[str, Any], start: int) -> None:
        import swanlab

        self._run = swanlab.init(project=PROJECT, experiment_name=name, logdir=str(folder / "swanlab"), config=config)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, Callable[..., Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "swanlab": SwanlabSink,
}


def cut_lines(path: Path, *, after: int) -> list[dict[str, Any]]:
    """Drops lines of a JSONL file that belong to later steps, and a last one that a crash left unfinished; those that stay."""
    kept = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if line["step"] <= after:
                kept.append(line)
        scratch = path.with_name(f".{path.name}.tmp")
        scratch.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(scratch, path)
    return kept
