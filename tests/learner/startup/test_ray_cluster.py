"""Rules of learner/startup/ray_cluster.py, with a real Ray: a cluster that cannot be joined is told of in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from buffers.errors import UnderstudyError
from learner.startup import ray_cluster
from tests.support.patience import PATIENCE_S
from tests.support.processes.child_process import child_process

ROOT = Path(__file__).parents[3]


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def users_cluster() -> Iterator[str]:
    """The address of one that asks for a token."""
    environment = {**os.environ, ray_cluster.MODE: "token", ray_cluster.TOKEN: "ab" * 32}
    with child_process([sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.wait(PATIENCE_S)


JOINING = """
from buffers.errors import UnderstudyError
from learner.startup import ray_cluster as cluster
try:
    print("joined", cluster.join(""))
except UnderstudyError as error:
    print(error)
"""


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("token", "words"),
    [
        ({}, "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN are not both set"),
        ({ray_cluster.MODE: "token", ray_cluster.TOKEN: "another"}, "RAY_AUTH_TOKEN is not its"),
    ],
)
def test_a_cluster_that_asks_for_another_token_says_so(users_cluster: str, token: dict[str, str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", JOINING], capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=ROOT,
        env={"PATH": os.environ["PATH"], "RAY_ADDRESS": users_cluster, **token},
    )  # fmt: skip
    assert f"{users_cluster} asks for a token, and {words}; set those of `ray start`" in done.stdout, (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize(
    ("address", "mode", "is_open"),
    [
        ("10.0.0.1:6379", "", True),
        ("ray://10.0.0.1:10001", "disabled", True),
        ("10.0.0.1:6379", "token", False),
        ("127.0.0.1:6379", "", False),
    ],
)
def test_a_cluster_that_others_reach_and_that_asks_for_no_token_gets_a_line(
    monkeypatch, address, mode, is_open
) -> None:
    monkeypatch.setenv(ray_cluster.MODE, mode)
    told = ray_cluster._open_to_all(address)
    assert (f"the Ray cluster at {address} asks for no token" in told) == is_open == bool(told)


def test_a_node_that_is_not_there_or_not_alive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeID": name, "NodeManagerAddress": f"10.0.0.{n}", "NodeManagerHostname": "twins", "Alive": n != 3}
        for n, name in enumerate(("one", "two", "gone"), start=1)
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert ray_cluster.find_node("10.0.0.2") == ("two", "10.0.0.2")
    known = r"set it to one of one \(10\.0\.0\.1\), two \(10\.0\.0\.2\)"
    for name, number in (("elsewhere", 0), ("gone", 0), ("twins", 2)):
        with pytest.raises(UnderstudyError, match=f"got '{name}' for {number} of them; {known}"):
            ray_cluster.find_node(name)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("named", "says"),
    [
        (
            "",
            "buffer.node=elsewhere must be of a running Ray cluster, but none can be joined: RAY_ADDRESS names none, and",
        ),
        ("auto", "buffer.node=elsewhere must be .*`ray start` has started none on this machine"),
        ("127.0.0.1:1", "127.0.0.1:1 cannot be reached: .*refused"),
        ("ray://127.0.0.1:1", "ray://127.0.0.1:1 cannot be reached"),
        ("127.0.0.1", "127.0.0.1 is not HOST:PORT"),
        ("127.0.0.1:port", "127.0.0.1:port is not HOST:PORT"),
    ],
)
def test_a_cluster_that_is_not_there_is_told_of_at_once_whatever_else_runs_here(
    users_cluster: str, monkeypatch: pytest.MonkeyPatch, named: str, says: str
) -> None:
    """Another cluster runs here; of this machine's `ray start` nothing may be known."""
    monkeypatch.setattr(ray_cluster, "find_bootstrap_address", lambda _: None)
    monkeypatch.setenv("RAY_ADDRESS", named)
    with pytest.raises(UnderstudyError, match=says):
        ray_cluster.join("elsewhere")
