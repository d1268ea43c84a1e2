"""Whole runs on several hosts, each with a network, /tmp and /dev/shm of its own: one joins, one dies with all its processes; and a
real model, whose ranks and engines are on two of them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mocked_server.keys import make_secret
from tests.outside.test_clients import MAX_DRIFT
from tests.project.test_resume import SMALL, books_balance
from tests.support.patience import PATIENCE_S
from tests.support.remote.namespaces import Net, bridge, why_not
from tests.support.remote.run_hosts import engines_up, join, last_step, run_on

SLOW_MOVES = "env.command=['{python}', -m, env_adapters.walk.server, --latency-ms, '400']"
"""The run leaves processor time to what joins it."""

pytestmark = [pytest.mark.long(minutes=5), pytest.mark.engine]


@pytest.fixture
def net() -> Iterator[Net]:
    if reason := why_not():
        pytest.skip(reason)
    with bridge() as made:
        yield made


def test_a_run_on_three_hosts_goes_on_when_one_joins_and_one_dies(net: Net) -> None:
    """Ledger and run on the first; a rank and an engine on each of the others; then one more engine on one that joins."""
    head, second, third = (net.host(name) for name in ("a", "b", "c"))
    for host, gpus in ((head, 0), (second, 1), (third, 1)):
        join(host, head, gpus=gpus)
    make_secret(net.shared / "server.key")
    run = run_on(
        head, net.shared, "run.steps=2000", "run.checkpoints.every=2", f"buffer.node={head.address}", "learner.ranks=2",
        "rollout.engines={fewest: 1, most: 3}", "run.trusted_network=true", *SMALL, SLOW_MOVES,
    )  # fmt: skip
    try:
        run.wait_for_step(3)
        assert engines_up(run) == {"e0", "e1"}
        join(net.host("d"), head, gpus=1)
        until = time.monotonic() + PATIENCE_S
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


def test_a_real_model_is_trained_exactly_by_ranks_and_engines_on_two_hosts(net: Net, smollm2: Path) -> None:
    head, second, third = (net.host(name) for name in ("a", "b", "c"))
    for host, gpus in ((head, 0), (second, 1), (third, 1)):
        join(host, head, gpus=gpus)
    make_secret(net.shared / "server.key")
    model, tasks = net.shared / "smollm2", net.shared / "train.parquet"
    shutil.copytree(smollm2, model)
    shutil.copy(smollm2.parent / "data" / "smollm2" / tasks.name, tasks)
    run = run_on(
        head, net.shared, "run.steps=2", f"model.path={model}", f"data.tasks={tasks}",
        "data.validation.tasks=", f"buffer.node={head.address}", "learner.ranks=2", "rollout.engines=2",
        "run.trusted_network=true", "rollout.max_tokens=32", "rollout.kv_cache_gb=0.25", "agents.concurrency=16",
        "buffer.groups_per_step=4", "buffer.group_size=4", config="smollm2",
    )  # fmt: skip
    try:
        code, output = run.wait()
    finally:
        run.process.kill()
    assert code == 0, output
    assert engines_up(run) == {"e0", "e1"}
    assert 0.0 < run.summary()["max_logprob_diff"] <= MAX_DRIFT
    books_balance(run, steps=2)
