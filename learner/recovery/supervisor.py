"""A guard process for a run whose own process may die: `python -m learner.run --keep-running`.

The run is a forked child, so that what takes seconds to import is there already when it is started again. When the child is
killed, all that it left behind (engine, learner, agents) is ended too, and a new child resumes from the newest checkpoint. The
guard holds no state: all is in the run's folder. A run that ends with an error has a cause that starting again does not mend:
it stays ended. Linux only.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from learner.recovery.at_once import SIGNALS, become_subreaper, children_of_this_process, end_children, prctl
from learner.recovery.restarts import MAX_IN_A_ROW

PR_SET_PDEATHSIG = 1


def keep_running(run: Callable[[str], int], *, resume: str, lines: Path) -> int:
    """Calls `run(resume)` in a child until it ends by itself or is stopped; returns its exit code. After too many deaths
    without a new line in `lines` in between: 1. What `run` imports was imported before, without starting threads: a fork would
    lose them. Earlier children are not the run's: they stay."""
    kept = set(children_of_this_process())
    become_subreaper()
    in_a_row, reached = 0, 0
    while True:
        guard = os.getpid()
        if (child := _fork()) == 0:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            return run(resume) if os.getppid() == guard else 1
        code = _wait(child, kept=kept)
        end_children(kept)
        if code >= 0:
            return code
        steps = len(lines.read_text(encoding="utf-8").splitlines()) if lines.exists() else 0
        in_a_row = 1 if steps > reached else in_a_row + 1
        reached = max(reached, steps)
        name = signal.Signals(-code).name
        if in_a_row > MAX_IN_A_ROW:
            print(f"error: the run's process died ({name}) {in_a_row} times without a step in between", file=sys.stderr)
            return 1
        print(f"the run's process died ({name}); starting it again", file=sys.stderr, flush=True)
        resume = "auto"


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork()


def _wait(child: int, *, kept: set[int]) -> int:
    """The child's exit code; negative: the signal that ended it. A signal that asks the supervisor to stop is passed to the
    child, which saves first; Ctrl-C reaches it anyway."""
    asked = False

    def forward(number: int, _: object) -> None:
        nonlocal asked
        asked = True
        if number == signal.SIGTERM:
            with suppress(ProcessLookupError):
                os.kill(child, number)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        while True:
            pid, status = os.wait()  # others that ended are reaped on the way
            kept.discard(pid)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return 130 if asked and code < 0 else code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
