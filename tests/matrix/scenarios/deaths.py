"""A run whose engine goes deaf, and whose learner and environment are killed, one after the other."""

from __future__ import annotations

import os
import signal
import time

import psutil

from tests.matrix.records import Live, Run
from tests.matrix.scenarios.program_runs import JUDGED, NOTES, fates


def deaths_run() -> Run:
    """It goes on after each of them."""
    return Run(
        name="deaths",
        settings={
            **JUDGED, "run.steps": 12, "rollout.engine_timeout_s": 4.0, "agents.max_attempts": 20,
            "run.checkpoints.every": 1,
        },
        files=fates(""),
        environment={NOTES: "{files}/notes"},
        meanwhile=_end_one_after_the_other,
    )  # fmt: skip


def fleet_run() -> Run:
    """One of its three engines is killed, another one stopped: it looks alive."""
    return Run(
        name="fleet",
        settings={**JUDGED, "run.steps": 10, "rollout.engines": 3},
        files=fates(""),
        environment={NOTES: "{files}/notes"},
        meanwhile=_end_two_engines,
    )


def _end_two_engines(live: Live) -> None:
    wait_for_step(live, 2)
    engines = find(live, "EngineCore")
    assert len(engines) == 3, f"three engines were asked for, {len(engines)} run"
    os.kill(engines[0], signal.SIGKILL)
    wait_for_step(live, 4)
    os.kill(engines[1], signal.SIGSTOP)


def _end_one_after_the_other(live: Live) -> None:
    for step, (words, number) in enumerate(
        (("judge.py", signal.SIGKILL), ("learner_rank", signal.SIGKILL), ("EngineCore", signal.SIGSTOP)), start=1
    ):
        wait_for_step(live, 2 * step)
        found = find(live, words)
        assert found, f"no process of the run has {words} in its command line"
        os.kill(found[0], number)


def wait_for_step(live: Live, step: int) -> None:
    """Until the run has made that many."""
    path = live.folder / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < step:
        assert psutil.pid_exists(live.pid), f"the run ended before step {step}"
        time.sleep(0.1)


def find(live: Live, words: str) -> list[int]:
    """The run's processes with these words in their command line."""
    found = []
    for child in psutil.Process(live.pid).children(recursive=True):
        try:
            if words in " ".join(child.cmdline()):
                found.append(child.pid)
        except psutil.Error:
            continue
    return found
