"""Every file that a run writes meets every fault of a disk: `python -m tests.faults.disk_faults [--write]`.

A run of the demo is made behind a library that lets single files be refused or be slow (`disk_faults.c`, LD_PRELOAD): on full disks
all writers but the first would go untested. Its files are found by watching its folder, and one that no row of the table tells of is
an error. Faults come one after another into one run, those of the first and last files into runs of their own. Prints the table of
docs/recovery.md, or writes it there. After each fault is over the run has to go on by itself; in the end no step is lost.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from watchfiles import watch

from buffers.ledger.schema import read_database
from buffers.ledger.tools.doctor import findings
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recovery.md"
BEGIN, END = "<!-- python -m tests.faults.disk_faults --write: -->\n", "<!-- end -->\n"
FAULTS = {"full": b"f", "no inodes": b"i", "read-only": b"r", "slow (12 s)": b"s"}
LOCKED = "locked"
HELD_S = {"slow (12 s)": 14.0, LOCKED: 14.0}
KNOBS = (
    "run.checkpoints.every=2", "warm_start.steps=5", "buffer.groups_per_step=4", "buffer.group_size=2", "agents.concurrency=16",
)  # fmt: skip
SIZE = 4096


@dataclass(frozen=True)
class File:
    """A row of the table. `words`: what the paths of these files hold."""

    name: str
    words: tuple[str, ...]
    is_looked_at: bool = False
    """It is for people to look at: what a disk does not take is left out."""


RUNNING = (
    File("`ledger.sqlite`, `-wal`, `-shm`", ("/run/ledger.sqlite",)),
    File("`checkpoints/*/learner/`", (".tmp/learner",)),
    File("`checkpoints/*/model/`", (".tmp/.model.tmp", ".tmp/model")),
    File("`checkpoints/*/run.json`", (".tmp/run.json",)),
    File("`checkpoint`", ("/run/.checkpoint.new",)),
    File("`metrics.jsonl`", ("/run/metrics.jsonl", "/run/.metrics.jsonl.tmp")),
    File("`machine.jsonl`", ("/run/machine.jsonl",), True),
    File("`traces.jsonl`", ("/run/traces.jsonl",), True),
    File("`tokens/`", ("/run/tokens",), True),
    File("`tensorboard/`", ("/run/tensorboard",), True),
    File("`log.txt`", ("/run/log.txt",), True),
    File("`agents/*/log.txt`", ("/run/agents",), True),
)
STARTING = (
    File("`.NAME.lock`", ("/.run.lock",)),
    File("`config.yaml`", ("/run/config.yaml", "/run/.config.yaml.tmp")),
    File("`server.key`", ("/run/server.key",)),
    File("`model/`", ("/run/model/", "/run/.model.")),
    File("`trackers.json`", ("/run/trackers.json", "/run/.trackers.json.tmp"), True),
    File("`task_files.json`", ("/run/task_files.json", "/run/.task_files.json.tmp")),
    File("`agent.env`, `scorer.env`, `admin.env`", (".env",)),
    File("`env.log`", ("/run/env.log",), True),
    File("`data.log`", ("/run/data.log",), True),
)
ENDING = (
    File("`summary.json`", ("/run/summary.json", "/run/.summary.json.tmp"), True),
    File("`reward.png`", ("/run/reward.png", "/run/.reward.png.tmp"), True),
)


class Disk:
    """The faults of a run that was started with `environment`."""

    def __init__(self, folder: Path) -> None:
        library, plan = folder / "disk_faults.so", folder / "plan"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-o", library, ROOT / "tests/faults/disk_faults.c", "-ldl"], check=True
        )
        plan.write_bytes(bytes(SIZE))
        with plan.open("r+b") as file:
            self._plan = mmap.mmap(file.fileno(), SIZE)
        self.environment = {"LD_PRELOAD": str(library), "DISK_FAULT": str(plan)}

    @contextmanager
    def fault(self, name: str, file: File) -> Iterator[None]:
        """In the block these files are refused, or slow."""
        words = b"".join(word.encode() + b"\0" for word in file.words) + b"\0"
        self._plan[4 : 8 + len(words)] = bytes(4) + words
        self._plan[0:1] = FAULTS[name]
        try:
            yield
        finally:
            self._plan[0:1] = b"\0"

    @property
    def num_met(self) -> int:
        """Calls that the fault has met."""
        return int(struct.unpack_from("i", self._plan, 4)[0])


@dataclass
class Run:
    """A run in `<folder>/runs/run`, and what it prints."""

    folder: Path
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)

    @property
    def place(self) -> Path:
        return self.folder / "runs" / "run"

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def observe(self, ended: threading.Event) -> None:
        for changes in watch(self.folder / "runs", stop_event=ended, debounce=50, step=10, rust_timeout=100):
            self.paths |= {path for _, path in changes}

    def step(self) -> int:
        """The last one in the ledger."""
        with suppress(Exception), closing(read_database(self.place / "ledger.sqlite")) as db:
            return int(db.execute("SELECT coalesce(max(step), 0) FROM step").fetchone()[0])
        return 0

    def wait_for_step(self, step: int, *, seconds: float = PATIENCE_S) -> bool:
        until = time.monotonic() + seconds
        while self.step() < step:
            if self.process.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True


@contextmanager
def started(folder: Path, disk: Disk, *overrides: str) -> Iterator[Run]:
    folder.mkdir(exist_ok=True)
    (folder / "runs").mkdir()
    command = [
        sys.executable,
        "-m",
        "learner.run",
        "--config",
        "configs/demo.yaml",
        f"run.dir={folder / 'runs'}",
        "run.name=run",
    ]
    process = subprocess.Popen(
        [*command, *KNOBS, *overrides], cwd=ROOT, env=os.environ | disk.environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, process_group=0,
    )  # fmt: skip
    run, ended = Run(folder, process), threading.Event()
    threads = [threading.Thread(target=run.read), threading.Thread(target=run.observe, args=(ended,))]
    for thread in threads:
        thread.start()
    try:
        yield run
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        ended.set()
        for thread in threads:
            thread.join()


@contextmanager
def locked(run: Run) -> Iterator[None]:
    """Another program's transaction on the ledger."""
    hold = "import sqlite3, sys; d = sqlite3.connect(sys.argv[1]); d.execute('BEGIN IMMEDIATE'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(run.place / "ledger.sqlite")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield
        assert holder.stdin is not None
        holder.stdin.close()


def while_running(run: Run, disk: Disk, file: File, fault: str) -> str:
    """One fault of one file in a run under way: what happened."""
    before, said = run.step(), len(run.lines)
    held_s = HELD_S.get(fault, 3.0)
    with locked(run) if fault == LOCKED else disk.fault(fault, file):
        until = time.monotonic() + 15.0
        while fault != LOCKED and not disk.num_met and time.monotonic() < until:
            time.sleep(0.02)
        if fault != LOCKED and not disk.num_met:
            return "no such call"
        at = run.step()
        time.sleep(held_s)
        during = run.step() - at
    ended = time.monotonic()
    goes_on = run.wait_for_step(run.step() + 3)
    told = " / ".join(short(line) for line in run.lines[said:] if TOLD.search(line))
    print(
        f"{file.name} {fault}: steps {before}+{during}, on {goes_on} after {time.monotonic() - ended:.1f} s: {told}",
        flush=True,
    )
    assert goes_on, f"{file.name}, {fault}: the run did not go on: {run.lines[-30:]}"
    return "goes on" if during > 1 else "waits"


TOLD = re.compile(r"waits|could not|written|error|goes on|killed|note:|Traceback")


def short(line: str) -> str:
    return line if len(line) < 200 else f"{line[:200]} ..."


def at_the_start(folder: Path, disk: Disk, file: File, fault: str) -> str:
    """A fault that is there from the start and ends after a while, where it has not ended the run: what happened."""
    with started(folder, disk, "run.steps=2") as run:
        with disk.fault(fault, file):
            until = time.monotonic() + PATIENCE_S
            while run.process.poll() is None and not disk.num_met and not run.step() and time.monotonic() < until:
                time.sleep(0.05)
            met = disk.num_met
            until = time.monotonic() + HELD_S.get(fault, 8.0)
            while run.process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
        code = run.process.wait(PATIENCE_S)
    told = " / ".join(short(line) for line in run.lines if TOLD.search(line))
    print(f"{file.name} {fault}: met {met}, code {code}: {told}", flush=True)
    assert not any("Traceback" in line for line in run.lines), "\n".join(run.lines)
    if not met:
        return "no such call"
    return "goes on" if code == 0 else "one line"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.disk_faults", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--write", action="store_true", help="into docs/recovery.md")
    parser.add_argument("--only", default="", help="files whose names hold this")
    parser.add_argument("--parts", default="running,starting,ending")
    options = parser.parse_args()
    rows: dict[str, dict[str, str]] = {}
    parts = options.parts.split(",")
    with tempfile.TemporaryDirectory(prefix="understudy-disks-") as name:
        folder = Path(name)
        disk = Disk(folder)
        chosen = {part: [file for file in files if options.only in file.name] for part, files in (
            ("running", RUNNING), ("starting", STARTING), ("ending", ENDING))}  # fmt: skip
        if "running" in parts:
            rows |= all_while_running(folder / "running", disk, chosen["running"])
        for part in ("starting", "ending"):
            for file in chosen[part] if part in parts else ():
                rows[file.name] = {}
                for fault in FAULTS:
                    place = Path(tempfile.mkdtemp(dir=folder))
                    rows[file.name][fault] = at_the_start(place, disk, file, fault)
    print(json.dumps(rows, indent=1))


def all_while_running(folder: Path, disk: Disk, files: list[File]) -> dict[str, dict[str, str]]:
    rows: dict[str, dict[str, str]] = {file.name: {} for file in files}
    with started(folder, disk, "run.steps=100000") as run:
        assert run.wait_for_step(3), run.lines
        for file in files:
            for fault in (*FAULTS, LOCKED):
                if fault != LOCKED or "ledger" in file.name:
                    rows[file.name][fault] = while_running(run, disk, file, fault)
    with closing(read_database(run.place / "ledger.sqlite")) as db:
        assert findings(db) == []
        steps = [step for (step,) in db.execute("SELECT step FROM step ORDER BY step")]
    made = [json.loads(line)["step"] for line in (run.place / "metrics.jsonl").read_text().splitlines()]
    print(
        run.process.returncode,
        run.lines[-12:],
        steps == list(range(1, len(steps) + 1)),
        [n for n in made if n] == steps,
    )
    unknown = [
        path
        for path in run.paths
        if not any(word in path for file in (*RUNNING, *STARTING, *ENDING) for word in file.words)
    ]
    print("not in the table:", sorted(unknown)[:40])
    return rows


if __name__ == "__main__":
    main()
