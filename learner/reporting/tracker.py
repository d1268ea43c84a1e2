"""`Tracker`: writes each step's figures to `metrics.jsonl` and to the trackers that the configuration names.

Called by the pipeline once per step. Invariants: one line per step, whole and in order, on disk when `log` returns or as soon as
the disk takes it, and every number in it finite; a value that is not is left out and counted; what is written for people to look
at, here and elsewhere (`attempt`), never ends a run, and a tracker that does not answer holds up none: each has a thread of its
own. A run that is resumed continues the trackers' runs, whose ids `trackers.json` keeps. It computes and shows nothing. Trackers
that are not installed are refused before anything starts.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from buffers.disk import append, check_takes, replacing
from buffers.errors import UnderstudyError
from buffers.records import Row, TrainBatch

PROJECT = "understudy"
IDS = "trackers.json"
MOST_WAITING = 1000
"""Steps that wait for a tracker; it is not given those that come after them."""
SOON_S = 3.0
CLOSE_S = 60.0
"""Seconds that a run waits in its end for what its trackers have not taken yet, all of them together."""
logger = logging.getLogger(__name__)


class TrackerError(UnderstudyError):
    """A tracker that the configuration names cannot be used."""


class Sink(Protocol):
    """One place that figures go to. `id`: its name for the run, by which a later process continues it."""

    id: str

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Tracker:
    """Owns `<folder>/metrics.jsonl` and its sinks. Use it as a context manager, or call `close`.

    `start`: the run is resumed after this step; later lines of the file belong to steps that are made again, and are dropped.
    `warn` gets a line for what cannot be written, once for each name, and one in the end with how often it was left out.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        trackers: Sequence[str] = ("tensorboard",),
        name: str = "run",
        config: Mapping[str, Any] | None = None,
        start: int = 0,
        warn: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._warn = warn
        self._failed: dict[str, int] = {}
        """Name -> how often it could not be written."""
        self._path = Path(folder) / "metrics.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.earlier = cut_lines(self._path, after=start)
        """Figures of the steps made before, as they were logged."""
        self._waiting: list[str] = []
        """Lines that the disk has not taken yet."""
        ids = self._path.with_name(IDS)
        known: dict[str, str] = json.loads(ids.read_text(encoding="utf-8")) if ids.is_file() else {}
        one_at_a_time = threading.Lock()

        def begin(tracker: str) -> Sink:
            place = {"folder": self._path.parent, "name": name, "config": dict(config or {}), "start": start}
            sink = SINKS[tracker](**place, known=known.get(tracker))
            with one_at_a_time, replacing(ids) as scratch:
                known[tracker] = sink.id
                scratch.write_text(json.dumps(known) + "\n", encoding="utf-8")
            return sink

        self.threads = {
            tracker: SinkThread(partial(begin, tracker), attempt=partial(self.attempt, tracker)) for tracker in trackers
        }
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
        self._waiting.append(json.dumps({"step": step, **finite}) + "\n")
        self.attempt(self._path.name, self._write_lines)
        for tracker, thread in self.threads.items():
            self.attempt(tracker, partial(thread.log, step, finite))
        return finite

    def attempt(self, name: str, write: Callable[[], object]) -> None:
        """Write something for people to look at: whatever it raises costs a line for each name, and not the run."""
        try:
            write()
        except Exception as error:  # of any kind: trackers are programs of others
            logger.warning("%s could not be written", name, exc_info=error)
            self._failed[name] = self._failed.get(name, 0) + 1
            if self._failed[name] == 1:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                follows = "its lines wait" if name == self._path.name else f"its figures are in {self._path}"
                self._warn(f"note: {name} could not be written ({reason}); the run continues, {follows}")

    def _write_lines(self) -> None:
        if self._waiting:
            append(self._path, "".join(self._waiting))
            self._waiting.clear()

    def close(self) -> None:
        """Close everything. A second call does nothing."""
        self.attempt(self._path.name, self._write_lines)
        until = time.monotonic() + CLOSE_S
        for tracker, thread in self.threads.items():
            if not thread.close():
                self._warn(f"{tracker} has not taken all figures yet; the run waits for it, {CLOSE_S:.0f} s at most")
        while self.threads:
            tracker, thread = self.threads.popitem()
            self.attempt(tracker, partial(thread.join, until))
        left_out = {name: number for name, number in self._failed.items() if name != self._path.name}
        if self._waiting:
            left_out[self._path.name] = len(self._waiting)
        if left_out:
            each = ", ".join(f"{name} ({number} times)" for name, number in left_out.items())
            self._warn(f"note: left out, as it could not be written: {each}")
        self._failed, self._waiting = {}, []


class SinkThread:
    """A sink in a thread of its own, so that the run never waits for it before its end."""

    def __init__(self, begin: Callable[[], Sink], *, attempt: Callable[[Callable[[], object]], None]) -> None:
        """`attempt`: calls what it is given, and reports what that raises."""
        self._begin, self._attempt = begin, attempt
        self.steps: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue()
        """Those that wait, and None behind the last one."""
        self._sink: Sink | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="tracker")
        self._thread.start()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Returns at once. Raises TimeoutError when too many steps wait."""
        if self._thread.is_alive():
            if self.steps.qsize() >= MOST_WAITING:
                raise TimeoutError(f"it has not taken the last {MOST_WAITING} steps")
            self.steps.put((step, figures))

    def close(self) -> bool:
        """It ends after the steps that wait; whether it has, soon."""
        self.steps.put(None)
        self._thread.join(SOON_S)
        return not self._thread.is_alive()

    def join(self, until: float) -> None:
        """Returns when it has ended. `until`: monotonic seconds. Raises TimeoutError where it ends no earlier."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            raise TimeoutError(f"it has not taken all within {CLOSE_S:.0f} s after the last step")

    def _run(self) -> None:
        self._attempt(self._make)
        if (sink := self._sink) is not None:
            for step, figures in iter(self.steps.get, None):
                self._attempt(partial(sink.log, step, figures))
                self.steps.task_done()
            self._attempt(sink.close)

    def _make(self) -> None:
        self._sink = self._begin()


def check_trackers(names: Sequence[str]) -> None:
    """Raises TrackerError for one whose package is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise TrackerError(
            f"run.trackers must name installed packages, got {missing[0]} (not installed); "
            f"pip install {missing[0]}, or leave it out"
        )


def new_id() -> str:
    """A name for a run that each of the services takes: SwanLab wants 21 characters."""
    return uuid.uuid4().hex[:21]


class TensorBoardSink:
    """Event files in `<folder>/tensorboard/`."""

    id = ""

    def __init__(self, *, folder: Path, name: str, config: dict[str, Any], start: int, known: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # `purge_step`: TensorBoard hides what earlier files say about this step and later ones.
        self._folder = folder / "tensorboard"
        self._open = partial(SummaryWriter, str(self._folder))
        self._writer: Any = self._open(purge_step=start + 1 if start else None)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if self._writer is None:
            check_takes(self._folder)
            self._writer = self._open()
        try:
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError:  # its thread has ended: a file of its own for what comes after a full disk
            self._writer = None
            raise

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class ServiceSink:
    """A run of Weights & Biases or of SwanLab, whose own environment variables choose account and mode."""

    def __init__(self, begin: Callable[..., Any], *, known: str | None, **where: Any) -> None:
        self.id = known or new_id()
        self._run = begin(id=self.id, resume="allow", **where)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def wandb_sink(*, folder: Path, name: str, config: dict[str, Any], start: int, known: str | None) -> ServiceSink:
    """Weights & Biases."""
    import wandb

    place = {"dir": str(folder), "allow_val_change": True}
    return ServiceSink(wandb.init, known=known, project=PROJECT, name=name, config=config, **place)


def swanlab_sink(*, folder: Path, name: str, config: dict[str, Any], start: int, known: str | None) -> ServiceSink:
    """SwanLab."""
    import swanlab

    place = {"experiment_name": name, "logdir": str(folder / "swanlab")}
    return ServiceSink(swanlab.init, known=known, project=PROJECT, config=config, **place)


class MlflowSink:
    """MLflow; `MLFLOW_TRACKING_URI` says where."""

    def __init__(self, *, folder: Path, name: str, config: dict[str, Any], start: int, known: str | None) -> None:
        import mlflow

        self._mlflow = mlflow
        self._traces = folder / "traces.jsonl"
        mlflow.set_experiment(PROJECT)
        self.id = str(mlflow.start_run(run_id=known, run_name=name).info.run_id)
        mlflow.log_dict(config, "config.json")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(figures), step=step)

    def close(self) -> None:
        if self._traces.exists():
            self._mlflow.log_artifact(str(self._traces))
        self._mlflow.end_run()


SINKS: dict[str, Callable[..., Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": wandb_sink,
    "mlflow": MlflowSink,
    "swanlab": swanlab_sink,
}


def cut_lines(path: Path, *, after: int) -> list[dict[str, Any]]:
    """Drops lines of a JSONL file that belong to later steps, and a last one that a crash left unfinished; those that stay."""
    kept = []
    if path.exists():
        before = path.read_text(encoding="utf-8")
        for text in before.splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if line["step"] <= after:
                kept.append(line)
        if (left := "".join(json.dumps(line) + "\n" for line in kept)) != before:
            with replacing(path) as scratch:
                scratch.write_text(left, encoding="utf-8")
    return kept


def drop_lines(path: Path, *, episodes: Collection[str]) -> int:
    """Drops the lines of a JSONL file that are of these episodes; how many."""
    if not path.exists():
        return 0
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not any(f'"{name}"' in line for name in episodes)]
    if len(kept) < len(lines):
        with replacing(path) as scratch:
            scratch.write_text("".join(kept), encoding="utf-8")
    return len(lines) - len(kept)


# `Traces`: some whole episodes of each batch, as text and as tokens, in `traces.jsonl`. Invariant: a line shows what was
# trained, id for id; lines of steps that are made again are dropped first. It never touches the batch.

FILE = "traces.jsonl"
PER_STEP = 2
"""Episodes of each batch."""


class Traces:
    """`decode`: token ids -> text, control tokens included. `start`: the step after which the run is resumed."""

    def __init__(self, folder: Path, *, decode: Callable[[Sequence[int]], str], start: int = 0) -> None:
        self._decode = decode
        self._path = folder / FILE
        cut_lines(self._path, after=start)

    def add(self, batch: TrainBatch, *, step: int) -> None:
        """Write the episodes of this step's batch."""
        lines = ""
        for rows in _chosen(batch):
            line = {"step": step, "episode_id": rows[0].episode_id, "score": rows[0].score}
            lines += json.dumps({**line, "rows": [self._row(row) for row in rows]}) + "\n"
        append(self._path, lines)

    def _row(self, row: Row) -> dict[str, Any]:
        borders = [0, *(np.flatnonzero(np.diff(row.mask)) + 1).tolist(), len(row.ids)]
        turns = [
            {"trained": bool(row.mask[start]), "text": self._decode(row.ids[start:end].tolist())}
            for start, end in pairwise(borders)
        ]
        return {
            **({"role": row.role} if row.role else {}),
            "turns": turns,
            "ids": row.ids.tolist(),
            "mask": row.mask.tolist(),
            "logprobs": [round(float(value), 5) for value in row.logprobs],
            "versions": row.versions.tolist(),
        }


def _chosen(batch: TrainBatch) -> list[list[Row]]:
    """The rows of the best episode and of the worst, at most PER_STEP."""
    episodes: dict[str, list[Row]] = {}
    for row in batch.rows:
        episodes.setdefault(row.episode_id, []).append(row)
    ranked = sorted(episodes.values(), key=lambda rows: -rows[0].score)
    return [ranked[0], *ranked[1:][-(PER_STEP - 1) :]] if ranked else []
