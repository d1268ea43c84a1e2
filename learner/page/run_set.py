"""The runs that a page shows: found in the folders that it was given, opened when they are asked for.

Used by `learner.page.serve`. Invariant: a run keeps its name while the page lives; one whose folder is gone is left out.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from buffers.errors import UnderstudyError
from learner.page.episode_page import RunPages
from learner.page.run_view import NoRun, RunView
from learner.reporting.run_record import CONFIG, SFT_FOLDER

LOOK_FOR_RUNS_S = 2.0
"""Seconds between two looks for new runs."""


class UnknownRun(UnderstudyError):
    """No run of this name is shown."""


@dataclass(eq=False)
class RunSet:
    """Raises NoRun when there is none to begin with. `meanings`: what a break's cause means, in a sentence."""

    named: Sequence[Path]
    _: KW_ONLY
    meanings: Mapping[str, str]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._views: dict[str, RunPages] = {}
        self._looked = self.clock()
        self._take(find_runs(self.named))

    def ids(self) -> list[str]:
        """Names of the present runs."""
        with self._lock:
            if self.clock() - self._looked > LOOK_FOR_RUNS_S:
                self._looked = self.clock()
                try:
                    self._take(find_runs(self.named))
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
                self._views[name] = RunPages(name, folder, meanings=self.meanings)


def find_runs(named: Sequence[Path]) -> dict[str, Path]:
    """Id -> folder, in the order of the names: each is a run's folder, or holds those of runs; behind a run comes its SFT stage.
    Raises NoRun.

    The id is the folder's name, of a stage that of its run as well; of several of one name those that come later have a number."""
    found: list[Path] = []
    for folder in named:
        some = [folder] if is_run(folder) else sorted(filter(is_run, _inside(folder)), key=_age)
        if not some:
            raise NoRun(f"RUN must be a run's folder, or a folder of runs, got {folder}; name one, such as runs/demo")
        staged = [each for run in some for each in (run, run / SFT_FOLDER) if is_run(each)]
        found += [each for each in staged if each.resolve() not in {one.resolve() for one in found}]
    runs: dict[str, Path] = {}
    for each in found:
        folder, number = each.resolve(), 2
        is_stage = folder.name == SFT_FOLDER and is_run(folder.parent)
        name = own = f"{folder.parent.name}-{SFT_FOLDER}" if is_stage else folder.name
        while name in runs:
            name, number = f"{own}~{number}", number + 1
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


# Server-sent events: what changed of the runs that a page looks at, once a second, less often while several pages are open. All
# connections look at the same moments, so that this process wakes once for them. Invariant: an event's id says all that its
# reader knows (a mark of this process, and for each run the last line of figures, the time of the machine's line, the ledger's
# version and the run's state), so that nothing is kept for a reader, and one that comes back receives what it missed, or
# `reset`.

LOOK_S = 1.0
"""A run writes what its machine does as often; a browser that draws more often takes a processor from a run beside it."""
MORE_LOOK_S = 2.5
"""Each further page that is open makes the pause so much longer, up to MOST_LOOK_S: together they draw less than one alone."""
MOST_LOOK_S = 6.0
QUIET_S = 15.0
BOOT = secrets.token_hex(4)
"""The mark of this process: what another one said means nothing here."""
_UNKNOWN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a reader knows of one run."""

    line: int = -1
    """-1: no figures were fetched."""
    machine: str = _UNKNOWN
    ledger: str = _UNKNOWN
    state: str = _UNKNOWN


def tick_of(known: Mapping[str, Known]) -> str:
    """The id of an event."""
    parts = [
        f"{quote(run, safe='')}.{each.line}.{each.machine}.{each.ledger}.{each.state}" for run, each in known.items()
    ]
    return "!".join([BOOT, *parts])


def read_tick(tick: str) -> dict[str, Known] | None:
    """The opposite; None: of another process, or none at all."""
    boot, *parts = tick.split("!")
    if boot != BOOT:
        return None
    known: dict[str, Known] = {}
    for part in parts:
        fields = part.rsplit(".", 4)
        if len(fields) != 5 or not fields[1].lstrip("-").isdigit():
            return None
        known[unquote(fields[0])] = Known(line=int(fields[1]), machine=fields[2], ledger=fields[3], state=fields[4])
    return known


def here(view: RunView) -> Known:
    """What a reader knows that has just fetched the figures of a run, and nothing else."""
    return Known(line=view.lines_after(-1)[0])


def news_of(view: RunView, known: Known) -> tuple[Known, list[tuple[str, dict[str, Any]]]]:
    """What a reader knows after it was told, and what to tell: events by name."""
    events: list[tuple[str, dict[str, Any]]] = []
    entry = view.entry()
    state = f"{entry['state']}-{entry['step']}"
    if state != known.state:
        names = ("state", "step", "steps_planned", "error")
        events.append(("run", {"run": view.run_id, **{name: entry[name] for name in names}}))
    line, lines = view.lines_after(known.line)
    if known.line >= 0 and lines is None:
        events.append(("reset", {}))
    elif known.line >= 0 and lines:
        events.append(("metrics", {"run": view.run_id, "rows": lines}))
    machine = view.machine_now()
    at = _UNKNOWN if machine is None else str(round(float(machine.get("at") or 0.0) * 1000))
    if at != known.machine and machine is not None:
        events.append(("machine", {"run": view.run_id, "now": machine}))
    ledger = str(view.data_version())
    if ledger != known.ledger and ledger != "None":
        counts, version, _ = view.counted()
        events.append(("ledger", {"run": view.run_id, "counts": counts, "version": version}))
    return Known(line=line, machine=at, ledger=ledger, state=state), events


class Changes:
    """`stream` is one reader's connection."""

    def __init__(self, runs: RunSet) -> None:
        self._runs = runs
        self.num_readers = 0

    async def stream(self, run_ids: Sequence[str], *, since: str) -> AsyncIterator[bytes]:
        """Events until the reader hangs up. `since`: the id of the last one that it knows; empty: it begins."""
        found = read_tick(since) if since else {}
        known = {run: (found or {}).get(run, Known()) for run in run_ids}
        self.num_readers += 1
        try:
            yield b"retry: 1000\n\n"
            if found is None:
                known = await asyncio.to_thread(self._fresh, run_ids)
                yield _event("reset", {"tick": tick_of(known)}, tick=tick_of(known))
            listed, quiet_s = self._runs.ids(), 0.0
            while True:
                told, known, listed = await asyncio.to_thread(self._look, known, listed)
                for number, (name, data) in enumerate(told, 1):
                    data = {"tick": tick_of(known)} if name == "reset" else data
                    # The id says that all was told: the last one's.
                    yield _event(name, data, tick=tick_of(known) if number == len(told) else "")
                pause_s = self._pause_s(asyncio.get_running_loop().time())
                quiet_s = 0.0 if told else quiet_s + pause_s
                if quiet_s >= QUIET_S:
                    quiet_s = 0.0
                    yield b": quiet\n\n"
                await asyncio.sleep(pause_s)
        finally:
            self.num_readers -= 1

    def _pause_s(self, now: float) -> float:
        """Seconds until all connections look again; `now`: the loop's clock."""
        every_s = min(LOOK_S + MORE_LOOK_S * max(self.num_readers - 1, 0), MOST_LOOK_S)
        return every_s - now % every_s

    def _fresh(self, run_ids: Sequence[str]) -> dict[str, Known]:
        known = {}
        for run in run_ids:
            try:
                known[run] = here(self._runs.view(run))
            except UnknownRun:
                known[run] = Known()
        return known

    def _look(
        self, known: dict[str, Known], listed: list[str]
    ) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, Known], list[str]]:
        told: list[tuple[str, dict[str, Any]]] = []
        now = dict(known)
        for run, each in known.items():
            try:
                now[run], some = news_of(self._runs.view(run), each)
            except UnknownRun:
                continue
            told += some
        if (ids := self._runs.ids()) != listed:
            told.append(("runs", {}))
        return told, now, ids


def _event(name: str, data: Mapping[str, Any], *, tick: str) -> bytes:
    mark = f"id: {tick}\n" if tick else ""
    return f"{mark}event: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()
