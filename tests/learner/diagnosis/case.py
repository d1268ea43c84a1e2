"""`Case`: a rule with a run in which it must fire, and one like it in which it must not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from learner.diagnosis.evidence import Severity
from tests.learner.diagnosis.recorded_run import RecordedRun


@dataclass(frozen=True, kw_only=True)
class Case:
    """`says`: words of the sentence or of the remedy."""

    rule: str
    fires: Callable[[Path], RecordedRun]
    quiet: Callable[[Path], RecordedRun]
    severity: Severity
    figure: float
    says: tuple[str, ...]
