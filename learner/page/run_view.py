"""`RunView`: everything the page knows of one run, from its folder: figures, the machine, the ledger; and whether it lives.

Used by `learner.page.episode_page`, from several threads. Invariants: it only reads, and makes, locks or changes no file; what is
kept of a long file or a large ledger is bounded by their numbers of lines and episodes, never by their texts. A run without a
readable ledger (it is on another node, of another release, or not there yet) has figures and a machine, and says why there is no
more.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from buffers.errors import UnderstudyError
from buffers.ledger import episode_views
from buffers.ledger.cli import tokenizer_file
from buffers.ledger.reader import Connection, LedgerReader, LedgerUnreadable, counts, trained_steps
from buffers.ledger.turns import TokenDecoder
from configs.bounded_yaml import YamlError, read_yaml
from learner.diagnosis.diagnose import diagnose
from learner.diagnosis.evidence import counted
from learner.page.metric_columns import MetricColumns
from learner.reporting.run_record import (
    CONFIG,
    LEDGER,
    MACHINE,
    METRICS,
    SUMMARY,
    DamagedFile,
    LineFile,
    figures,
    read_object,
)

EPISODES_AT_ONCE = 400
"""Episodes whose rounds are looked at between two requests' turns."""
LOOK_PAUSE_S = 0.01
RECENT_LINES = 200
"""Lines of metrics.jsonl that are kept whole, for pages that were away for a moment."""
FRESH_S = 10.0
"""A run that wrote so lately lives."""
FINDINGS_S = 10.0
"""Seconds for which what holds a run back is not looked for again."""


class NoRun(UnderstudyError):
    """What was named holds no run."""


class RunView:
    """`run_id`: its name on the page."""

    def __init__(self, run_id: str, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.run_id = run_id
        self.folder = folder
        self._clock = clock
        self._files = threading.RLock()
        """Guards what is kept of small files."""
        self._opening = threading.Lock()
        self._metrics_file, self._machine_file = LineFile(folder / METRICS), LineFile(folder / MACHINE)
        self._metrics = MetricColumns()
        self._num_lines = 0
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=RECENT_LINES)
        self._machine: list[dict[str, Any]] = []
        self._config: tuple[float, dict[str, Any]] = (-1.0, {})
        self._found: tuple[float, dict[str, Any]] = (-FINDINGS_S, {})
        self._reader: LedgerReader | None = None
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
                self._metrics = MetricColumns()
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
            oldest = self._recent[0][0] if self._recent else self._num_lines + 1
            if number != self._num_lines and not oldest - 1 <= number <= self._num_lines:
                return self._num_lines, None
            return self._num_lines, [line for each, line in self._recent if each > number]

    @contextmanager
    def metrics(self) -> Iterator[MetricColumns]:
        """The figures, up to date, for a block."""
        with self._files:
            self.poll()
            yield self._metrics

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

    @property
    def summary(self) -> dict[str, Any] | None:
        """`summary.json`; None: the run has not ended by itself."""
        try:
            return read_object(self.folder / SUMMARY)
        except (OSError, DamagedFile):
            return None

    def setting(self, key: str, default: Any) -> Any:
        """One key of the configuration, such as `buffer.group_size`; `default` where it is not of that kind."""
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found if found is not None and (default is None or isinstance(found, type(default))) else default

    @property
    def serves(self) -> bool:
        """Whether it is a run of `understudy serve`."""
        return bool(self.setting("serve.enabled", False))

    def require_feedback(self) -> None:
        """Raises NoRun where nobody would store feedback."""
        if not self.serves or (state := self.entry()["state"]) != "live":
            told = f"a run that is {state}" if self.serves else "a run that serves no users"
            raise NoRun(f"feedback is taken by a live run of `understudy serve`, got {told}")

    @property
    def max_policy_lag(self) -> int:
        """0 where the configuration does not say."""
        return int(self.setting("buffer.max_policy_lag", 0))

    def entry(self) -> dict[str, Any]:
        """The run in a list of runs."""
        with self._files:
            self.poll()
            summary, last = self.summary, self._machine[-1] if self._machine else None
            seen_at = self._seen_at()
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
                "serves": self.serves,
            }

    def age_until(self) -> float:
        """The time to which ages count: now, or the last sign of life of a run that has ended."""
        entry = self.entry()
        return time.time() if entry["state"] == "live" or entry["seen_at"] is None else float(entry["seen_at"])

    def _seen_at(self) -> float | None:
        """The last sign of life in small files."""
        times = [figures(line).get("at", 0.0) for line in self._machine[-1:]]
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
        groups_per_step = int(self.setting("buffer.groups_per_step", 0))
        if self.serves:
            waits = live_waits_of(line, sessions_per_step=groups_per_step)
        else:
            waits = waits_of(line, groups_per_step=groups_per_step, max_policy_lag=self.max_policy_lag)
        return {**line, "waits": waits}

    def machine(self, *, since: float, points: int) -> dict[str, Any]:
        """Now and before."""
        now = self.machine_now()
        with self._files:
            return {"now": now, "history": machine_history(self._machine, since=since, points=points)}

    def findings(self) -> dict[str, Any]:
        """What holds learning back, the worst first, by the rules of diagnosis; `why`: it cannot be said."""
        with self._files:
            at, found = self._found
            if self._clock() - at >= FINDINGS_S:
                try:
                    findings = [asdict(finding) for finding in diagnose(self.folder)]
                    found = {"findings": findings, "available": True, "why": ""}
                except UnderstudyError as error:
                    found = {"findings": [], "available": False, "why": str(error)}
                self._found = self._clock(), found
            return found

    # The ledger

    @contextmanager
    def ledger(self) -> Iterator[Connection]:
        """A connection that only reads, for a block that sees one commit. Raises LedgerUnreadable."""
        with self._open().read() as db:
            yield db

    def ledger_state(self) -> dict[str, Any]:
        """Whether the ledger can be read, and why not."""
        try:
            self._open()
        except LedgerUnreadable as error:
            return {"available": False, "why": str(error)}
        return {"available": True, "why": ""}

    def _open(self) -> LedgerReader:
        with self._opening:
            if self._reader is not None and self._reader.is_replaced:
                self._reader.close()
                self._reader = None
            if self._reader is None:
                path = self.folder / LEDGER
                if (node := self.setting("buffer.node", "")) and not path.is_file():
                    raise LedgerUnreadable(
                        f"the ledger of this run is on node {node} (buffer.node), in {path} there, and this page reads files of "
                        f"this machine; start `understudy page` on that node"
                    )
                self._reader = LedgerReader(path)
            return self._reader

    def data_version(self) -> int | None:
        """A number that changes with the ledger; None: there is none to read."""
        try:
            return self._open().data_version()
        except LedgerUnreadable:
            return None

    def counted(self) -> tuple[dict[str, int], int, int]:
        """Counts, steps trained, lineages."""
        with self.ledger() as db:
            return counts(db), *trained_steps(db)

    def look_on(self) -> None:
        """See to it that a thread looks at the agents of all tasks and at the rounds of all episodes, newest first."""
        with self._files:
            if self._looking is None or not self._looking.is_alive():
                self._looking = threading.Thread(target=self.look, name=f"look at {self.run_id}", daemon=True)
                self._looking.start()

    def look(self) -> None:
        """Look until all that ended is looked at, or the view is closed."""
        try:
            with closing(LedgerReader(self.folder / LEDGER)) as reader:
                before = episode_views.NEWEST
                while before and not self._is_closed.wait(LOOK_PAUSE_S):
                    with self.ledger() as db:
                        if episode_views.read_agents(db):
                            continue
                        places = episode_views.to_look_at(db, before=before, limit=EPISODES_AT_ONCE)
                    with reader.read() as rounds:  # others may use the ledger meanwhile
                        looked = episode_views.look_at(rounds, places)
                    with self.ledger() as db:
                        episode_views.keep(db, looked)
                        self.looked_at = episode_views.looked_share(db) if places else 1.0
                    before = min(places, default=0)
        except LedgerUnreadable:
            return

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
        """Close the ledger's connection."""
        self._is_closed.set()
        if self._looking is not None:
            self._looking.join()
        with self._opening:
            if self._reader is not None:
                self._reader.close()
            self._reader = None


def read_config(folder: Path) -> dict[str, Any]:
    """`config.yaml`; empty when it cannot be read."""
    try:
        found = read_yaml(folder / CONFIG)
    except (OSError, YamlError):
        return {}
    return found if isinstance(found, dict) else {}


def state_of(
    summary: Mapping[str, Any] | None,
    machine: Mapping[str, Any] | None,
    *,
    seen_at: float | None,
    now: float | None = None,
) -> str:
    """live, finished, stopped (Ctrl-C), failed, killed, or unknown: it never wrote anything. `seen_at`: its last sign of life."""
    now = time.time() if now is None else now
    if summary is not None:
        return "failed" if summary.get("error") else "stopped" if summary.get("stopped") else "finished"
    if machine is not None and machine.get("host") == socket.gethostname():
        return "live" if _is_running(machine) else "killed"
    if seen_at is not None and abs(now - seen_at) < FRESH_S:  # of another machine, whose clock is not this one's
        return "live"
    return "unknown" if seen_at is None else "killed"


def _is_running(machine: Mapping[str, Any]) -> bool:
    """Whether the process of a run on this machine is there. Clocks are set, so none is asked."""
    import psutil

    from learner.reporting.run_record import began_s

    try:
        pid, began = int(machine["pid"]), float(machine["began"])
        # A zombie is dead, and its parent did not look yet.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and abs(began_s(pid) - began) < 1.0
    except (psutil.Error, LookupError, TypeError, ValueError):
        return False


# What the machine of a run does now, who waits for what, and how that was over time; from the lines of machine.jsonl. The run
# writes a line a second (`learner.reporting.run_record`). Pure functions of lines.

LEARNER = {"waiting": 0, "updating": 1}
"""What a learner does, as a number for curves; 2: anything else."""
Line = Mapping[str, Any]

SERIES: dict[str, Callable[[Line], Any]] = {
    "at": lambda line: line.get("at"),
    "prompts_waiting": lambda line: line.get("prompts_waiting"),
    "episodes_running": lambda line: _of(line, "pool").get("running"),
    "slots": lambda line: _of(line, "pool").get("slots"),
    "agents_waiting": lambda line: _of(line, "pool").get("agents_waiting"),
    "groups_open": lambda line: _of(line, "groups").get("open"),
    "groups_ready": lambda line: _of(line, "groups").get("ready"),
    "engines_running": lambda line: _sum(line, "running"),
    "engines_waiting": lambda line: _sum(line, "waiting"),
    "tokens_per_s": lambda line: _sum(line, "tokens_per_s"),
    "kv_share": lambda line: max((_figure(engine, "kv_share") or 0.0 for engine in engines_of(line)), default=None),
    "users": lambda line: _of(line, "live").get("users"),
    "sessions": lambda line: _of(line, "live").get("sessions"),
    "step": lambda line: line.get("step"),
    "learner": lambda line: LEARNER.get(str(line.get("learner", "")), 2),
}


def machine_history(lines: Sequence[Line], *, since: float, points: int) -> dict[str, list[Any]]:
    """The series of the lines after `since`, at most so many points: each the last of its stretch."""
    some = [line for line in lines if isinstance(at := line.get("at"), int | float) and at > since]
    stride = max(1, -(-len(some) // max(points, 1)))
    kept = some[::-1][::stride][::-1]
    return {name: [read(line) for line in kept] for name, read in SERIES.items()}


def engines_of(line: Line) -> list[dict[str, Any]]:
    """The engines in a line."""
    found = line.get("engines")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def waits_of(line: Line, *, groups_per_step: int, max_policy_lag: int) -> list[dict[str, str]]:
    """The waits of the machine: who, for what, and why in a sentence; each pair once."""
    pool, groups, tasks = _of(line, "pool"), _of(line, "groups"), _of(line, "tasks")
    ready, open_, running = _number(groups, "ready"), _number(groups, "open"), _number(pool, "running")
    slots, asking = _number(pool, "slots"), _number(pool, "agents_waiting")
    may_open = tasks.get("admissible_groups")
    found: dict[tuple[str, str], str] = {}

    def say(who: str, what: str, why: str) -> None:
        found[who, what] = f"{found[who, what]}; {why}" if (who, what) in found else why

    if line.get("phase"):
        say("agents", "learner", f"{line['phase']} ...")
    if line.get("learner") == "waiting":
        say("learner", "groups", f"{ready} of the {groups_per_step} groups of a step are ready")
    if may_open == 0:
        say(
            "tasks",
            "learner",
            f"no group may open before the next update: the groups under way fill buffer.max_policy_lag={max_policy_lag}",
        )
    elif asking == 0 and running < slots and line.get("learner") != "starting":
        say("tasks", "agents", f"{slots - running} of {slots} slots are free and no agent asks for an episode")
    if asking and running >= slots > 0:
        say("agents", "tasks", f"all {slots} slots are taken, with {counted(asking, 'agent')} waiting")
    elif asking and may_open == 0:
        say("agents", "learner", f"no group may open before the next update, with {counted(asking, 'agent')} waiting")
    for why in _waits_of_prompts(line):
        say("prompts", "engines", why)
    if _is_idle(line):
        say("engines", "prompts", "nothing is generated and no prompt waits: agents are busy")
    if open_:
        say("groups", "agents", f"scores of members are missing in {counted(open_, 'group')}")
    return [{"who": who, "for": what, "why": why} for (who, what), why in found.items()]


def live_waits_of(line: Line, *, sessions_per_step: int) -> list[dict[str, str]]:
    """The waits of a run of `understudy serve`, which starts no agents: for its users, for what they say, and for its engines."""
    groups = _of(line, "groups")
    found = [("prompts", "engines", why) for why in _waits_of_prompts(line)]
    if line.get("learner") == "waiting":
        told = f"{_number(groups, 'ready')} of the {sessions_per_step} sessions of a step have ended with feedback"
        found.append(("learner", "feedback", told))
    if open_ := _number(groups, "open"):
        told = f"{counted(open_, 'session')} may go on, or nothing was said of them yet"
        found.append(("feedback", "users", told))
    if _is_idle(line):
        found.append(("engines", "users", "nobody asks for anything just now"))
    return [{"who": who, "for": what, "why": why} for who, what, why in found]


def _waits_of_prompts(line: Line) -> Iterator[str]:
    prompts, waiting = _number(line, "prompts_waiting"), _sum(line, "waiting") or 0
    if down := [str(engine.get("name")) for engine in engines_of(line) if not engine.get("is_up")]:
        yield f"{', '.join(down)} down: being started again"
    if prompts or waiting:
        yield f"{counted(prompts, 'prompt')} in the queue, {waiting} without room in a cache"


def _is_idle(line: Line) -> bool:
    busy = _sum(line, "running") or _number(line, "prompts_waiting") or _number(line, "generating")
    return bool(engines_of(line)) and not busy


def _of(line: Line, name: str) -> Mapping[str, Any]:
    found = line.get(name)
    return found if isinstance(found, dict) else {}


def _number(line: Line, name: str) -> int:
    return int(_figure(line, name) or 0)


def _sum(line: Line, name: str) -> float | None:
    found = engines_of(line)
    return sum(_figure(engine, name) or 0 for engine in found) if found else None


def _figure(line: Line, name: str) -> float | None:
    return figures(line).get(name)
