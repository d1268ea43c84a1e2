"""A whole run as a user starts it: a process of its own with a mark by which all its processes are found."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from buffers.errors import UnderstudyError
from configs.load import load_config
from tests.support.patience import PATIENCE_S
from tests.support.processes import warm_runs

ROOT = Path(__file__).parents[2]
MARK = warm_runs.MARK
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@dataclass
class Run:
    """A started run: its process, its folder, and the mark that all its processes carry in their environment."""

    process: subprocess.Popen[str] | warm_runs.ForkedRun
    folder: Path
    mark: str
    children: set[tuple[str, str]] = field(default_factory=set)
    """(process id, start time) of each process seen."""

    def wait(self, timeout_s: float = 2 * PATIENCE_S) -> tuple[int, str]:
        """(exit code, what was printed); fails when it does not end."""
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    def wait_for_step(self, step: int, timeout_s: float = 2 * PATIENCE_S) -> None:
        """Until `step` is in metrics.jsonl."""
        until = time.monotonic() + timeout_s
        path = self.folder / "metrics.jsonl"
        while not (path.exists() and any(json.loads(line)["step"] >= step for line in path.read_text().splitlines())):
            assert self.process.poll() is None, f"the run ended early: {self.process.communicate()[0]}"
            assert time.monotonic() < until, f"no step {step} within {timeout_s} s"
            self.processes()  # sees the children
            time.sleep(0.2)

    def processes(self) -> list[str]:
        """Command lines of all living processes of this run: those that carry its mark, and all below them (vLLM's engine writes
        its title over its environment) even after their parents ended. Zombies do not count."""
        seen: dict[str, tuple[str, str, str]] = {}
        ours = {str(self.process.pid)} if self.process.poll() is None else set()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # it ended while we looked, or is not ours
                if not entry.name.isdigit():
                    continue
                state, parent, *_, started = (entry / "stat").read_text().rpartition(")")[2].split()[:20]
                seen[entry.name] = (state, parent, started)
                marked = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
                if marked or (entry.name, started) in self.children:
                    ours.add(entry.name)
        while below := {pid for pid, (_, parent, _) in seen.items() if parent in ours} - ours:
            ours |= below
        self.children |= {(pid, seen[pid][2]) for pid in ours & seen.keys()}
        found = []
        for pid in ours & seen.keys():
            with suppress(OSError):
                if seen[pid][0] != "Z":
                    found.append(f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode()}")
        return found

    def open_to_others(self) -> list[str]:
        """What its processes listen on beyond loopback."""
        found = []
        for line in self.processes():
            with suppress(psutil.NoSuchProcess):
                for one in psutil.Process(int(line.split()[0])).net_connections(kind="inet"):
                    if one.status == psutil.CONN_LISTEN and one.laddr.ip not in LOOPBACK:
                        found.append(f"{one.laddr.ip}:{one.laddr.port} of {line[:100]}")
        return found

    def kill(self) -> None:
        """As the kernel does when memory is short, or a person who has had enough: no process of the run gets to say a word."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        for line in self.processes():
            with suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)


STARTED: list[Run] = []
"""What a test has started; it is killed at the test's end, should the test have failed before the run ended."""


def start(
    tmp_path: Path,
    *overrides: str,
    config: str = "configs/demo.yaml",
    resume: str = "",
    flags: tuple[str, ...] = (),
    imports: bool = False,
    after: str = "",
) -> Run:
    """`imports`: a process of its own, as a user's. Otherwise it is forked of one that has imported everything, and is started in
    half of the time. `after`: Python that the process executes first; what it changes, engine and ranks inherit."""
    mark = uuid.uuid4().hex
    arguments = [
        "--config",
        config,
        f"run.dir={tmp_path}",
        "run.name=run",
        f"agents.environment=[{MARK}]",
        *overrides,
        *flags,
        *(["--resume", resume] if resume else []),
    ]
    environment = {**os.environ, MARK: mark}
    if not (imports or flags or after):
        return start_here(arguments, folder=ROOT, environment=environment, results=tmp_path / "run")
    program = ["-c", f"{after}\nfrom learner.run import leave, main\nleave(main())"] if after else ["-m", "learner.run"]
    process = subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    run = Run(process, tmp_path / "run", mark)
    STARTED.append(run)
    return run


def start_here(
    arguments: list[str], *, folder: Path, environment: Mapping[str, str], results: Path | None = None
) -> Run:
    """A forked run with these arguments only, in this folder. `results`: its own folder, where a test reads it."""
    mark = environment.get(MARK) or uuid.uuid4().hex
    process = warm_runs.start(arguments, folder=folder, environment={**environment, MARK: mark})
    run = Run(process, results or folder, mark)
    STARTED.append(run)
    return run


def refusal(folder: Path, *overrides: str, config: str = "configs/demo.yaml") -> str:
    """Why a run with this configuration ends before anything of it has started; it is built in this process."""
    from learner.pipeline import Pipeline
    from learner.reporting.display import Display
    from learner.reporting.tracker import Tracker

    loaded = load_config(ROOT / config, [f"run.dir={folder}", "run.name=run", *overrides])
    (folder / "run").mkdir()
    with Tracker(folder / "run") as tracker, pytest.raises(UnderstudyError) as refused:
        asyncio.run(Pipeline(loaded, folder=folder / "run", display=Display(1), tracker=tracker).run())
    return str(refused.value)


def assert_nothing_left(run: Run) -> None:
    until = time.monotonic() + PATIENCE_S
    while run.processes() and time.monotonic() < until:
        time.sleep(0.2)
    assert run.processes() == []
