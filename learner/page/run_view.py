"""`RunView`: everything the page knows of one run, from its folder: figures, the machine, the ledger's index, one episode.

Made by `learner.page.routes`, used from several threads. Invariants: it only reads; what is kept of a long file or a large
ledger is bounded by their numbers of lines and episodes, never by their texts. A run without a readable ledger (it is on
another node, of another release, or not there yet) has figures and a machine, and says why there is no more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from buffers.ledger.reading import round_causes
from buffers.ledger.reading.episode_filter import EpisodeFilter, Found, ordered, search
from buffers.ledger.reading.episode_index import EpisodeIndex
from buffers.ledger.reading.reader import Connection, LedgerReader, LedgerUnreadable, counts, trained_steps
from buffers.ledger.tools.cli import tokenizer_file
from learner.page.episode_parts.token_window import TokenDecoder
from learner.page.run_files import machine_state
from learner.page.run_files.line_file import LineFile
from learner.page.run_files.metric_columns import MetricColumns
from learner.page.run_files.run_folders import (
    CONFIG,
    LEDGER,
    MACHINE,
    METRICS,
    NoRun,
    read_config,
    read_summary,
    state_of,
)
from learner.reporting.run_json import figures

T = TypeVar("T")
EPISODES_AT_ONCE = 400
"""Episodes whose rounds are looked at between two requests' turns."""
LOOK_PAUSE_S = 0.01
RECENT_LINES = 200
"""Lines of metrics.jsonl that are kept whole, for pages that were away for a moment."""


class RunView:
    """`run_id`: its name on the page."""

    def __init__(self, run_id: str, folder: Path) -> None:
        self.run_id = run_id
        self.folder = folder
        self._files = threading.RLock()
        """Guards what is kept of small files."""
        self._indexing = threading.RLock()
        """Guards the index and its connection."""
        self._opening = threading.Lock()
        self._metrics_file, self._machine_file = LineFile(folder / METRICS), LineFile(folder / MACHINE)
        self._metrics = MetricColumns()
        self._num_lines = 0
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=RECENT_LINES)
        self._machine: list[dict[str, Any]] = []
        self._config: tuple[float, dict[str, Any]] = (-1.0, {})
        self._readers: tuple[LedgerReader, LedgerReader] | None = None
        """Two: for the index, and for everything else."""
        self.index = EpisodeIndex()
        self._indexed_version = -1
        self._decoder: TokenDecoder | None = None
        self._looking: threading.Thread | None = None
        self.looked_at = 0.0
        """Share of the episodes whose rounds were looked at."""
        self._is_closed = threading.Event()

    # Small files

    def poll(self) -> None:
        """Read what was added to metrics.jsonl and machine.jsonl."""
        with self._files:
            machine = self._machine_file.poll()
            if machine.again:
                self._machine.clear()
            self._machine += machine.lines
            metrics = self._metrics_file.poll()
            if metrics.again:
                self._metrics.clear()
                self._recent.clear()
                self._num_lines += 1  # so that no number from before is the last one
            for line in metrics.lines:
                self._metrics.add(line)
                self._num_lines += 1
                self._recent.append((self._num_lines, line))

    def lines_after(self, number: int) -> tuple[int, list[dict[str, Any]] | None]:
        """The number of the newest line of metrics.jsonl, and the lines after that number; None: they are not kept any more."""
        with self._files:
            self.poll()
            if number == self._num_lines:
                return number, []
            oldest = self._recent[0][0] if self._recent else self._num_lines + 1
            if not oldest - 1 <= number <= self._num_lines:
                return self._num_lines, None
            return self._num_lines, [line for each, line in self._recent if each > number]

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, as the run wrote it."""
        with self._files:
            try:
                changed = (self.folder / CONFIG).stat().st_mtime
            except OSError:
                return {}
            if changed != self._config[0]:
                self._config = (changed, read_config(self.folder))
            return self._config[1]

    def setting(self, key: str, default: Any) -> Any:
        """One key of the configuration, such as `buffer.group_size`; `default` where it is not of that kind."""
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found if found is not None and (default is None or isinstance(found, type(default))) else default

    def entry(self) -> dict[str, Any]:
        """The run in a list of runs."""
        with self._files:
            self.poll()
            summary, last = read_summary(self.folder), self._machine[-1] if self._machine else None
            seen_at = self._seen_at(last)
            return {
                "id": self.run_id,
                "name": str(self.setting("run.name", self.run_id)),
                "folder": str(self.folder),
                "state": state_of(summary, last, seen_at=seen_at),
                "step": self._metrics.last_step,
                "steps_planned": int(self.setting("run.steps", 0)),
                "reward_last": self._metrics.last("reward/mean"),
                "started_at": self._machine[0].get("at") if self._machine else None,
                "seen_at": seen_at,
                "error": None if summary is None else summary.get("error"),
            }

    def age_until(self) -> float:
        """The time to which ages count: now, or the last sign of life of a run that has ended."""
        entry = self.entry()
        return time.time() if entry["state"] == "live" or entry["seen_at"] is None else float(entry["seen_at"])

    def _seen_at(self, machine: dict[str, Any] | None) -> float | None:
        """The last sign of life in small files."""
        times = [] if machine is None else [float(figures(machine).get("at", 0.0))]
        for name in (METRICS, CONFIG):
            try:
                times.append((self.folder / name).stat().st_mtime)
            except OSError:
                continue
        return max(times, default=None)

    def machine_now(self) -> dict[str, Any] | None:
        """The last line of the machine, with who waits for what."""
        with self._files:
            self.poll()
            if not self._machine:
                return None
            line = self._machine[-1]
        return {
            **line,
            "waits": machine_state.waits(
                line,
                groups_per_step=int(self.setting("buffer.groups_per_step", 0)),
                max_policy_lag=int(self.setting("buffer.max_policy_lag", 0)),
            ),
        }

    def machine(self, *, since: float, points: int) -> dict[str, Any]:
        """Now and before."""
        now = self.machine_now()
        with self._files:
            return {"now": now, "history": machine_state.history(self._machine, since=since, points=points)}

    def metrics(self, read: Callable[[MetricColumns], T]) -> T:
        """What `read` finds in the figures, which are up to date."""
        with self._files:
            self.poll()
            return read(self._metrics)

    # The ledger

    @contextmanager
    def ledger(self) -> Iterator[Connection]:
        """A connection that only reads, for a block that sees one commit. Raises LedgerUnreadable."""
        with self._open()[1].read() as db:
            yield db

    def ledger_state(self) -> dict[str, Any]:
        """Whether the ledger can be read, and why not."""
        try:
            self._open()
        except LedgerUnreadable as error:
            return {"available": False, "why": str(error)}
        return {"available": True, "why": ""}

    def _open(self) -> tuple[LedgerReader, LedgerReader]:
        with self._opening:
            if self._readers is not None and self._readers[0].is_replaced:
                for reader in self._readers:
                    reader.close()
                self._readers = None
            if self._readers is None:
                path = self.folder / LEDGER
                if (node := self.setting("buffer.node", "")) and not path.is_file():
                    raise LedgerUnreadable(
                        f"the ledger of this run is on node {node} (buffer.node), in {path} there, and this page reads files of "
                        f"this machine; start `understudy page` on that node"
                    )
                self._readers = (LedgerReader(path), LedgerReader(path))
                self._indexed_version = -1
                self.index = EpisodeIndex()
            return self._readers

    def data_version(self) -> int | None:
        """A number that changes with the ledger; None: there is none to read."""
        try:
            return self._open()[1].data_version()
        except LedgerUnreadable:
            return None

    @contextmanager
    def indexed(self) -> Iterator[EpisodeIndex]:
        """The index, up to date."""
        with self._indexing:
            reader = self._open()[0]
            version = reader.data_version()
            if version != self._indexed_version:
                with reader.read() as db:
                    self.index.refresh(db)
                self._indexed_version = version
            yield self.index

    def look_on(self) -> None:
        """See to it that a thread looks at the agents of all tasks and at the rounds of all episodes, newest first."""
        with self._files:
            if self._looking is None or not self._looking.is_alive():
                self._looking = threading.Thread(target=self.look, name=f"look at {self.run_id}", daemon=True)
                self._looking.start()

    def look(self) -> None:
        """Look until all that ended is looked at, or the view is closed."""
        try:
            while not self._is_closed.wait(LOOK_PAUSE_S):
                with self.indexed() as index, self._open()[0].read() as db:
                    if not index.read_agents(db):
                        before = self.looked_at
                        self.looked_at = round_causes.look(db, index, limit=EPISODES_AT_ONCE)
                        if self.looked_at == 1.0 or self.looked_at <= before:
                            return
        except LedgerUnreadable:
            return

    def search(self, wanted: EpisodeFilter, *, order: str, limit: int, cursor: str | None) -> Found:
        """Episodes by numbers; those that are shown have been looked at."""
        with self.indexed() as index:
            found = search(index, wanted, order=order, limit=limit, cursor=cursor)
            unseen = [place for place in found.places if not index.episodes["looked"][place]]
            if unseen:
                with self._open()[0].read() as db:
                    round_causes.look_at(db, index, unseen)
            return found

    def order(self, wanted: EpisodeFilter, *, order: str) -> bytes:
        """The numbers of all episodes that match, in order, as little-endian int32."""
        with self.indexed() as index:
            return ordered(index, wanted, order=order)[0].astype("<i4").tobytes()

    def counted(self) -> tuple[dict[str, int], int, int]:
        """Counts, steps trained, lineages."""
        with self.ledger() as db:
            return counts(db), *trained_steps(db)

    # Tokens

    def decoder(self) -> TokenDecoder:
        """The tokenizer of the run's model. Raises NoRun when there is none on this machine."""
        with self._files:
            if self._decoder is None:
                if (file := tokenizer_file(self.folder)) is None:
                    where = self.folder / "model"
                    raise NoRun(f"a tokenizer.json is needed, got none in {where}; put the model's there")
                self._decoder = TokenDecoder(file)
            return self._decoder

    def close(self) -> None:
        """Close the ledger's connections."""
        self._is_closed.set()
        if self._looking is not None:
            self._looking.join()
        with self._opening:
            for reader in self._readers or ():
                reader.close()
            self._readers = None
