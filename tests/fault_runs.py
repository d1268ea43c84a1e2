"""Whole runs whose processes are killed at random moments: the run itself, its engine, a learner rank, the environment, an agent.

`run_faults` goes on with `--resume auto` after each kill that ends the run, until the run has made its steps, and begins
another one while kills are left. Invariant: after each kill the ledger is sound, and the steps that were made are in it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

from tests.faults import Log, check
from tests.run_parts import Run, start

STEPS = 12
KNOBS = (
    f"run.steps={STEPS}", "run.checkpoints=[2,2]", "warm_start.steps=5", "buffer.groups_per_step=4",
    "buffer.group_size=2", "agents.concurrency=16",
)  # fmt: skip
VICTIMS = {"engine": "VLLM::", "learner": "ray::Trainer", "environment": "walk_server", "agent": "walk_agent"}
"""What their command lines hold; `run` is the process that was started."""
MEAN_S = 20.0
PATIENCE_S = 600.0


def run_faults(kills: int, *, seed: int, folder: Path) -> Log:
    """Kill processes of whole runs so many times."""
    chance, log, number = random.Random(seed), Log(), 0
    while log.kills < kills:
        place = folder / f"run-{number}"
        place.mkdir()
        number += 1
        _one_run(place, kills=kills - log.kills, chance=chance, log=log)
    return log


def _one_run(place: Path, *, kills: int, chance: random.Random, log: Log) -> None:
    left, lives, ended = kills, 0, False
    while not ended:
        run = start(place, *KNOBS, resume="auto")
        lives += 1
        if left:
            hit = _kill_in(run, chance=chance)
            left -= hit
            log.kills += hit
        output, _ = run.process.communicate(timeout=PATIENCE_S)
        _clear(run)
        check(run.folder / "ledger.sqlite", log=log)
        ended = run.process.returncode == 0
        assert ended or lives <= kills + 1, f"a run that nobody killed failed: {output[-2000:]}"
        assert lives == 1 or "going on after step" in output or ended, output[-2000:]
    summary = run.summary()
    assert summary["steps"] == STEPS and summary["buffer"]["groups/trained"] == STEPS * 4
    log.steps.clear()  # of this run's ledger


def _kill_in(run: Run, *, chance: random.Random) -> int:
    """Kill one process of the run at a random moment; 0 when the run ended before."""
    kind = chance.choice(("run", *VICTIMS))
    until = time.monotonic() + min(chance.expovariate(1 / MEAN_S), 3 * MEAN_S)
    while time.monotonic() < until or not (victims := _processes(run, kind=kind)):
        try:
            run.process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            run.processes()  # sees the children
            continue
        return 0
    os.kill(chance.choice(victims), signal.SIGKILL)
    if kind == "agent":  # it is started again, and its episodes are tried again: the run goes on
        return 1
    code = run.process.wait(timeout=PATIENCE_S)
    assert code != 0, f"the run did not see that its {kind} was killed"
    return 1


def _processes(run: Run, *, kind: str) -> list[int]:
    if kind == "run":
        return [run.process.pid]
    return [int(line.split()[0]) for line in run.processes() if VICTIMS[kind] in line]


def _clear(run: Run) -> None:
    """What a killed run left behind must not hold the next one's ports and memory."""
    for line in run.processes():
        try:
            os.kill(int(line.split()[0]), signal.SIGKILL)
        except ProcessLookupError:
            continue
