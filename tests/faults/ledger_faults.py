"""The long fault tests: `python -m tests.faults [--ledger 1000] [--server 900] [--run 100] [--fleet 500]
[--nodes 20] [--seed 0]` (`make faults`).

Each number is how many processes are killed with SIGKILL at random moments: owners of a ledger (`ledger_program`), servers and
agents at work (`server_faults`), any process of a whole run, and those of a fleet (`run_faults`). With `--nodes` it is hosts,
with all that runs on them (`node_faults`). After each kill the promises are checked: no acknowledged score is lost, no group
is trained twice, the counts balance, every checksum holds.
The witness: a kill counts only if the process was alive and had acknowledged something.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buffers.ledger.doctor import findings
from buffers.ledger.schema import read_database
from tests.support.processes.child_process import Lines, child_process

ROOT = Path(__file__).parents[2]
FILE_KILLS = 50
"""Kills of one ledger file; then a new one, as each check reads all of it."""
LIFE_S = 5.0
"""A life on a slow disk ends after this, if anything was acknowledged."""
PATIENCE_S = 120.0
DELAY_S = 0.02


@dataclass
class Log:
    """What was acknowledged, kept outside of what is killed."""

    scores: dict[str, float] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(step, lease)"""
    positions: list[dict[str, Any]] = field(default_factory=list)
    kills: int = 0
    parts: Counter[str] = field(default_factory=Counter)
    """Kills of whole runs: part -> number of them."""
    agents: int = 0
    """Kills that hit an agent."""
    retried: int = 0
    """Episodes of killed agents that their deadline ended, and that were tried again."""
    late: int = 0
    """Episodes that their deadline ended although their agents lived."""
    restores: int = 0
    runs: int = 0
    """Whole runs that made all their steps."""
    idle: int = 0
    """Kills before anything was acknowledged: they prove nothing, and are not in `kills`."""

    def count(self, part: str) -> None:
        """One more kill of a whole run's part."""
        self.kills += 1
        self.parts[part] += 1

    def __str__(self) -> str:
        parts = [f"{self.kills} kills"]
        if self.parts:
            parts[0] += f" ({', '.join(f'{name} {number}' for name, number in sorted(self.parts.items()))})"
        if self.agents:
            parts = [f"{self.kills - self.agents} kills of servers, {self.agents} of agents"]
            parts.append(
                f"{self.retried} episodes of theirs ended by the deadline and tried again, {self.late} of others"
            )
        if self.idle:
            parts.append(f"{self.idle} kills too early to count")
        if self.restores:
            parts.append(f"{self.restores} times back to a checkpoint")
        if self.runs:
            parts.append(f"{self.runs} whole runs came to their end with all their steps")
        else:
            parts += [f"{len(self.scores)} acknowledged scores", f"{len(self.steps)} steps"]
        return ", ".join(parts) + "; nothing lost, nothing trained twice, counts balanced after each"

    def take(self, line: str) -> str:
        """One line of a process; the kind of it."""
        told = json.loads(line)
        if "score" in told:
            self.scores[told["score"][0]] = told["score"][1]
        elif "step" in told:
            self.steps.append((told["step"], told["lease"]))
        elif "position" in told:
            self.positions.append(told["position"])
        return str(next(iter(told)))


def child_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


def kill_owner(path: Path, *, log: Log, seed: int, chance: random.Random) -> None:
    """One life of a ledger's owner, from its opening to a random moment."""
    command = [sys.executable, str(ROOT / "tests" / "faults" / "ledger_program.py"), str(path), str(seed)]
    if log.positions and chance.random() < 0.25:
        command.append(json.dumps(chance.choice(log.positions)))
        log.restores += 1
    with (
        path.with_suffix(".log").open("w+", encoding="utf-8") as errors,
        child_process(command, env=child_environment(), stderr=errors) as child,
    ):
        assert child.stdout is not None
        lines, wanted, seen = Lines(child.stdout.fileno()), chance.randint(1, 60), 0
        began = time.monotonic()
        while seen < wanted and not (seen and time.monotonic() > began + LIFE_S):
            line = lines.next(until=began + PATIENCE_S)
            assert line is not None, f"it ended or hung: {Path(errors.name).read_text()[-2000:]}"
            seen += log.take(line) != "open"
        time.sleep(chance.uniform(0.0, DELAY_S))
        assert child.poll() is None, f"it ended by itself: {Path(errors.name).read_text()[-2000:]}"
        os.kill(child.pid, signal.SIGKILL)
        while (line := lines.next(until=time.monotonic() + PATIENCE_S)) is not None:
            log.take(line)  # acknowledged before the kill, read after it
        assert lines.ended
    assert child.returncode == -signal.SIGKILL
    log.kills += 1


def check(path: Path, *, log: Log) -> None:
    """Every promise that a ledger can be asked about."""
    with closing(read_database(path)) as db:
        db.execute("BEGIN")
        wrong = findings(db)
        assert wrong == [], wrong
        stored = dict(db.execute("SELECT episode_id, score FROM episode WHERE state = 'scored'").fetchall())
        lost = {name: value for name, value in log.scores.items() if stored.get(name) != value}
        assert lost == {}, f"acknowledged and lost: {lost}"
        steps = set(db.execute("SELECT step, lease_id FROM step").fetchall())
        assert set(log.steps) <= steps, f"steps acknowledged and lost: {set(log.steps) - steps}"
        mixed = db.execute(
            "SELECT group_id FROM grp WHERE state IN ('ready', 'leased', 'trained') "
            "AND (num_scored + num_lost != size OR num_scored < min_size)"
        ).fetchall()
        assert mixed == [], f"incomplete groups: {mixed}"


def ledger_faults(kills: int, *, seed: int, folder: Path) -> Log:
    """Kill the owner of a ledger so many times."""
    chance, total = random.Random(seed), Log()
    path, log = folder / "ledger-0.sqlite", Log()
    for number in range(kills):
        if number and number % FILE_KILLS == 0:
            total = sum_of(total, log)
            path, log = folder / f"ledger-{number}.sqlite", Log()
        kill_owner(path, log=log, seed=number, chance=chance)
        check(path, log=log)
    total = sum_of(total, log)
    assert total.kills == kills
    return total


def sum_of(one: Log, other: Log) -> Log:
    return Log(
        scores=one.scores | {f"{len(one.scores)}:{name}": value for name, value in other.scores.items()},
        steps=one.steps + other.steps,
        positions=one.positions + other.positions,
        kills=one.kills + other.kills,
        agents=one.agents + other.agents,
        retried=one.retried + other.retried,
        late=one.late + other.late,
        restores=one.restores + other.restores,
        idle=one.idle + other.idle,
    )


def main() -> None:
    from tests.faults.node_faults import node_faults
    from tests.faults.run_faults import fleet_faults, run_faults
    from tests.faults.server_faults import server_faults

    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").splitlines()[0])
    for name, number in (("ledger", 1000), ("server", 900), ("run", 100), ("fleet", 500), ("nodes", 20)):
        parser.add_argument(f"--{name}", type=int, default=number, metavar="KILLS")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="understudy-faults-"))
    parts = {
        "ledger": ledger_faults, "server": server_faults, "run": run_faults, "fleet": fleet_faults, "nodes": node_faults,
    }  # fmt: skip
    for name, part in parts.items():
        if kills := getattr(options, name):
            began = time.monotonic()
            log = part(kills, seed=options.seed, folder=folder)
            print(f"{name}: {log}; {time.monotonic() - began:.0f} s", flush=True)
    shutil.rmtree(folder)
