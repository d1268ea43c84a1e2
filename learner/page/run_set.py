"""The runs that a page shows: found in the folders that it was given, opened when they are asked for.

Used by `learner.page.routes`. Invariant: a run keeps its name while the page lives; one whose folder is gone is left out.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from buffers.errors import UnderstudyError
from learner.page.episode_page import RunPages
from learner.page.run_view import NoRun
from learner.reporting.run_record import CONFIG

LOOK_S = 2.0
"""Seconds between two looks for new runs."""


class UnknownRun(UnderstudyError):
    """No run of this name is shown."""


class RunSet:
    """Raises NoRun when there is none to begin with. `meanings`: what a break's cause means, in a sentence."""

    def __init__(
        self,
        named: Sequence[Path],
        *,
        meanings: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._named = named
        self._meanings = meanings
        self._clock = clock
        self._lock = threading.Lock()
        self._views: dict[str, RunPages] = {}
        self._looked = clock()
        self._take(find_runs(named))

    def ids(self) -> list[str]:
        """Names of the present runs."""
        with self._lock:
            if self._clock() - self._looked > LOOK_S:
                self._looked = self._clock()
                try:
                    self._take(find_runs(self._named))
                except NoRun:  # those that are known are looked at below
                    pass
            return [name for name, view in self._views.items() if is_run(view.folder)]

    def view(self, run_id: str) -> RunPages:
        """Raises UnknownRun."""
        if run_id not in self.ids():
            raise UnknownRun(f"a run of this page is needed, got {run_id!r:.60}; see /api/runs")
        return self._views[run_id]

    def close(self) -> None:
        """Close all that is open."""
        with self._lock:
            for view in self._views.values():
                view.close()

    def _take(self, found: Mapping[str, Path]) -> None:
        known = {view.folder.resolve() for view in self._views.values()}
        for name, folder in found.items():
            if folder.resolve() not in known and name not in self._views:
                self._views[name] = RunPages(name, folder, meanings=self._meanings)


def find_runs(named: Sequence[Path]) -> dict[str, Path]:
    """Id -> folder, in the order of the names: each is a run's folder, or holds those of runs. Raises NoRun.

    The id is the folder's name; of several of one name those that come later have a number."""
    found: list[Path] = []
    for folder in named:
        some = [folder] if is_run(folder) else sorted(filter(is_run, _inside(folder)), key=_age)
        if not some:
            raise NoRun(f"RUN must be a run's folder, or a folder of runs, got {folder}; name one, such as runs/demo")
        found += [each for each in some if each.resolve() not in {one.resolve() for one in found}]
    runs: dict[str, Path] = {}
    for each in found:
        name, number = each.resolve().name, 2
        while name in runs:
            name, number = f"{each.resolve().name}~{number}", number + 1
        runs[name] = each
    return runs


def is_run(folder: Path) -> bool:
    """Whether this is a run's folder."""
    return (folder / CONFIG).is_file()


def _inside(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return []


def _age(folder: Path) -> float:
    return -(folder / CONFIG).stat().st_mtime
