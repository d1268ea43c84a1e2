"""A whole run on several hosts, each with a network, /tmp and /dev/shm of its own: one joins, one dies with all its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mocked_server.keys import make_secret
from tests.project.test_resume import SMALL, books_balance
from tests.support.remote.namespaces import Host, Net, bridge, why_not
from tests.support.run_parts import ROOT, Run

pytestmark = [pytest.mark.long, pytest.mark.engine, pytest.mark.timeout(1000)]

RAY = Path(sys.executable).with_name("ray")
# Ray starts a head that asks who joins it for a token.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def net() -> Iterator[Net]:
    if reason := why_not():
        pytest.skip(reason)
    with bridge() as made:
        yield made


def join(host: Host, head: Host, *, gpus: int) -> None:
    """Ray on this host, which counts GPUs that are not there."""
    place = "--head --port=6379 --include-dashboard=false" if host is head else f"--address={head.address}:6379"
    host.run(
        f"{RAY} start {place} --node-ip-address={host.address} --num-cpus=1 --num-gpus={gpus} --disable-usage-stats",
        environment=TOKEN,
    )


def run_on(host: Host, folder: Path, *overrides: str) -> Run:
    """A run whose own process is on this host."""
    words = ["-m", "learner.run", f"run.dir={folder}", "run.name=run", *overrides]
    process = subprocess.Popen(
        host.command(sys.executable, *words), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **TOKEN, "RAY_ADDRESS": f"{host.address}:6379"},
    )  # fmt: skip
    return Run(process, folder / "run", "")


def engines_up(run: Run) -> set[str]:
    """The engines of the last step that had sampled something."""
    last = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])
    return {
        name.split("/")[1]
        for name, value in last.items()
        if name.startswith("engine/") and name.endswith("/tokens_per_s") and value > 0
    }


def last_step(run: Run) -> int:
    return int(json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])["step"])


def test_a_run_on_three_hosts_goes_on_when_one_joins_and_one_dies(net: Net) -> None:
    """Ledger and run on the first; a rank and an engine on each of the others; then one more engine on one that joins."""
    head, second, third = (net.host(name) for name in ("a", "b", "c"))
    for host, gpus in ((head, 0), (second, 1), (third, 1)):
        join(host, head, gpus=gpus)
    make_secret(net.shared / "server.key")
    run = run_on(
        head, net.shared, "run.steps=2000", "run.checkpoints.every=2", f"buffer.node={head.address}", "learner.ranks=2",
        "rollout.engines={fewest: 1, most: 3}", "run.trusted_network=true", *SMALL,
    )  # fmt: skip
    try:
        run.wait_for_step(3)
        assert engines_up(run) == {"e0", "e1"}
        join(net.host("d"), head, gpus=1)
        until = time.monotonic() + 300
        while "e2" not in engines_up(run):
            assert run.process.poll() is None and time.monotonic() < until, "no engine has joined"
            time.sleep(0.5)
        third.kill()
        run.wait_for_step(last_step(run) + 6)
        assert run.process.poll() is None
        head.run("pkill -INT -o -f learner.run")  # Ctrl-C: after the step in progress
        code, output = run.wait()
    finally:
        run.process.kill()
    assert code == 130, output
    assert "engine e2 has joined" in output
    summary = run.summary()
    assert summary["max_logprob_diff"] <= 1e-5 and summary["max_policy_lag_seen"] <= 1
    assert summary["restarts"]["restarts/learner"] >= 1, "its second rank was on the host that died"
    books_balance(run, steps=summary["steps"])
