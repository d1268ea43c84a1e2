"""Whole runs whose agents are served by two processes, of which one is killed."""

from __future__ import annotations

import time

import psutil
import pytest

from tests.support.run_parts import Run, assert_nothing_left, start

SMALL = (
    "server.processes=2", "warm_start.steps=2", "learner.critic=none", "learner.advantage=grpo", "agents.concurrency=8",
    "buffer.groups_per_step=2", "buffer.group_size=4", "run.seed=1",
)  # fmt: skip


def server_process(run: Run) -> psutil.Process:
    """The further server process, once it is there."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        for child in psutil.Process(run.process.pid).children():
            if "mocked_server.processes.program" in " ".join(child.cmdline()):
                return child
        time.sleep(0.2)
    raise AssertionError("no further server process was started")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(500)
def test_a_run_goes_on_exactly_when_one_of_its_server_processes_is_killed(tmp_path):
    run = start(tmp_path, *SMALL, "run.steps=6")
    run.wait_for_step(1, timeout_s=400)
    server_process(run).kill()
    code, output = run.wait(400)
    assert code == 0, output
    summary = run.summary()
    assert summary["steps"] == 6 and summary["episodes"] == 6 * 8
    assert summary["max_logprob_diff"] < 1e-4 and summary["restarts"] == {"restarts/server_process": 1.0}
    own, further = (summary["server"]["processes"][name] for name in ("p0", "p1"))
    assert (own["restarts"], further["restarts"]) == (0, 1) and own["requests"] > 0 and further["url"] != own["url"]
    assert_nothing_left(run)
