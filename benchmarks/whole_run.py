"""One whole run of the product, in a process of its own: `python -m learner.run`, ended with the benchmark.

Called by the benchmarks that compare runs. Invariant: when `run_to_end` returns or raises, nothing of the run is left. It
reads no figures.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from buffers.errors import UnderstudyError

ROOT = Path(__file__).resolve().parent.parent
RUN_LIMIT_S = 1800.0
STOP_S = 60.0


class RunFailed(UnderstudyError):
    """A run of the benchmark ended with an error; without it there is nothing to compare."""


def run_to_end(
    command: list[str],
    *,
    log: Path,
    started: Callable[[int], None] = lambda _: None,
    limit_s: float = RUN_LIMIT_S,
) -> None:
    """Runs the program in the checkout; asks it to stop when we are. Raises RunFailed with the end of its output, TimeoutExpired
    after `limit_s`. `started` is called with its process id."""
    with log.open("wb") as sink:  # a file: a pipe would stay open as long as any process of a killed run lives
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        started(process.pid)
        process.wait(timeout=limit_s)
    finally:
        if process.poll() is None:
            _stop(process)
    if process.returncode != 0:
        raise RunFailed(
            f"a run must end with exit code 0, got {process.returncode}; try it by hand: {shlex.join(command)}\n"
            f"its output ends:\n{log.read_text(errors='replace')[-2000:]}"
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """A clean stop where it comes in time; nothing of the run outlives this."""
    process.terminate()
    try:
        process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
