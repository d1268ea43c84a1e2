"""A whole run on hosts that die with all their processes, one after another, while others join in their places.

Run and ledger are on a first host; engines and ranks on two others (`tests.support.remote.namespaces`), of which one is killed at a
random moment, again and again. Each time a new host joins; the run must make steps before the next kill. After each kill the ledger
is checked, and at the end the groups of all steps.
"""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

from mocked_server.keys import make_secret
from tests.faults.ledger_faults import Log, check
from tests.project.test_resume import SMALL, books_balance
from tests.support.remote.namespaces import Host, bridge, why_not
from tests.support.remote.run_hosts import join, last_step, run_on
from tests.support.run_parts import Run

STEPS_BETWEEN = 2
LARGEST_WAIT_S = 8.0
PATIENCE_S = 300.0
LARGEST_DIFFERENCE = 1e-4


def node_faults(kills: int, *, seed: int, folder: Path) -> Log:
    """Kill so many hosts of one run."""
    if reason := why_not():
        print(f"nodes: skipped, as {reason}", flush=True)
        return Log()
    chance, log = random.Random(seed), Log()
    with bridge() as net:
        head = net.host("head")
        workers = [net.host(f"worker-{number}") for number in range(2)]
        for host in (head, *workers):
            join(host, head, gpus=0 if host is head else 1)
        make_secret(net.shared / "server.key")
        output = folder / "nodes.log"
        run = run_on(
            head, net.shared, "run.steps=100000", "run.checkpoints.every=2", f"buffer.node={head.address}",
            "learner.ranks=2", "rollout.engines={fewest: 1, most: 2}", "run.trusted_network=true", *SMALL, log=output,
        )  # fmt: skip
        try:
            run.wait_for_step(1)
            while log.kills < kills:
                _kill_one(run, workers, chance=chance)
                log.count("node")
                check(run.folder / "ledger.sqlite", log=log)
                workers.append(net.host(f"worker-{len(net.hosts)}"))
                join(workers[-1], head, gpus=1)
                _wait_for_steps(run, output)
            head.run("pkill -INT -o -f learner.run")  # Ctrl-C: after the step in progress
            code = run.process.wait(PATIENCE_S)
        finally:
            run.process.kill()
        assert code == 130, output.read_text()[-2000:]
        check(run.folder / "ledger.sqlite", log=log)
        summary = run.summary()
        assert summary["max_logprob_diff"] <= LARGEST_DIFFERENCE and summary["max_policy_lag_seen"] <= 1, summary
        books_balance(run, steps=summary["steps"])
        log.runs += 1
    return log


def _kill_one(run: Run, workers: list[Host], *, chance: random.Random) -> None:
    """At a random moment of a step, a publication or a start."""
    time.sleep(chance.uniform(0.0, LARGEST_WAIT_S))
    assert run.process.poll() is None, "the run ended by itself"
    workers.pop(chance.randrange(len(workers))).kill()


def _wait_for_steps(run: Run, output: Path) -> None:
    until, wanted = time.monotonic() + PATIENCE_S, last_step(run) + STEPS_BETWEEN
    while last_step(run) < wanted:
        try:
            run.process.wait(0.5)
        except subprocess.TimeoutExpired:
            assert time.monotonic() < until, f"no step {wanted} within {PATIENCE_S:.0f} s: {output.read_text()[-2000:]}"
        else:
            raise AssertionError(f"the run ended by itself: {output.read_text()[-2000:]}")
