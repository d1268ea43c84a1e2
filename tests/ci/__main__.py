"""What `.ci/run` starts: `python -m tests.ci [--load N] [--stops] [STAGE ...]`.

Three stages: `make check` (where it is red, nothing else is begun), `make test` and `make test-long`. Ends with a line for
each, and exit code 1 where one failed.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from tests.ci.disturbance import disturbed
from tests.ci.stages import Stage, keep, machine_speed, run_stages, say

ROOT = Path(__file__).parents[2]
UNSTABLE = ROOT / "tests" / "unstable.jsonl"
LEAST_FREE_GIB = 8
"""At most 5.5 were taken."""


def made(target: str) -> Stage:
    """`make TARGET`, whose pytest has further words."""
    return Stage(name=target, command=lambda log: ["make", target, f"PYTEST_ARGS={' '.join(['--durations=25', *log])}"])


STAGES = (
    Stage(
        name="check",
        command=lambda log: ["make", "fast", f"PYTEST_ARGS={' '.join(log)}"],
        beside=("make", "lint"),
        ends_run=True,
    ),
    made("test"),
    made("test-long"),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ci", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--load", type=int, default=0, metavar="N", help="busy processes beside the tests")
    parser.add_argument("--stops", action="store_true", help="stop processes of the tests at random for 0.2 to 2.5 s")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="these only: check, test, test-long")
    arguments = parser.parse_args(argv)
    stages = [stage for stage in STAGES if stage.name in arguments.stages or not arguments.stages]
    # A shell's background and nohup have them ignored, and so would everything have that the tests start and end by them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda *_: None)
    machine = machine_speed()
    say(
        f"{machine['processors']} processors, load {machine['load']}, a loop of Python in {machine['loop_ms']} ms, "
        f"{machine['free_gib']} GiB free"
    )
    if machine["free_gib"] < LEAST_FREE_GIB:
        parser.exit(1, f"the tests need {LEAST_FREE_GIB} GiB of free disk in {tempfile.gettempdir()}\n")
    disturbance = partial(disturbed, load=arguments.load, stops=arguments.stops)
    results = run_stages(stages, root=ROOT, disturbed=disturbance)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    refused = keep(
        results, path=UNSTABLE, commit=commit.stdout.strip(), machine=machine, date=time.strftime("%Y-%m-%d")
    )
    for result in results:
        print(result.line(), flush=True)
    for reason in refused:
        print(f"refused: {reason}", flush=True)
    return 1 if refused or any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
