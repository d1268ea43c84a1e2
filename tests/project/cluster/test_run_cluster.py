"""Whole runs whose ledger is on another node of a Ray cluster: with the real engine, and a ledger's process that dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import ray

from buffers.ledger.doctor import findings
from buffers.ledger.schema import read_database
from buffers.remote.ledger_actor import NAMESPACE, find_actor
from buffers.wire.address import Way, WireAddress, is_loopback
from mocked_server.keys import make_secret
from tests.project.test_resume import SMALL, books_balance
from tests.support.patience import PATIENCE_S
from tests.support.remote.remote_parts import Nodes, two_nodes
from tests.support.run_parts import assert_nothing_left, start

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture
def knobs(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    make_secret(tmp_path / "server.key")  # the nodes may have an address that others can reach
    return (f"buffer.node={nodes.disk}", *SMALL)


def left_in(nodes: Nodes) -> list[str]:
    """Actors with a name, and workers with the code of a run."""
    left = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            title = path.read_text()
            parent = (path.parent / "stat").read_text().rpartition(")")[2].split()[1]
            ours = nodes.address in Path(f"/proc/{parent}/cmdline").read_text()
            if ours and title.startswith(("ray::Trainer", "ray::LedgerActor")):
                left.append(title)
    return left


def assert_nothing_left_in(nodes: Nodes) -> None:
    until = time.monotonic() + PATIENCE_S
    while left_in(nodes) and time.monotonic() < until:
        time.sleep(0.2)
    assert left_in(nodes) == []


def way_between(nodes: Nodes, way: Way) -> Way:
    """This one, unless the nodes reach each other over loopback."""
    (host,) = {node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == nodes.disk}
    return Way.LOCAL if is_loopback(host) else way


@pytest.mark.long
def test_a_run_goes_on_when_its_ledgers_process_dies_and_ends_it_in_the_end(
    nodes: Nodes, knobs: tuple[str, ...], tmp_path: Path
) -> None:
    run = start(tmp_path, "run.steps=5", *knobs, imports=True)
    run.wait_for_step(1)
    assert len(left_in(nodes)) == 3  # the ledger's actor, its process, and a learner's
    before = find_actor(run.folder / "ledger.sqlite", node_id=nodes.disk).where()
    assert before.node_id == nodes.disk != nodes.own
    assert WireAddress.parse(before.address).way is way_between(nodes, Way.ENCRYPTED)
    os.kill(before.pid, signal.SIGKILL)
    code, output = run.wait()
    assert code == 0, output
    summary = run.summary()
    assert summary["steps"] == 5 and summary["max_logprob_diff"] < 1e-4 and summary["max_policy_lag_seen"] <= 1
    assert summary["buffer"]["groups/trained"] == 20
    books_balance(run, steps=5)
    with closing(read_database(run.folder / "ledger.sqlite")) as db:
        assert findings(db) == []
        (opened,) = db.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
        assert int(opened) == 2, "the ledger's process died once"
    assert_nothing_left(run)
    assert_nothing_left_in(nodes)


@pytest.mark.long
def test_a_run_that_is_killed_leaves_its_ledger_and_the_next_one_takes_it_over(
    nodes: Nodes, knobs: tuple[str, ...], tmp_path: Path
) -> None:
    first = start(tmp_path, "run.steps=4", "run.checkpoints.every=1", *knobs, resume="auto", imports=True)
    first.wait_for_step(2)
    first.kill()
    assert [actor["namespace"] for actor in ray.util.list_named_actors(all_namespaces=True)] == [NAMESPACE]
    second = start(tmp_path, "run.steps=4", "run.checkpoints.every=1", *knobs, resume="auto", imports=True)
    code, output = second.wait()
    assert code == 0, output
    assert "resuming after step" in output and second.summary()["steps"] == 4
    books_balance(second, steps=4)
    assert_nothing_left(second)
    assert_nothing_left_in(nodes)


@pytest.mark.long
def test_a_node_that_is_not_there_ends_the_run_with_one_line(
    nodes: Nodes, knobs: tuple[str, ...], tmp_path: Path
) -> None:
    run = start(tmp_path, "run.steps=1", *knobs, "buffer.node=elsewhere", imports=True)
    code, output = run.wait()
    assert code == 1, output
    assert "error: buffer.node must name one node of the Ray cluster, got 'elsewhere' for 0 of them" in output
    assert "Traceback" not in output
    assert_nothing_left(run)
    assert_nothing_left_in(nodes)


@pytest.mark.long
def test_what_crosses_a_trusted_network_is_signed_only(nodes: Nodes, knobs: tuple[str, ...], tmp_path: Path) -> None:
    run = start(tmp_path, "run.steps=2", "run.trusted_network=true", *knobs, imports=True)
    run.wait_for_step(1)
    found = find_actor(run.folder / "ledger.sqlite", node_id=nodes.disk).where().address
    assert WireAddress.parse(found).way is way_between(nodes, Way.SIGNED)
    code, output = run.wait()
    assert code == 0, output
