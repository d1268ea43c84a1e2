"""The runs that a page shows: found in the folders that it was given, opened when they are asked for.

Used by `learner.page.routes`. Invariant: a run keeps its name while the page lives; one whose folder is gone is left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from buffers.errors import UnderstudyError
from learner.page.episode_page import EpisodePages
from learner.page.run_files.run_folders import NoRun, find_runs, is_run
from learner.page.run_view import RunView

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
        self._views: dict[str, RunView] = {}
        self._pages: dict[str, EpisodePages] = {}
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

    def view(self, run_id: str) -> RunView:
        """Raises UnknownRun."""
        if run_id not in self.ids():
            raise UnknownRun(f"a run of this page is needed, got {run_id!r:.60}; see /api/runs")
        return self._views[run_id]

    def pages(self, run_id: str) -> EpisodePages:
        """The episodes of a run. Raises UnknownRun."""
        view = self.view(run_id)
        with self._lock:
            if run_id not in self._pages:
                self._pages[run_id] = EpisodePages(view, meanings=self._meanings)
            return self._pages[run_id]

    def close(self) -> None:
        """Close all that is open."""
        with self._lock:
            for view in self._views.values():
                view.close()

    def _take(self, found: Mapping[str, Path]) -> None:
        known = {view.folder.resolve() for view in self._views.values()}
        for name, folder in found.items():
            if folder.resolve() not in known and name not in self._views:
                self._views[name] = RunView(name, folder)
