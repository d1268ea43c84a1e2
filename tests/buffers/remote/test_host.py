"""What a ledger in another process promises, without Ray: the rules of any buffer, one answer for a call that comes twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from buffers.errors import EpisodeClosed, EpisodeError, StorageFull
from buffers.ledger.doctor import findings
from buffers.ledger.encode import stored_round
from buffers.ledger.episodes import adopt_episode
from buffers.ledger.ledger import LedgerEvent
from buffers.ledger.schema import read_database
from buffers.remote.host import LedgerGone
from buffers.remote.messages import MAX_FRAME_BYTES, Outgoing, job_of, together
from buffers.remote.remote_ledger import RemoteLedger
from tests.support.buffer_parts import make_round, make_task, open_running
from tests.support.buffer_rules import RULES, Rule, Site
from tests.support.patience import PATIENCE_S
from tests.support.remote.in_process_remote_ledger import SECRET, Nearby, open_nearby

pytestmark = pytest.mark.seconds


@pytest.fixture
def handle(tmp_path: Path) -> Nearby:
    return Nearby(tmp_path / "ledger.sqlite")


@pytest.fixture
def ledger(handle: Nearby, tmp_path: Path) -> Iterator[RemoteLedger]:
    with RemoteLedger(handle, path=tmp_path / "ledger.sqlite", secret=SECRET, owns=True) as ledger:
        yield ledger


@pytest.mark.parametrize("rule", RULES, ids=[rule.__name__ for rule in RULES])
def test_a_ledger_in_another_process_keeps_the_rule(rule: Rule, tmp_path: Path) -> None:
    rule(Site(open_nearby, path=tmp_path / "ledger.sqlite", durable=True))


def test_a_change_that_was_made_before_the_process_died_is_made_once_and_answered(
    ledger: RemoteLedger, handle: Nearby, tmp_path: Path
) -> None:
    def answered(operation: Any) -> Any:
        handle.dies_after_next = True
        answer = operation().result(PATIENCE_S)
        assert handle.dies_after_next is False
        return answer

    assert answered(lambda: ledger.put_tasks([make_task(0), make_task(1)])) == 2
    opened = answered(lambda: ledger.open_group("t:0", instance=0, group_size=2, min_size=1))
    first, second = opened
    assert first.task.ground_truth == 0
    started = answered(lambda: ledger.start_pending(limit=2, version=0))
    assert started == opened == ledger.running_episodes().result()
    ledger.put_round(make_round(first.episode_id)).result()
    assert answered(lambda: ledger.notify_score(first.episode_id, 1.0)) is True
    retry = answered(lambda: ledger.fail_episode(second.episode_id, "lost", max_attempts=2))
    assert (retry.sample_index, retry.attempt) == (1, 1) and ledger.counts()["episodes/failed"] == 1
    assert answered(lambda: ledger.start_episode(retry.episode_id, version=0)) is None
    assert answered(lambda: ledger.fail_episode(retry.episode_id, "lost", max_attempts=2)) is None
    batch = answered(lambda: ledger.claim(1, min_version=0))
    assert batch.group_ids == (first.group_id,) and [row.score for row in batch.rows] == [1.0]
    assert ledger.balance()["leased"] == 1 and ledger.claim(1, min_version=0).result() is None
    assert answered(lambda: ledger.commit_step(batch.lease_id, step=1, version=1)) == 1
    group_ids = answered(lambda: ledger.open_validation([make_task(1)], group_size=1, greedy=True))
    assert len(group_ids) == 1 and ledger.counts()["groups/validating"] == 1
    place = ledger.position().result()
    answered(lambda: ledger.restore(place))
    assert ledger.position().result().lineage == place.lineage + 1
    ledger.close()
    open_nearby(tmp_path / "ledger.sqlite").close()  # forgets the answers that the end of the other process left
    with closing(read_database(tmp_path / "ledger.sqlite")) as db:
        assert findings(db) == []
        assert db.execute("SELECT count(*) FROM meta WHERE key GLOB 'call:*'").fetchone() == (0,)


def test_a_refused_operation_is_refused_again(ledger: RemoteLedger, handle: Nearby) -> None:
    handle.dies_after_next = True
    with pytest.raises(EpisodeError, match="must name an episode"):
        ledger.start_episode("nobody", version=0).result(PATIENCE_S)
    assert handle.dies_after_next is False


def test_watchers_hear_of_a_commit_after_its_futures_are_done(ledger: RemoteLedger, handle: Nearby) -> None:
    """An episode that ends at once: whoever started it knows it before the news of its end comes."""
    ledger.put_tasks([make_task(0)]).result()
    ledger.open_group("t:0", instance=0, group_size=1).result()
    arrived, order, done = threading.Event(), [], threading.Event()

    def watcher(news: LedgerEvent) -> None:
        order.extend(("closed", episode.episode_id) for episode in news.closed)
        if news.closed:
            done.set()

    ledger.watch(watcher)
    handle.on_events = lambda page: arrived.set() if any(event.closed for event in page.events) else None
    entered, gate = threading.Event(), threading.Event()
    handle.before_answer = lambda: entered.set() or gate.wait(PATIENCE_S)
    ledger.position()  # what comes behind it is sent together
    assert entered.wait(PATIENCE_S)
    started = ledger.start_pending(limit=1, version=0)
    failed = ledger.fail_episode("1-0-0", "lost", max_attempts=1)
    started.add_done_callback(lambda future: order.extend(("started", e.episode_id) for e in future.result()))
    handle.before_answer = lambda: arrived.wait(PATIENCE_S)  # the answer is slower than the news
    gate.set()
    assert failed.result(PATIENCE_S) is None and done.wait(PATIENCE_S)
    assert order == [("started", "1-0-0"), ("closed", "1-0-0")]


def test_while_the_disk_is_full_scores_are_refused_and_all_else_waits(
    ledger: RemoteLedger, handle: Nearby, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_running(ledger, task=0, group_size=2)
    ledger.put_round(make_round(first.episode_id)).result()
    writer = handle.host._ledger._writer
    writer.submit(lambda db: db.execute("PRAGMA max_page_count = 1")).result()
    rounds = [ledger.put_round(make_round(second.episode_id, index=0, sampled=range(200_000)))]
    until = threading.Event()
    for _ in range(200):
        if ledger.is_full:
            break
        until.wait(0.1)
    assert ledger.is_full and not ledger.has_room()
    with pytest.raises(StorageFull, match="free space on"):
        ledger.notify_score(first.episode_id, 1.0).result(PATIENCE_S)
    later = ledger.position()
    assert not rounds[0].done() and not later.done()
    unwatched = threading.Event()
    ledger.watch(lambda news: unwatched.set())
    _lift(handle)
    assert rounds[0].result(PATIENCE_S) is None and later.result(PATIENCE_S).step == 0 and unwatched.wait(PATIENCE_S)
    assert ledger.notify_score(first.episode_id, 1.0).result(PATIENCE_S) is True


def test_closing_does_not_wait_for_a_full_disk(ledger: RemoteLedger, handle: Nearby) -> None:
    (episode,) = open_running(ledger, task=0)
    handle.host._ledger._writer.submit(lambda db: db.execute("PRAGMA max_page_count = 1")).result()
    waiting = ledger.put_round(make_round(episode.episode_id, sampled=range(200_000)))
    ledger.close()
    assert "closed while its disk was full" in str(waiting.exception(0))


def _lift(handle: Nearby) -> None:
    """Between two tries of the writer: nothing is stored meanwhile, so that no operation could do it."""
    handle.host._ledger._writer._db.execute("PRAGMA max_page_count = 1000000")


def test_a_round_overtakes_operations_of_other_episodes_only() -> None:
    def item(name: str, *, is_round: bool) -> Outgoing:
        operation = partial(adopt_episode, episode_id=name)
        return Outgoing(stored_round(make_round(name)) if is_round else job_of(operation))

    order = [item("a", is_round=False), item("b", is_round=True), item("b", is_round=False), item("a", is_round=True)]
    assert [list(map(order.index, group)) for group in together(order)] == [[1], [0, 2], [3]]


def test_what_is_sent_together_fits_in_a_message() -> None:
    half = Outgoing(stored_round(make_round("a", sampled=range(MAX_FRAME_BYTES // 16))))
    assert [len(each) for each in together([half, half, half])] == [1, 1, 1]
    small = Outgoing(stored_round(make_round("a" * 1000)))
    assert [len(each) for each in together([small] * 2000)] == [1024, 976] and list(together([])) == []


def test_a_round_that_no_message_holds_is_refused_at_once(ledger: RemoteLedger) -> None:
    (episode,) = open_running(ledger, task=0)
    with pytest.raises(EpisodeError, match="must have at most"):
        ledger.put_round(make_round(episode.episode_id, sampled=range(MAX_FRAME_BYTES // 8 + 1)))
    with pytest.raises(EpisodeError, match="must be between 0 and 2147483647, got 2147483648"):
        ledger.put_round(make_round(episode.episode_id, index=2**31))
    with pytest.raises(EpisodeError, match=r"100 characters of why it ended, got .* and 101"):
        ledger.put_round(make_round(episode.episode_id, finish_reason="x" * 101))
    ok, refused = (ledger.put_round(make_round(name)) for name in (episode.episode_id, "nobody"))
    assert ok.result() is None and "nobody" in str(refused.exception())


def test_an_endpoint_that_cannot_be_reached_is_named(
    ledger: RemoteLedger, handle: Nearby, monkeypatch: pytest.MonkeyPatch
) -> None:
    (episode,) = open_running(ledger, task=0)
    monkeypatch.setattr("buffers.remote.remote_ledger._UNREACHABLE_S", 0.5)
    handle.server.close()
    with pytest.raises(LedgerGone, match=r"ledger at local:\S+ must be reachable"):
        ledger.put_round(make_round(episode.episode_id)).result(PATIENCE_S)
    with pytest.raises(LedgerGone):
        ledger.position()


def test_rounds_that_were_cut_off_are_sent_again_over_a_new_connection(ledger: RemoteLedger, handle: Nearby) -> None:
    (episode,) = open_running(ledger, task=0)
    for index in range(6):
        round_ = ledger.put_round(make_round(episode.episode_id, index=index))
        if index % 2:
            handle.cut_all()
        assert round_.result(PATIENCE_S) is None
    assert len(ledger.rounds(episode.episode_id).result()) == 6
    assert ledger.notify_score(episode.episode_id, 1.0).result() is True
    with pytest.raises(EpisodeClosed):
        ledger.put_round(make_round(episode.episode_id, index=6)).result()
