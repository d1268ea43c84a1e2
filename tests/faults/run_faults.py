"""Whole runs whose processes are killed at random moments: the run itself, its engine, its learner, its environment, its agent.

`run_faults` plays runs under a guard (`--keep-running`) until so many kills were made; the counts are read after each kill, and
at the end of a run all its steps are in them. A run that says that it was killed too often without a step is gone on with.
"""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

from benchmarks.faults import killed, parts
from tests.faults.ledger_faults import Log, check
from tests.support.run_parts import Run, start

STEPS = 12
KNOBS = (
    f"run.steps={STEPS}", "run.checkpoints.every=2", "warm_start.steps=5", "buffer.groups_per_step=4",
    "buffer.group_size=2", "agents.concurrency=16",
)  # fmt: skip
MEAN_S = 12.0
"""About what a run takes to start: more kills than that, and none would come to its end."""
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
    until, lives = log.kills + kills, 0
    while True:
        run = start(place, *KNOBS, resume="auto", flags=("--keep-running",))
        lives += 1
        try:
            while log.kills < until and _wait(run, chance.expovariate(1.0 / MEAN_S)) is None:
                living = parts(run.process.pid)
                if living and killed(living[chance.choice(sorted(living))]):
                    log.kills += 1
                    if (run.folder / "ledger.sqlite").exists():
                        check(run.folder / "ledger.sqlite", log=log)
            output, _ = run.process.communicate(timeout=PATIENCE_S)
        finally:
            run.kill()
        check(run.folder / "ledger.sqlite", log=log)
        if run.process.returncode == 0:
            break
        assert " died" in output and lives <= kills, f"a run that nobody killed failed: {output[-2000:]}"
    summary = run.summary()
    assert summary["steps"] == STEPS and summary["buffer"]["groups/trained"] == STEPS * 4
    log.runs += 1


def _wait(run: Run, seconds: float) -> int | None:
    """The run's exit code, if it ends within this time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            return run.process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            run.processes()  # sees the children
    return None
