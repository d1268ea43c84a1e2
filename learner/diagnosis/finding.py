"""`Finding`: one thing that holds learning back, as a sentence with its figure and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is, the worst first."""

    STOPS = "stops"
    """Nothing is learned while it is so."""
    HARMS = "harms"
    """Much is learned from the wrong data, or lost."""
    SLOWS = "slows"
    """Time or data is wasted."""
    NOTE = "note"
    """Nothing is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one rule says of a run."""

    rule: str
    """The rule's name, as in docs/diagnosis.md."""
    severity: Severity
    sentence: str
    figure: float
    """The number that the rule judged."""
    measure: str
    """The metric of docs/metrics.md that `figure` is, or what it counts."""
    remedy: str = ""
    """What to change: keys with values where there are some. Empty: nothing."""


def percent(share: float) -> str:
    """`7 %`; `0.4 %` where it is less than one."""
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0.0 else f"{100 * share:.1g} %"


def counted(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def by_share(share: float, *, harms: float) -> Severity:
    """HARMS from `harms` on, else SLOWS."""
    return Severity.HARMS if share >= harms else Severity.SLOWS
