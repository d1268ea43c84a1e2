"""Every file that a run writes meets every fault of a disk: `python -m tests.faults.disk_faults [--write]`.

A run of the demo is made behind a library that lets single files be refused or be slow (`disk_faults.c`, LD_PRELOAD): on a disk
that is full all writers but the first would go untested. Its files are found by watching its folder, and one that no row of the
table tells of is an error. Faults come one after another into one run, those of the first and last files into runs of their own.
Prints the table of docs/recovery.md, or writes it there. After each fault the run has to go on by itself; no step is lost in the
end.
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
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from watchfiles import watch

from buffers.ledger.doctor import findings
from buffers.ledger.schema import read_database
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recovery.md"
BEGIN, END = "<!-- python -m tests.faults.disk_faults --write: -->\n", "<!-- end -->\n"
FAULTS = {"full": b"f", "no inodes": b"i", "read-only": b"r", "slow (12 s)": b"s"}
LOCKED = "locked"
HELD_S = {"slow (12 s)": 14.0, LOCKED: 14.0}
NOISY = """\
import os, runpy, sys, threading, time

def talk():  # whoever cannot print ends
    try:
        while True:
            print("a line", file=sys.stderr, flush=True)
            time.sleep(0.2)
    except OSError:
        os._exit(1)

threading.Thread(target=talk, daemon=True).start()
sys.argv = sys.argv[1:]
sys.path.insert(0, ROOT)
runpy.run_path(sys.argv[0], run_name="__main__") if sys.argv[0].endswith(".py") else runpy.run_module(
    sys.argv[0], run_name="__main__", alter_sys=True
)
"""
"""A program that prints all the time, around one that does not."""
KNOBS = (
    "run.checkpoints.every=2", "sft.steps=5", "buffer.groups_per_step=4", "buffer.group_size=2", "agents.concurrency=16",
)  # fmt: skip
SIZE = 4096


@dataclass(frozen=True)
class File:
    """A row of the table. `words`: what the paths of these files hold."""

    name: str
    words: tuple[str, ...]
    lost: str = "nothing"
    """What a refusal costs; of files that people look at it is what the disk did not take."""


RUNNING = (
    File("`ledger.sqlite`, `-wal`, `-shm`", ("/run/ledger.sqlite",)),
    File("`checkpoints/*/learner/`", (".tmp/learner",)),
    File("`checkpoints/*/model/`", (".tmp/.model.tmp", ".tmp/model")),
    File("`checkpoints/*/run.json`", (".tmp/run.json",)),
    File("`checkpoint`", ("/run/.checkpoint.new",)),
    File("`metrics.jsonl`", ("/run/metrics.jsonl", "/run/.metrics.jsonl.tmp"), "nothing: its lines wait"),
    File("`machine.jsonl`", ("/run/machine.jsonl", "/run/.machine.jsonl.tmp"), "the seconds of meanwhile"),
    File("`traces.jsonl`", ("/run/traces.jsonl",), "the steps of meanwhile"),
    File("`tokens/`", ("/run/tokens",), "the steps of meanwhile"),
    File("`tensorboard/`", ("/run/tensorboard",), "the steps of meanwhile"),
    File("`log.txt`", ("/run/log.txt",), "the lines of meanwhile"),
    File("`log.txt` of each agent", ("/run/agents",), "the lines of meanwhile"),
)
STARTING = (
    File("`.NAME.lock`", ("/.run.lock",)),
    File("`config.yaml`", ("/run/config.yaml", "/run/.config.yaml.tmp")),
    File("`server.key`", ("/run/server.key",)),
    File("`model/`", ("/run/model/", "/run/.model.")),
    File(
        "`trackers.json`",
        ("/run/trackers.json", "/run/.trackers.json.tmp"),
        "the trackers' runs: a resumed run begins others",
    ),
    File("`task_files.json`", ("/run/task_files.json", "/run/.task_files.json.tmp")),
    File("`agent.env`, `scorer.env`, `admin.env`", (".env",)),
    File("`env.log`", ("/run/env.log",), "the lines of meanwhile"),
    File("log of `data.make`", ("/run/data.log",), "the lines of meanwhile"),
)
ENDING = (
    File("`summary.json`", ("/run/summary.json", "/run/.summary.json.tmp"), "the file"),
    File("`reward.png`", ("/run/reward.png", "/run/.reward.png.tmp"), "the file"),
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
        with self.process.stdout as lines:
            for line in lines:
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


def noisy(folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Overrides: agent (with `environment`), environment and `data.make` of the demo print all the time."""
    (folder / "noisy.py").write_text(NOISY.replace("ROOT", repr(str(ROOT))))
    begin = f"'{{python}}', {folder / 'noisy.py'}"
    make = f"{begin}, env_adapters.walk.make_data, --tasks, {folder}/tasks.parquet, --traces, {folder}/traces.parquet"
    return [
        f"agents.environment=[{', '.join(environment)}]",
        f"agents.command=[{begin}, {ROOT}/agents/examples/walk_agent.py]",
        f"env.command=[{begin}, env_adapters.walk.server]",
        f"data.make=[{make}]",
        f"data.tasks={folder}/tasks.parquet",
        f"sft.demonstrations={folder}/traces.parquet",
    ]


@contextmanager
def started(folder: Path, environment: Mapping[str, str], *overrides: str) -> Iterator[Run]:
    """A run of the demo in `folder`, until the end of the block, by Ctrl-C."""
    (folder / "runs").mkdir(parents=True, exist_ok=True)
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
        [*command, *KNOBS, *noisy(folder, environment), *overrides], cwd=ROOT, env=os.environ | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0,
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
    hold = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.execute('BEGIN IMMEDIATE'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(run.place / "ledger.sqlite")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield
        holder.kill()


def while_running(run: Run, disk: Disk, file: File, fault: str) -> str:
    """One fault of one file in a run under way: what happened."""
    before, said = run.step(), len(run.lines)
    held_s = HELD_S.get(fault, 3.0)
    with locked(run) if fault == LOCKED else disk.fault(fault, file):
        until = time.monotonic() + 8.0
        while fault != LOCKED and not disk.num_met and time.monotonic() < until:
            time.sleep(0.02)
        if fault != LOCKED and not disk.num_met:
            return "-"
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
    return "waits" if fault.startswith("slow") or "waits" in told else "goes on"


TOLD = re.compile(r"waits|could not|written|error|goes on|killed|note:|Traceback")


def short(line: str) -> str:
    return line if len(line) < 200 else f"{line[:200]} ..."


def at_the_start(folder: Path, disk: Disk, file: File, fault: str) -> str:
    """A fault that is there from the start and ends after a while, where it has not ended the run: what happened."""
    with started(folder, disk.environment, "run.steps=2") as run:
        with disk.fault(fault, file):
            until = time.monotonic() + PATIENCE_S
            while run.process.poll() is None and not disk.num_met and time.monotonic() < until:
                time.sleep(0.05)
            met = disk.num_met
            with suppress(subprocess.TimeoutExpired):
                run.process.wait(HELD_S.get(fault, 8.0))
        code = run.process.wait(PATIENCE_S)
    told = [short(line) for line in run.lines if TOLD.search(line)]
    print(f"{file.name} {fault}: met {met}, code {code}: {' / '.join(told)}", flush=True)
    assert not any("Traceback" in line for line in run.lines), "\n".join(run.lines)
    return "-" if not met else "goes on" if code == 0 else "is refused"


def all_while_running(folder: Path, disk: Disk, files: list[File]) -> dict[str, dict[str, str]]:
    """All faults of these files, one after another in one run; what happened, by file and fault."""
    rows: dict[str, dict[str, str]] = {file.name: {} for file in files}
    with started(folder, disk.environment, "run.steps=100000") as run:
        assert run.wait_for_step(3), run.lines
        for file in files:
            for fault in (*FAULTS, LOCKED):
                if fault != LOCKED or "ledger" in file.name:
                    rows[file.name][fault] = while_running(run, disk, file, fault)
    with closing(read_database(run.place / "ledger.sqlite")) as db:
        assert findings(db) == []
        steps = [step for (step,) in db.execute("SELECT step FROM step ORDER BY step")]
    lines = [json.loads(line) for line in (run.place / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)) == [line["step"] for line in lines if line["step"]]
    known = ("/#", "/run/last", "/run/best", *(word for file in (*RUNNING, *STARTING, *ENDING) for word in file.words))
    # `#`: a file without a name, by which a disk is tried
    unknown = {path for path in run.paths if not any(word in path for word in known)} - {
        str(place) for place in (run.place, run.place.parent, run.place / "model")
    }
    assert not unknown, f"files that no row tells of: {sorted(unknown)}"
    assert run.process.returncode == 130, run.lines[-20:]
    return rows


def table(rows: dict[str, dict[str, str]]) -> str:
    lost = {file.name: file.lost for file in (*RUNNING, *STARTING, *ENDING)}
    lines = [f"| file | {' | '.join(FAULTS)} | {LOCKED} | lost |", f"|---|{'---|' * (len(FAULTS) + 2)}"]
    for name, cells in rows.items():
        shown = " | ".join(cells.get(fault, "-") for fault in (*FAULTS, LOCKED))
        lines.append(f"| {name} | {shown} | {lost[name]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.disk_faults", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--write", action="store_true", help="into docs/recovery.md")
    parser.add_argument("--only", default="", help="files whose names hold this")
    options = parser.parse_args()
    assert not (options.write and options.only), "--write needs all files"
    rows: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="understudy-disks-") as name:
        folder = Path(name)
        disk = Disk(folder)
        if files := [file for file in RUNNING if options.only in file.name]:
            rows |= all_while_running(folder / "running", disk, files)
        for file in (*STARTING, *ENDING):
            if options.only in file.name:
                places = {fault: Path(tempfile.mkdtemp(dir=folder)) for fault in FAULTS}
                rows[file.name] = {fault: at_the_start(place, disk, file, fault) for fault, place in places.items()}
    print(table(rows))
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + table(rows) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
