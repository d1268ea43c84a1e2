"""What holds a run's learning back, by the rules of diagnosis, for a panel of the page.

Used by `learner.page.routes` and `learner.page.snapshot`. A run is looked at again at most
every `KEPT_S`. It only reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from buffers.errors import UnderstudyError
from learner.diagnosis.diagnose import diagnose

KEPT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """`available`: whether the run could be looked at, and `why` not."""

    findings: list[dict[str, Any]]
    available: bool
    why: str = ""


class Findings:
    """The findings of any run, by its folder."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._told: dict[Path, tuple[float, Told]] = {}

    def of(self, folder: Path) -> Told:
        """Worst first."""
        with self._lock:
            at, told = self._told.get(folder, (-KEPT_S, None))
            if told is None or self._clock() - at >= KEPT_S:
                told = diagnosed(folder)
                self._told[folder] = (self._clock(), told)
            return told


def diagnosed(folder: Path) -> Told:
    """The findings of `learner.diagnosis`; none while that cannot read the run."""
    try:
        return Told(findings=[asdict(finding) for finding in diagnose(folder)], available=True)
    except UnderstudyError as error:
        return Told(findings=[], available=False, why=str(error))
