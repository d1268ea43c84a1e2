"""`Tracker`: writes each step's figures to `metrics.jsonl` and to a TensorBoard event file in one folder.

Called by the pipeline once per step. The invariant: one line per step, in order, on disk when `log` returns, and every
number in it finite; a value that is not is left out and counted. It computes and shows nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class Tracker:
    """Owns `<folder>/metrics.jsonl` and `<folder>/tensorboard/`. Use it as a context manager, or call `close`."""

    def __init__(self, folder: Path | str) -> None:
        self._path = Path(folder) / "metrics.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = self._path.open("a", encoding="utf-8")
        self._events = EventFileWriter(str(self._path.parent / "tensorboard"))
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
        values = [Summary.Value(tag=name, simple_value=value) for name, value in finite.items()]
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._events.flush()
        return finite

    def close(self) -> None:
        """Close both files. A second call does nothing."""
        if not self._lines.closed:
            self._lines.close()
            self._events.close()
