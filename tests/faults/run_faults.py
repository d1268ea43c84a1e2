"""Whole runs whose processes are killed at random moments.

`run_faults` kills any process of a run on the demo's settings: the run itself, its engine, its learner, its environment, its agent.
`fleet_faults` kills what a run with three engines, two server processes and two ranks has more of. Both play runs under a guard
(`--keep-running`) until so many kills were made; the counts are read after each kill, and at the end of a run all its steps
are in them. A run that says that a part of it was killed too often without a step is resumed.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.killer import PARTS, kill_one
from tests.faults.ledger_faults import Log, check
from tests.project.test_resume import books_balance
from tests.support.run_parts import Run, start

KNOBS = (
    "run.checkpoints.every=2", "sft.steps=5", "buffer.groups_per_step=4", "buffer.group_size=2",
    "agents.concurrency=16",
)  # fmt: skip
FLEET = {
    "engine": "VLLM::EngineCore",
    "puller": "understudy::weights_puller",
    "server": "understudy::server_process",
    "learner": "understudy::learner_rank",
}
"""What the command lines of a fleet's processes hold."""
OF_KILLS = (" died", " ended with -9", " ended with 255", "{'EngineCore': -9}")
"""What a run says that ends because a part was killed too often without a step, or an engine before it served. 255: of a process
whose fork server ended first."""
PATIENCE_S = 600.0
LARGEST_DIFFERENCE = 1e-4
"""Of a recorded log-probability from the learner's, under kills: what is sampled twice over is exact, too."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """One kind of run. `mean_s`: between two kills; about what the victims take to start: more kills, and no run would end."""

    steps: int
    mean_s: float
    more: tuple[str, ...] = ()
    marks: Mapping[str, str] = field(default_factory=lambda: PARTS)
    """Part -> what its command lines hold."""


RUN = Course(steps=12, mean_s=12.0)
FLEET_RUN = Course(
    steps=60, mean_s=4.0, marks=FLEET, more=("rollout.engines=3", "server.processes=2", "learner.ranks=2")
)  # fmt: skip


def run_faults(kills: int, *, seed: int, folder: Path) -> Log:
    """Kill processes of whole runs so many times."""
    return _runs(RUN, kills, seed=seed, folder=folder / "runs")


def fleet_faults(kills: int, *, seed: int, folder: Path) -> Log:
    """Kill engines, pullers of weights, server processes and ranks of whole runs so many times."""
    return _runs(FLEET_RUN, kills, seed=seed, folder=folder / "fleet")


def _runs(course: Course, kills: int, *, seed: int, folder: Path) -> Log:
    chance, log, number = random.Random(seed), Log(), 0
    while log.kills < kills:
        place = folder / f"run-{number}"
        place.mkdir(parents=True)
        number += 1
        _one_run(course, place, kills=kills - log.kills, chance=chance, log=log)
        print(f"so far: {log}", flush=True)
    return log


def _one_run(course: Course, place: Path, *, kills: int, chance: random.Random, log: Log) -> None:
    until, lives = log.kills + kills, 0
    knobs = (f"run.steps={course.steps}", *KNOBS, *course.more)
    while True:
        run = start(place, *knobs, resume="auto", flags=("--keep-running",))
        lives += 1
        try:
            while log.kills < until and _wait(run, chance.expovariate(1.0 / course.mean_s)) is None:
                if part := kill_one(run.process.pid, chance=chance, marks=course.marks):
                    log.count(part)
                    if (run.folder / "ledger.sqlite").exists():
                        check(run.folder / "ledger.sqlite", log=log)
            output, _ = run.process.communicate(timeout=PATIENCE_S)
        finally:
            run.kill()
        check(run.folder / "ledger.sqlite", log=log)
        if run.process.returncode == 0:
            break
        assert any(words in output for words in OF_KILLS) and lives <= kills, (
            f"a run that nobody killed failed: {output[-2000:]}"
        )
    summary = run.summary()
    assert summary["steps"] == course.steps and summary["buffer"]["groups/trained"] == course.steps * 4
    assert summary["max_logprob_diff"] <= LARGEST_DIFFERENCE, summary["max_logprob_diff"]
    books_balance(run, steps=course.steps)
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
