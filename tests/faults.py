"""The long fault tests: `python -m tests.faults [--ledger 1000] [--server 100] [--run 20] [--seed 0]` (`make faults`).

Each number is how many processes are killed with SIGKILL at random moments: of a ledger's owner (`fault_writer`), of a server
with agents at work (`fault_server`), and of any process of a whole run. After each kill the promises are checked: no
acknowledged score is lost, no group is trained twice, the books balance, every checksum holds. The witness: a kill counts only
if the process was alive and had acknowledged something.
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
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buffers.ledger_doctor import findings
from buffers.ledger_schema import read_database
from tests.child import child_process

ROOT = Path(__file__).parent.parent
FILE_KILLS = 50
"""Kills of one ledger file; then a new one, as each check reads all of it."""
LIFE_S = 5.0
"""A life on a slow disk ends after this, however little was acknowledged."""


@dataclass
class Log:
    """What was acknowledged, kept outside of what is killed."""

    scores: dict[str, float] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(step, lease)"""
    positions: list[dict[str, Any]] = field(default_factory=list)
    kills: int = 0
    restores: int = 0
    idle: int = 0
    """Kills before anything was acknowledged: they prove nothing."""

    def take(self, line: str) -> str | None:
        """One line of a process; the kind of it. A line without its end was not acknowledged."""
        if not line.endswith("\n"):
            return None
        told = json.loads(line)
        if "score" in told:
            self.scores[told["score"][0]] = told["score"][1]
        elif "step" in told:
            self.steps.append((told["step"], told["lease"]))
        elif "position" in told:
            self.positions.append(told["position"])
        return next(iter(told))


def child_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


def kill_owner(path: Path, *, log: Log, seed: int, chance: random.Random) -> None:
    """One life of a ledger's owner, from its opening to a random moment."""
    command = [sys.executable, str(ROOT / "tests" / "fault_writer.py"), str(path), str(seed)]
    if log.positions and chance.random() < 0.25:
        command.append(json.dumps(chance.choice(log.positions)))
        log.restores += 1
    with (
        path.with_suffix(".log").open("w+", encoding="utf-8") as errors,
        child_process(command, env=child_environment(), stderr=errors) as child,
    ):
        assert child.stdout is not None
        wanted, seen, opened = chance.randint(1, 60), 0, False
        until = time.monotonic() + LIFE_S
        for line in child.stdout:
            opened = log.take(line) == "open" or opened
            seen += 1
            if opened and (seen > wanted or time.monotonic() > until):
                break
        assert child.poll() is None, f"it ended by itself: {Path(errors.name).read_text()[-2000:]}"
        os.kill(child.pid, signal.SIGKILL)
        for line in child.stdout:  # acknowledged before the kill, read after it
            log.take(line)
    assert child.returncode == -signal.SIGKILL
    log.kills += 1
    log.idle += seen <= 1


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
            total = _sum(total, log)
            path, log = folder / f"ledger-{number}.sqlite", Log()
        kill_owner(path, log=log, seed=number, chance=chance)
        check(path, log=log)
    total = _sum(total, log)
    assert total.kills == kills and total.idle <= kills // 4, "too few of the kills hit anything"
    return total


def _sum(one: Log, other: Log) -> Log:
    return Log(
        scores=one.scores | {f"{len(one.scores)}:{name}": value for name, value in other.scores.items()},
        steps=one.steps + other.steps,
        positions=one.positions + other.positions,
        kills=one.kills + other.kills,
        restores=one.restores + other.restores,
        idle=one.idle + other.idle,
    )


def main() -> None:
    from tests.fault_runs import run_faults
    from tests.fault_server import server_faults

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, number in (("ledger", 1000), ("server", 100), ("run", 20)):
        parser.add_argument(f"--{name}", type=int, default=number, metavar="KILLS")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="understudy-faults-"))
    began = time.monotonic()
    parts = {"ledger": ledger_faults, "server": server_faults, "run": run_faults}
    for name, part in parts.items():
        if kills := getattr(options, name):
            log = part(kills, seed=options.seed, folder=folder)
            print(
                f"{name}: {log.kills} kills, {len(log.scores)} acknowledged scores, {len(log.steps)} steps, "
                f"{log.restores} times back to a checkpoint; nothing lost, nothing trained twice, "
                f"books balanced after each; {time.monotonic() - began:.0f} s",
                flush=True,
            )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
