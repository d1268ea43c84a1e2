"""Finds the processes of a run, and kills one of them: what every fault test kills with.

Invariant, the witness: a kill counts only when the process that was killed was alive and is gone.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

PARTS = {
    "engine": "VLLM::EngineCore",
    "learner": "understudy::learner_rank",
    "environment": "walk.server",
    "agent": "walk_agent",
}
"""What the command lines of a run's parts hold. `run`, the fifth: the guard's child, which is called as the guard is."""


def descendants(pid: int) -> dict[int, tuple[int, str]]:
    """Process id -> (its parent, its command line), of all that lives below this one."""
    parents, lines = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                lines[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    below = {pid}
    while more := {each for each, parent in parents.items() if parent in below} - below:
        below |= more
    return {each: (parents[each], lines.get(each, "")) for each in below - {pid}}


def living(guard: int, *, marks: Mapping[str, str] = PARTS) -> dict[str, list[int]]:
    """Part -> process ids of the run below this guard; with the `PARTS`, the run's own process too."""
    below, found = descendants(guard), dict[str, list[int]]()
    for pid, (_, line) in below.items():
        for name, mark in marks.items():
            if mark in line:
                found.setdefault(name, []).append(pid)
    forks = [pid for pid, (parent, line) in below.items() if parent == guard and " --keep-running " in line]
    ages = sorted((started, pid) for pid in forks if (started := _started_at(pid)) is not None)
    if marks is PARTS and ages:
        found["run"] = [ages[-1][1]]
    return found


def _started_at(pid: int) -> int | None:
    """When the process was started, in clock ticks since the machine was; None: it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def kill_one(guard: int, *, chance: random.Random, marks: Mapping[str, str] = PARTS) -> str | None:
    """Kills a process of a run; each part that lives is hit equally often. The part, or None when nothing was hit."""
    there = living(guard, marks=marks)
    if not there:
        return None
    part = chance.choice(sorted(there))
    return part if killed(chance.choice(sorted(there[part]))) else None


def killed(pid: int, *, by: signal.Signals = signal.SIGKILL) -> bool:
    """Signals it; whether it was there to be signalled."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        signal.pidfd_send_signal(handle, by)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
