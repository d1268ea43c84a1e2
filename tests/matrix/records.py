"""What the matrix is made of: a run, a row that claims an effect of it, and what a run that ended left behind."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml


class NoEffect(AssertionError):
    """A run in which a row's effect was not seen; the message says what was seen instead."""


@dataclass(frozen=True, slots=True)
class Live:
    """A run that is under way, as another process sees it."""

    pid: int
    folder: Path
    """The run's own folder, `<run.dir>/<run.name>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One real `learner.run`. Every setting is a key of the configuration with its value; `{files}` in a text is the folder
    that `files` has filled."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Callable[[Path], None] = lambda _: None
    """Writes what the settings name into an empty folder, before the run starts."""
    meanwhile: Callable[[Live], None] | None = None
    """What somebody does while it runs, in a process of its own; what it raises fails the run's rows."""
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    code: int = 0
    """The exit code that it must have: 2 is a refusal."""
    timeout_s: float = 400.0
    after: str = ""
    """The run that must have ended before, whose folder (`{after}` in a text) this one continues with."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that has ended: its exit code, what it printed, and its folder."""

    run: Run
    code: int
    output: str
    base: Path
    """The folder that holds `files/` and, where `run.dir` says nothing else, the run's own folder."""
    folder: Path
    """The run's own folder."""
    seconds: float
    trouble: str = ""
    """Why `meanwhile` failed; empty: it did not."""
    others: Mapping[str, Ended] = field(default_factory=dict)
    """All runs, by name."""

    @property
    def files(self) -> Path:
        """What the run was given, and what its agents wrote there."""
        return self.base / "files"

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every key with dots -> the value that the run used."""
        return dict(_flat(yaml.safe_load((self.folder / "config.yaml").read_text()), prefix=""))

    @cached_property
    def lines(self) -> list[dict[str, float]]:
        """All lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        loaded: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return loaded

    def metric(self, name: str) -> list[float]:
        """Its values in the order of the steps. Raises NoEffect when there is none."""
        found = [line[name] for line in self.lines if name in line]
        if not found:
            raise NoEffect(f"{name} is in no line of metrics.jsonl")
        return found

    def sql(self, query: str) -> list[Any]:
        """What the run's ledger answers: rows, or values where they have one column."""
        with closing(sqlite3.connect(f"file:{self.folder / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
            rows = db.execute(query).fetchall()
        return [row[0] if len(row) == 1 else row for row in rows]


def _flat(tree: Mapping[str, Any], *, prefix: str) -> list[tuple[str, Any]]:
    from configs.keys import all_sections

    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        whole = f"{prefix}{name}"
        found += _flat(value, prefix=f"{whole}.") if whole in all_sections() else [(whole, value)]
    return found


Effect = Callable[[Ended], str]
"""What was seen, in words and figures. Raises NoEffect (or any AssertionError) when it was not."""


@dataclass(frozen=True, slots=True)
class Row:
    """One claim: `what`, with this value, has this effect in this run."""

    what: str
    """A key, `column NAME`, `metric NAME`, `promise P1`, or the words of a sentence of the documents."""
    value: Any
    """Of an enumerated key one of its values; otherwise empty, or what the row is about."""
    run: str
    """A run's name; or a test, `path::name`, which shows it."""
    effect: Effect | None = None
    """None: the test shows it."""
