"""Whether learning is the same when processes die: the demo with random kills beside the demo without.

`python -m tests.faults.paired_runs [--seeds 0 1 2] [--mean 20] [--folder PATH] [--json PATH]`. Whole runs of `python -m learner.run
--keep-running`, one after the other, with a checkpoint at each step. In one of each pair a process is killed with SIGKILL now
and then (a Poisson process, from the run's first second to its last): the run's own process, its engine, its learner, its
environment or its agent, each of those that live equally often. `wall_ratio` is the median over the seeds of the time with
kills over the time without; `reward` is the mean of the last five steps.

Invariant: both runs of a pair have the same command, seed and settings.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import parser_of, play, run_to_end
from buffers.ledger.doctor import findings
from buffers.ledger.schema import read_database
from tests.faults.killer import kill_one


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run."""

    seed: int
    reward: float
    wall_s: float
    kills: list[tuple[float, str]]
    """(seconds since the start, part that was killed)."""
    restarts: dict[str, float]
    """Counts of the run's own process since its last start."""
    max_logprob_diff: float


class Killer(threading.Thread):
    """Kills a process of the run below `guard` now and then, until `stop`."""

    def __init__(self, guard: int, *, mean_s: float, seed: int) -> None:
        super().__init__(name="killer", daemon=True)
        self._guard = guard
        self._mean_s = mean_s
        self._chance = random.Random(seed)
        self._stopped = threading.Event()
        self.kills: list[tuple[float, str]] = []

    def run(self) -> None:
        began = time.monotonic()
        while not self._stopped.wait(self._chance.expovariate(1.0 / self._mean_s)):
            if part := kill_one(self._guard, chance=self._chance):
                self.kills.append((round(time.monotonic() - began, 1), part))

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def play_run(folder: Path, *, seed: int, mean_s: float | None, knobs: list[str]) -> Outcome:
    """One run; with kills unless `mean_s` is None. Raises RunFailed when it does not make its steps."""
    command = [sys.executable, "-m", "learner.run", "--keep-running", *knobs]
    command += [f"run.dir={folder}", "run.name=run", f"run.seed={seed}", "run.checkpoints.every=1"]
    killer: Killer | None = None

    def started(pid: int) -> None:
        nonlocal killer
        if mean_s is not None:
            killer = Killer(pid, mean_s=mean_s, seed=seed)
            killer.start()

    began = time.monotonic()
    try:
        run_to_end(command, log=folder / "log.txt", started=started)
    finally:
        if killer is not None:
            killer.stop()
    wall_s = time.monotonic() - began
    with read_database(folder / "run" / "ledger.sqlite") as db:
        wrong = findings(db)
    db.close()
    if wrong:
        raise SystemExit(f"the counts of seed {seed} are wrong: {wrong}")
    summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    return Outcome(
        seed=seed, reward=summary["reward_last"], wall_s=wall_s, kills=killer.kills if killer else [],
        restarts=summary["restarts"], max_logprob_diff=summary["max_logprob_diff"],
    )  # fmt: skip


def line_of(outcome: Outcome) -> str:
    kills = ", ".join(f"{name} at {second:.0f} s" for second, name in outcome.kills) or "none"
    return f"seed {outcome.seed}: reward {outcome.reward:.3f} in {outcome.wall_s:.0f} s; kills: {kills}"


@contextmanager
def _folder(kept: Path | None, *, name: str) -> Iterator[Path]:
    """A folder for one run: a new one that is kept, or one that is removed."""
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="understudy-faults-") as folder:
            yield Path(folder)
    else:
        (kept / name).mkdir(parents=True)
        yield (kept / name).resolve()


def measure(arguments: argparse.Namespace, _: Path) -> Iterator[dict[str, Any]]:
    """Both runs of each seed in turn."""
    quiet: list[Outcome] = []
    faulty: list[Outcome] = []
    for seed in arguments.seeds:
        for outcomes, mean_s in ((quiet, None), (faulty, arguments.mean)):
            with _folder(arguments.folder, name=f"seed-{seed}-{'kills' if mean_s else 'quiet'}") as folder:
                outcomes.append(play_run(folder, seed=seed, mean_s=mean_s, knobs=arguments.knobs))
            print(line_of(outcomes[-1]), flush=True)
        yield {
            "without_kills": [asdict(one) for one in quiet],
            "with_kills": [asdict(one) for one in faulty],
            "kills": sum(len(one.kills) for one in faulty),
            "reward_without": [one.reward for one in quiet],
            "reward_with": [one.reward for one in faulty],
            "wall_ratio": median(one.wall_s / other.wall_s for one, other in zip(faulty, quiet, strict=True)),
        }


def main() -> int:
    parser = parser_of("faults", doc=__doc__)
    parser.prog = "python -m tests.faults.paired_runs"
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--mean", type=float, default=20.0, metavar="S", help="mean time between kills")
    parser.add_argument("--folder", type=Path, help="keep the runs there, in new folders, to look at them")
    parser.add_argument("knobs", nargs="*", metavar="section.key=value", help="overrides of the demo's configuration")
    options = parser.parse_args()
    if options.folder is not None and options.folder.exists():
        parser.error(
            f"--folder must be a new folder, got {options.folder}, which is there; name another one or remove it"
        )
    return play("faults", options, measure, about=f"a kill every {options.mean:g} s on average")


if __name__ == "__main__":
    sys.exit(main())
