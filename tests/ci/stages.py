"""Stages of tests, the second and third play of what failed in one, and the verdict.

A test that failed is played again, alone, twice, each time in a process of its own, when its stage has nothing else to do. Passed
both times it is *unstable*: it is printed and kept in `tests/unstable.jsonl`, and refuses nothing, unless there are more than
MOST_UNSTABLE of them or it was unstable in MOST_RUNS of the last LAST_RUNS runs. Failed once more it is a failure. What dies
without saying which test failed is a failure, too. A process that a test left behind is ended, and counts as an unstable test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_UNSTABLE = 5
"""Unstable tests of one run that do not refuse it."""
MOST_RUNS = 3
LAST_RUNS = 10
PLAYS = 2
"""Of a test that failed, each alone."""
FIRST_LINES = 12
"""Of a failure, that are kept."""
MARK = "UNDERSTUDY_STAGE"
"""The variable by which a stage's processes are known."""
LEAVE_S = 60.0
"""What still ends by itself has this long."""
FOLDER = re.compile(r"/(?:[\w.@+-]+/)+")
TESTS_FAILED = 1
"""pytest's exit code where it ran all tests and some failed; every other one but 0 is not about a test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Tests that run together. `command`: it runs pytest, with the words that it is given. `beside`: a command that runs meanwhile;
    it has no tests that could be played again. `ends_run`: where it fails, no other stage is begun."""

    name: str
    command: Callable[[list[str]], list[str]]
    beside: Sequence[str] = ()
    ends_run: bool = False


@dataclass(slots=True, kw_only=True)
class Result:
    """A stage's. `failed`: what is wrong, in words, or a test; `unstable`: test -> its first failure."""

    name: str
    seconds: float
    failed: list[str] = field(default_factory=list)
    unstable: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        word = "failed" if self.failed else "unstable" if self.unstable else "passed"
        named = self.failed or list(self.unstable)
        minutes, seconds = divmod(round(self.seconds), 60)
        return f"{self.name:<10}{word:<10}{minutes:>3} min {seconds:02} s" + "".join(
            f"\n        {each}" for each in named
        )


def run_stages(
    stages: Sequence[Stage], *, root: Path, disturbed: Callable[[], AbstractContextManager[None]] = nullcontext
) -> list[Result]:
    """Runs one after another in the folder `root`, then plays again what failed; prints all that they say, and not the verdict.
    `disturbed`: surrounds each stage, and no second play."""
    results: list[Result] = []
    failures: list[dict[str, str]] = []
    for stage in stages:
        say(f"stage {stage.name}")
        with disturbed():
            result, outputs = _run(stage, root=root)
        results.append(result)
        failures.append(outputs)
        if stage.ends_run:
            _play_again(result, outputs, root=root)
            failures[-1] = {}
            if result.failed:
                return results
    for result, outputs in zip(results, failures, strict=True):
        _play_again(result, outputs, root=root)
    return results


def _run(stage: Stage, *, root: Path) -> tuple[Result, dict[str, str]]:
    """Its result without what may be chance, and each failed test's output."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="understudy-ci-") as folder:
        log = Path(folder) / "failures.jsonl"
        beside = subprocess.Popen(stage.beside, cwd=root) if stage.beside else None
        words = ["-p", "tests.ci.failure_log", "--failure-log", str(log)]
        mark = uuid.uuid4().hex
        code = subprocess.run(stage.command(words), cwd=root, check=False, env={**os.environ, MARK: mark}).returncode
        result = Result(name=stage.name, seconds=0.0)
        result.unstable = _end_left_behind(mark)
        if beside is not None and beside.wait() != 0:
            result.failed.append(f"{' '.join(stage.beside)}: exit code {beside.returncode}")
        lines = _read(log)
    result.seconds = time.monotonic() - began
    outputs = {line["test"]: line["output"] for line in reversed(lines) if "test" in line}
    ends = [line["exit"] for line in lines if "exit" in line]
    if not ends or ends[-1] not in (0, TESTS_FAILED) or (code != 0 and not outputs):
        result.failed.append(f"pytest did not play all tests: exit code {ends[-1] if ends else code}")
    return result, outputs


def _read(log: Path) -> list[dict[str, Any]]:
    """Its lines, without one that was cut off, as on a full disk."""
    lines = []
    for line in log.read_text("utf-8").splitlines() if log.exists() else []:
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def _end_left_behind(mark: str) -> dict[str, str]:
    """Ends the processes with this mark once they have had time to end by themselves. The test that started each -> its command."""
    until = time.monotonic() + LEAVE_S
    while (left := _marked(mark)) and time.monotonic() < until:
        time.sleep(0.2)
    found = {}
    for pid, environment in left.items():
        with suppress(OSError):
            test = environment.get("PYTEST_CURRENT_TEST", "a test (").rpartition(" (")[0]
            found[f"{test} (left a process behind)"] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            os.kill(pid, signal.SIGKILL)
    return found


def _marked(mark: str) -> dict[int, dict[str, str]]:
    """Process id -> environment of those that live."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            pairs = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            if environment.get(MARK) == mark:
                found[int(entry.name)] = environment
    return found


def _play_again(result: Result, outputs: dict[str, str], *, root: Path) -> None:
    """Divides what failed into `failed` and `unstable`."""
    if len(outputs) > MOST_UNSTABLE:  # a failure, whatever they are
        result.failed += [f"{test} (not played again: {len(outputs)} failed)" for test in outputs]
        return
    for test, output in outputs.items():
        say(f"{test} failed in stage {result.name}; it is played again, alone, {PLAYS} times")
        plays = []
        for _ in range(PLAYS):
            plays.append(_played(test, root=root))
            if plays[-1].returncode != 0:
                result.failed.append(test)
                break
        else:
            result.unstable[test] = output
        say(f"{test} failed, and alone: {', '.join('passed' if play.returncode == 0 else 'failed' for play in plays)}")
        say(f"in the stage:\n{output}")
        for play in plays:
            say(f"alone:\n{play.stdout[-10_000:]}")


def _played(test: str, *, root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", test]
    return subprocess.run(
        command, cwd=root, check=False, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def keep(results: Sequence[Result], *, path: Path, commit: str, machine: dict[str, Any], date: str) -> list[str]:
    """Appends this run's line to the file at `path`; returns what its unstable tests refuse it for, in words."""
    unstable = {test: output for result in results for test, output in result.unstable.items()}
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    first = {test: _first_lines(output) for test, output in unstable.items()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"date": date, "commit": commit, "machine": machine, "unstable": first}) + "\n")
    refused = []
    if len(unstable) > MOST_UNSTABLE:
        refused.append(f"{len(unstable)} unstable tests: at most {MOST_UNSTABLE} are borne with")
    earlier = [
        json.loads(line)["unstable"] for line in lines[len(lines) - LAST_RUNS + 1 if len(lines) >= LAST_RUNS else 0 :]
    ]
    for test in unstable:
        times = 1 + sum(test in run for run in earlier)
        if times >= MOST_RUNS:
            refused.append(f"{test} was unstable in {times} of the last {len(earlier) + 1} runs")
    return refused


def _first_lines(output: str) -> list[str]:
    """Of what failed, as pytest marks it; all lines where it marks none. Folders of this machine are no matter of others."""
    lines = FOLDER.sub(".../", output).splitlines()
    return ([line for line in lines if line.startswith(("E ", ">"))] or lines)[:FIRST_LINES]


def machine_speed() -> dict[str, Any]:
    """Processors, load of the last minute, milliseconds of a loop of Python (the best of five), and GiB that the disk has left."""

    def loop_ms() -> float:
        began = time.perf_counter()
        sum(number * number for number in range(1_000_000))
        return (time.perf_counter() - began) * 1000

    times = [loop_ms() for _ in range(5)]
    return {
        "processors": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "loop_ms": round(min(times)),
        "free_gib": shutil.disk_usage(tempfile.gettempdir()).free >> 30,
    }


def say(words: str) -> None:
    print(f"ci: {words}", flush=True)
