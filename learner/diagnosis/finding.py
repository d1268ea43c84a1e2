"""`Finding`: one thing that holds learning back, as a sentence with its figure and what to change; and `rule`, which makes them.

A rule is a function of the evidence, of which it returns an `Observation`, or None where all is well. What it fires at is in its
docstring, and in docs/diagnosis.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

from learner.diagnosis.evidence import Evidence


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


class Observation(NamedTuple):
    """What a rule sees, as in `Finding`."""

    figure: float
    sentence: str
    remedy: str = ""
    severity: Severity | None = None
    """None: that of the rule, else by the figure."""
    measure: str = ""
    """Empty: that of the rule."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A function of the evidence, by its name and with what it fires at as its docstring."""

    observe: Callable[[Evidence], Observation | None]
    measure: str
    severity: Severity | None
    """None: by the figure."""
    slows: float
    harms: float
    stops: float
    """The least figure of each severity."""

    @property
    def name(self) -> str:
        """Its name in docs/diagnosis.md."""
        return self.observe.__name__

    def __call__(self, run: Evidence) -> Finding | None:
        seen = self.observe(run)
        if seen is None or seen.figure < self.slows:
            return None
        by_figure = Severity.STOPS if seen.figure >= self.stops else by_share(seen.figure, harms=self.harms)
        return Finding(
            rule=self.name,
            severity=seen.severity or self.severity or by_figure,
            sentence=seen.sentence,
            figure=seen.figure,
            measure=seen.measure or self.measure,
            remedy=seen.remedy,
        )


def rule(
    measure: str, severity: Severity | None = None, *, slows: float = -inf, harms: float = inf, stops: float = inf
) -> Callable[[Callable[[Evidence], Observation | None]], Rule]:
    """Makes a rule of a function, as in `Rule`."""
    return lambda observe: Rule(
        observe=observe, measure=measure, severity=severity, slows=slows, harms=harms, stops=stops
    )


def percent(share: float) -> str:
    """`7 %`; `0.4 %` where it is less than one."""
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0.0 else f"{100 * share:.1g} %"


def counted(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def by_share(share: float, *, harms: float) -> Severity:
    """HARMS from `harms` on, else SLOWS."""
    return Severity.HARMS if share >= harms else Severity.SLOWS
