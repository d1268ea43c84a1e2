"""A ledger in a Ray actor on another node keeps the rules of any buffer, and survives the death of its process."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import ray

from buffers.errors import EpisodeClosed, EpisodeError, UnderstudyError
from buffers.ledger.doctor import findings
from buffers.ledger.ledger import LedgerEvent
from buffers.ledger.schema import read_database
from buffers.records import EpisodeState
from buffers.remote.host import LedgerGone
from buffers.remote.ledger_actor import find_actor
from buffers.remote.remote_ledger import RemoteLedger
from tests.faults.ledger_faults import Log, check, child_environment
from tests.support.buffer_parts import make_ready, make_round, make_task, open_running
from tests.support.buffer_rules import RULES, Rule, Site
from tests.support.patience import PATIENCE_S
from tests.support.processes.child_process import child_process
from tests.support.remote.remote_parts import ROOT, SECRET, Nodes, open_remote, two_nodes

pytestmark = pytest.mark.slow

NAMES = [rule.__name__ for rule in RULES]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture
def ledger(nodes: Nodes, tmp_path: Path) -> Iterator[RemoteLedger]:
    with open_remote(tmp_path / "ledger.sqlite", node_id=nodes.disk) as ledger:
        yield ledger


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_a_ledger_on_another_node_keeps_the_rule(rule: Rule, nodes: Nodes, tmp_path: Path) -> None:
    rule(Site(partial(open_remote, node_id=nodes.disk), path=tmp_path / "ledger.sqlite", durable=True))


def test_the_ledger_is_on_the_node_with_the_disk_before_and_after_its_process_dies(
    nodes: Nodes, tmp_path: Path
) -> None:
    assert nodes.own != nodes.disk
    for number, node_id in enumerate((nodes.disk, nodes.own)):
        with open_remote(tmp_path / f"ledger-{number}.sqlite", node_id=node_id) as ledger:
            assert ledger.where.node_id == node_id
            kill(ledger)
            assert ledger._actor.where().node_id == node_id


@pytest.mark.long
def test_a_client_plays_and_trains_through_kills_of_the_ledgers_process(
    nodes: Nodes, ledger: RemoteLedger, tmp_path: Path
) -> None:
    log, path = Log(), tmp_path / "ledger.sqlite"
    command = [
        sys.executable,
        str(ROOT / "tests" / "faults" / "remote_writer.py"),
        nodes.address,
        nodes.disk,
        str(path),
        "1",
    ]
    errors = (tmp_path / "writer.log").open("w+", encoding="utf-8")
    with errors, child_process(command, env=child_environment(), stderr=errors) as child:
        assert child.stdout is not None
        opened = json.loads(child.stdout.readline())
        assert opened["open"] == nodes.own
        for _ in range(5):
            for _ in range(150):  # after each kill, too: it goes on by itself
                line = child.stdout.readline()
                assert line, Path(errors.name).read_text()[-3000:]
                log.take(line)
            kill(ledger)
            log.kills += 1
        for _ in range(50):
            log.take(child.stdout.readline())
    assert log.kills == 5 and len(log.scores) > 100 and len(log.steps) > 20
    ledger.close()
    check(path, log=log)
    with closing(read_database(path)) as db:
        assert findings(db) == []


def test_what_was_sent_when_the_process_died_is_sent_again_in_its_order(ledger: RemoteLedger) -> None:
    first, second = open_running(ledger, task=0, group_size=2)
    ledger.put_tasks([make_task(1)]).result()
    ledger.open_group("t:1", instance=0, group_size=2).result()
    pid = ledger._actor.where().pid
    os.kill(pid, signal.SIGSTOP)  # what is sent now is not answered
    rounds = [ledger.put_round(make_round(first.episode_id, index=index)) for index in range(20)]
    score = ledger.notify_score(first.episode_id, 1.0)
    too_late = ledger.put_round(make_round(first.episode_id, index=20))
    started = ledger.start_pending(limit=2, version=0)
    failed = ledger.fail_episode(second.episode_id, "lost", max_attempts=2)
    with pytest.raises(TimeoutError):
        score.result(0.5)
    os.kill(pid, signal.SIGKILL)
    assert score.result(PATIENCE_S) is True and all(round_.result() is None for round_ in rounds)
    with pytest.raises(EpisodeClosed):
        too_late.result(PATIENCE_S)
    assert [episode.task.task_id for episode in started.result(PATIENCE_S)] == ["t:1", "t:1"]
    retry = failed.result(PATIENCE_S)
    assert retry is not None and retry.attempt == 1
    assert len(ledger.rounds(first.episode_id).result()) == 20


def test_a_learner_keeps_its_batch_through_the_death_of_the_ledgers_process(ledger: RemoteLedger) -> None:
    make_ready(ledger, task=0)
    make_ready(ledger, task=1)
    batch, kept = (ledger.claim(1, min_version=0).result() for _ in range(2))
    assert batch is not None and kept is not None
    kill(ledger)
    assert ledger.commit_step(batch.lease_id, step=1, version=1).result() == 1
    assert ledger.release(kept.lease_id).result() == 1
    assert ledger.counts()["groups/ready"] == 1


def test_a_watcher_hears_of_an_end_whose_news_died_with_the_process(
    ledger: RemoteLedger, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_running(ledger, task=0, group_size=2)
    heard: list[LedgerEvent] = []
    told = threading.Event()

    def watcher(news: LedgerEvent) -> None:
        heard.append(news)
        if news.closed:
            told.set()

    ledger.watch(watcher)
    other = RemoteLedger(find_actor(tmp_path / "ledger.sqlite", node_id=nodes.disk), path=tmp_path, secret=SECRET)
    life, tell = ledger.where.cursor[0], ledger._tell
    # The news is under way when the process dies.
    monkeypatch.setattr(ledger, "_tell", lambda page: page.cursor[0] == life or tell(page))
    other.fail_episode(first.episode_id, "lost", max_attempts=1).result()
    kill(ledger)
    assert told.wait(PATIENCE_S)
    closed = {episode.episode_id: episode.state for news in heard for episode in news.closed}
    assert closed == {first.episode_id: EpisodeState.FAILED, second.episode_id: EpisodeState.FAILED}
    other.close()
    assert ledger.position().result().step == 0  # the other's leaving ends nobody's ledger


def test_errors_are_of_the_same_kind_and_text_as_those_of_a_ledger_in_the_process(ledger: RemoteLedger) -> None:
    (episode,) = open_running(ledger, task=0)
    with pytest.raises(EpisodeError, match=f"round_index of episode {episode.episode_id} must be >= 0"):
        ledger.put_round(make_round(episode.episode_id, index=-1)).result()
    with pytest.raises(UnderstudyError, match="group_size must be >= 1, got 0"):
        ledger.open_group("t:0", instance=1, group_size=0)
    ledger.close()
    with pytest.raises(UnderstudyError, match="must be open, got an operation after it was closed"):
        ledger.position()


def test_a_ledger_that_is_gone_for_good_says_so_to_all_who_wait(ledger: RemoteLedger) -> None:
    os.kill(ledger.where.pid, signal.SIGSTOP)
    waiting = ledger.position()
    ray.kill(ledger._actor._actor)
    with pytest.raises(LedgerGone, match="--resume auto"):
        waiting.result(PATIENCE_S)
    with pytest.raises(LedgerGone):
        ledger.position()


def test_a_node_that_dies_takes_its_ledger_with_it_and_says_so(nodes: Nodes, tmp_path: Path) -> None:
    third = nodes.cluster.add_node(num_cpus=1)
    with open_remote(tmp_path / "ledger.sqlite", node_id=third.node_id) as ledger:
        assert ledger.where.node_id == third.node_id
        nodes.cluster.remove_node(third, allow_graceful=False)
        with pytest.raises(LedgerGone, match="--resume auto"):
            ask_until(time.monotonic() + PATIENCE_S, ledger)  # the process dies a moment after its node


def test_a_second_run_does_not_take_a_ledger_that_is_in_use_but_one_that_was_left_behind(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffers.remote.ledger_actor.IN_USE_S", 2.5)
    path = tmp_path / "ledger.sqlite"
    with open_remote(path, node_id=nodes.disk) as first:
        (episode,) = open_running(first, task=0)
        with pytest.raises(UnderstudyError, match="must have one user"):
            open_remote(path, node_id=nodes.disk)
        first._owns = False  # as after a crash of its run: the actor stays
    with pytest.raises(UnderstudyError, match="must be a new file"):
        open_remote(path, node_id=nodes.disk, is_new=True)
    with open_remote(path, node_id=nodes.disk, resume_episodes=True) as second:
        assert [each.episode_id for each in second.running_episodes().result()] == [episode.episode_id]


def ask_until(end: float, ledger: RemoteLedger) -> None:
    while time.monotonic() < end:
        ledger.position().result(PATIENCE_S)


def kill(ledger: RemoteLedger) -> None:
    """The ledger's process, at once; returns when Ray has started it again."""
    before = ledger._actor.where()
    os.kill(before.pid, signal.SIGKILL)
    assert ledger._actor.where().cursor[0] != before.cursor[0]
