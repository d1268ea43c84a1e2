"""`Evidence`: all that a run's folder says, read once; the rules look at nothing else.

Called by `learner.diagnosis.diagnose`, of finished runs, of living ones and of killed ones. Invariant: it changes no byte of the
folder. A last line of `metrics.jsonl` that is not complete is left out; files that are not there yet are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from buffers.errors import UnderstudyError
from buffers.ledger.doctor import Failures, LedgerSurvey, survey
from configs.load import ConfigError, load_config
from configs.schema import Config
from learner.reporting.run_metrics import FIRST_STEPS, LAST_STEPS, SOLVED, time_share
from learner.reporting.run_record import CONFIG, LEDGER, MACHINE, LineFile, RunRecord, figures, read_record

OF_STEPS = ("reward/mean", "reward/std", "reward/min", "reward/max", "batch/episodes")
"""Figures that the line of every step has, and no other line."""
RECENT_STEPS = 10
"""Steps at the end that rules look at: what was so earlier may have passed."""
CLEAR_RISE = 2.0
"""Standard errors by which the last reward has to be above the first to have risen."""


class DiagnosisError(UnderstudyError):
    """A folder that holds no run that can be read; the message is for the user."""


@dataclass(frozen=True, kw_only=True)
class Evidence(RunRecord):
    """One run."""

    config: Config
    ledger: LedgerSurvey
    """The summary's counts where the folder has no ledger, as it lies on another node."""
    cards: int
    """GPUs of the run's machines, as it last saw them."""

    @property
    def recent(self) -> Sequence[Mapping[str, float]]:
        """The steps at the end."""
        return self.steps[-RECENT_STEPS:]

    def values(self, name: str) -> list[float]:
        """A metric in the recent steps that have it."""
        return [step[name] for step in self.recent if name in step]

    def mean(self, name: str) -> float | None:
        """Its mean there; None: no recent step has it."""
        values = self.values(name)
        return fmean(values) if values else None

    def last(self, name: str, default: float = 0.0) -> float:
        """The newest value of a metric."""
        return next((step[name] for step in reversed(self.steps) if name in step), default)

    def time_share(self, name: str) -> float | None:
        """Share that a time has in the recent steps' time; None: no recent step has it."""
        return time_share(self.recent, name)

    def given_up(self, kind: str) -> tuple[int, int]:
        """Groups that were evicted for this reason, and those that were complete, these among them."""
        evicted = self.ledger.count(f"evicted/{kind}")
        return evicted, evicted + sum(self.ledger.count(f"groups/{state}") for state in ("ready", "leased", "trained"))

    @property
    def slots(self) -> int:
        """Episodes that may run at once."""
        return int(self.last("pool/slots", default=64.0))

    @property
    def fewer_at_once(self) -> str:
        """Half as many, as a key."""
        return f"agents.concurrency={max(1, self.slots // 2)}"

    @cached_property
    def rewards(self) -> list[float]:
        """Mean score of each step."""
        return [step["reward/mean"] for step in self.steps]

    @property
    def first_reward(self) -> float:
        """The mean reward of the first steps; 0 without any."""
        return fmean(self.rewards[:FIRST_STEPS] or [0.0])

    @property
    def last_reward(self) -> float:
        """The mean reward of the last steps; 0 without any."""
        return fmean(self.rewards[-LAST_STEPS:] or [0.0])

    @property
    def has_risen(self) -> bool:
        """Whether the reward is above its beginning by more than what the scores' spread explains."""
        errors = [_squared_error(self.steps[:FIRST_STEPS]), _squared_error(self.steps[-LAST_STEPS:])]
        return self.last_reward - self.first_reward > CLEAR_RISE * sum(errors) ** 0.5 and len(self.steps) > FIRST_STEPS

    @property
    def is_solved(self) -> bool:
        """The reward is at its best: at `run.reward_optimum`, or, where that is not known, at the best score that was ever seen and
        above its beginning."""
        if not self.steps:
            return False
        best = self.config.run.reward_optimum
        if best is not None:
            return self.last_reward >= best - SOLVED
        highest = max(step["reward/max"] for step in self.steps)
        return self.has_risen and self.last_reward >= highest - SOLVED * abs(highest)

    @property
    def score_range(self) -> float:
        """Distance of the highest score from the lowest that was seen in a step or a validation."""
        means = [line["val/mean"] for line in self.validations]
        lowest = min([step["reward/min"] for step in self.steps] + means, default=0.0)
        return max([step["reward/max"] for step in self.steps] + means, default=0.0) - lowest

    @property
    def slower(self) -> str:
        """Smaller updates, as a key."""
        return f"learner.lr={self.config.learner.lr / 3:.2g}"

    @property
    def held(self) -> str:
        """A stronger hold on the policy, as a key."""
        return f"learner.kl.coef={3 * self.config.learner.kl.coef or 0.01:.3g}"


def _squared_error(steps: Sequence[Mapping[str, float]]) -> float:
    """Squared standard error of the steps' mean reward, by the spread of their scores."""
    episodes = sum(step["batch/episodes"] for step in steps)
    return fmean(step["reward/std"] ** 2 for step in steps) / max(episodes, 1) if steps else 0.0


def read_evidence(folder: Path) -> Evidence:
    """Raises DiagnosisError where there is no run, or one that cannot be read."""
    if not (folder / CONFIG).is_file():
        raise DiagnosisError(f"RUN must be a run's folder, got {folder} without {CONFIG}; name one, such as runs/demo")
    try:
        config = load_config(folder / CONFIG)
    except ConfigError as error:
        told = str(error).replace("\n", "; ")
        raise DiagnosisError(f"{folder / CONFIG} must be a configuration of this release, got: {told}") from None
    record, ledger = read_record(folder, of_steps=OF_STEPS), folder / LEDGER
    machine = LineFile(folder / MACHINE).poll().lines
    return Evidence(
        **vars(record),
        config=config,
        ledger=survey(ledger) if ledger.is_file() else _counted(record.summary),
        cards=int(figures(machine[-1]).get("cards", 0)) if machine else 0,
    )


def _counted(summary: Mapping[str, Any]) -> LedgerSurvey:
    """What the summary says of a ledger that is elsewhere."""
    counts = {name: int(number) for name, number in figures(summary.get("buffer")).items()}
    kinds = {name.removeprefix("failed/"): number for name, number in counts.items() if "failed/" in name and number}
    failures = [Failures(kind=kind, number=number, example=kind) for kind, number in kinds.items()]
    return LedgerSurvey(counts=counts, failures=tuple(sorted(failures, key=lambda each: -each.number)), is_here=False)


# `Finding`: one thing that holds learning back, as a sentence with its figure and what to change; and `rule`, which makes them.
# A rule is a function of the evidence, of which it returns an `Observation`, or None where all is well. What it fires at is in
# its docstring, and in docs/diagnosis.md.


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
