"""Batch leases: deadlines and heartbeats, fencing, several uses of a group, the order of a batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from buffers.errors import LeaseError, UnderstudyError
from buffers.ledger.ledger import Ledger
from buffers.ledger.selectors import freshest_first, oldest_first, shortest_first, shuffled
from buffers.records import ReadyGroup
from tests.support.buffer_parts import make_ready, make_round, make_task, open_running, scored_by_group_state


class Clock:
    """Moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> Iterator[Ledger]:
    with Ledger(None, clock=clock) as ledger:
        yield ledger


def test_an_expired_lease_gives_its_groups_back_and_cannot_commit(ledger: Ledger, clock: Clock) -> None:
    make_ready(ledger, task=0)
    first = ledger.claim(1, min_version=0, ttl_s=10.0).result()
    assert first is not None
    clock.now += 9.9
    assert ledger.claim(1, min_version=0).result() is None
    clock.now += 0.1
    second = ledger.claim(1, min_version=0, ttl_s=10.0).result()
    assert second is not None and second.group_ids == first.group_ids and second.lease_id != first.lease_id
    for late in (
        lambda: ledger.commit_step(first.lease_id, step=1, version=1),
        lambda: ledger.heartbeat(first.lease_id, ttl_s=10.0),
        lambda: ledger.release(first.lease_id),
    ):
        with pytest.raises(LeaseError, match="lease 1 must be active, got expired"):
            late().result()
    assert ledger.commit_step(second.lease_id, step=1, version=1).result() == 1
    assert ledger.commit_step(second.lease_id, step=1, version=1).result() == 1
    assert scored_by_group_state(ledger) == ledger.counts()["scored/trained"] == 1 and ledger.imbalance() == 0


def test_a_lease_past_its_deadline_cannot_commit_even_when_nobody_else_wanted_its_groups(
    ledger: Ledger, clock: Clock
) -> None:
    make_ready(ledger, task=0)
    batch = ledger.claim(1, min_version=0, ttl_s=10.0).result()
    assert batch is not None
    clock.now += 10.0
    with pytest.raises(LeaseError, match="expired"):
        ledger.commit_step(batch.lease_id, step=1, version=1).result()
    again = ledger.claim(1, min_version=0).result()
    assert again is not None and again.group_ids == batch.group_ids


def test_a_heartbeat_keeps_a_lease_and_one_without_a_deadline_needs_none(ledger: Ledger, clock: Clock) -> None:
    make_ready(ledger, task=0)
    make_ready(ledger, task=1)
    kept, endless = ledger.claim(1, min_version=0, ttl_s=10.0).result(), ledger.claim(1, min_version=0).result()
    assert kept is not None and endless is not None
    for _ in range(5):
        clock.now += 8.0
        ledger.heartbeat(kept.lease_id, ttl_s=10.0).result()
    assert ledger.claim(1, min_version=0).result() is None
    assert ledger.commit_step(kept.lease_id, step=1, version=1).result() == 1
    clock.now += 1e9
    assert ledger.commit_step(endless.lease_id, step=2, version=2).result() == 1


def test_a_lease_that_runs_out_wakes_those_who_wait_for_groups() -> None:
    with Ledger(None) as ledger:
        make_ready(ledger, task=0)
        woken = threading.Event()
        assert ledger.claim(1, min_version=0, ttl_s=0.05).result() is not None
        ledger.watch(lambda news: woken.set() if news.counts["groups/ready"] else None)
        assert woken.wait(10)
        assert ledger.claim(1, min_version=0).result() is not None


def test_the_oldest_expired_batch_is_claimed_first_and_as_it_was(ledger: Ledger, clock: Clock) -> None:
    for task in range(4):
        make_ready(ledger, task=task)
    ledger.claim(2, min_version=0, ttl_s=1.0).result()
    clock.now += 2.0
    batch = ledger.claim(2, min_version=0, selector=freshest_first).result()
    assert batch is not None and batch.group_ids == (1, 2)


def test_a_group_is_trained_as_often_as_it_may_be_and_no_more(ledger: Ledger) -> None:
    ledger.put_tasks([make_task(0)])
    (episode,) = ledger.open_group("t:0", instance=0, group_size=1, max_uses=2).result()
    ledger.start_episode(episode.episode_id, version=0)
    ledger.put_round(make_round(episode.episode_id))
    ledger.notify_score(episode.episode_id, 1.0).result()
    for step in (1, 2):
        batch = ledger.claim(1, min_version=0).result()
        assert batch is not None and batch.group_ids == (1,)
        assert ledger.commit_step(batch.lease_id, step=step, version=step).result() == 1
        assert ledger.counts()["groups/trained"] == step - 1 and ledger.imbalance() == 0
    assert ledger.claim(1, min_version=0).result() is None


def test_going_back_gives_back_the_uses_after_the_checkpoint_only(ledger: Ledger) -> None:
    ledger.put_tasks([make_task(0)])
    (episode,) = ledger.open_group("t:0", instance=0, group_size=1, max_uses=2).result()
    ledger.start_episode(episode.episode_id, version=0)
    ledger.put_round(make_round(episode.episode_id))
    ledger.notify_score(episode.episode_id, 1.0).result()

    def train(step: int) -> None:
        batch = ledger.claim(1, min_version=0).result()
        assert batch is not None
        ledger.commit_step(batch.lease_id, step=step, version=step).result()

    train(1)
    checkpoint = ledger.position().result()
    train(2)
    assert ledger.restore(checkpoint).result() == 1
    train(2)  # its second use once more, in the new lineage
    assert ledger.claim(1, min_version=0).result() is None
    assert ledger.counts()["groups/trained"] == 1


def test_selectors_order_groups_and_lose_none() -> None:
    groups = [
        ReadyGroup(group_id=gid, min_version=version, num_episodes=2, num_tokens=tokens, uses=0)
        for gid, version, tokens in ((1, 0, 50), (2, 3, 10), (3, 3, 40), (4, 1, 20))
    ]
    order = {select: [group.group_id for group in select(groups)] for select in (oldest_first, freshest_first)}
    assert order == {oldest_first: [1, 2, 3, 4], freshest_first: [2, 3, 4, 1]}
    assert [group.group_id for group in shortest_first(groups)] == [2, 4, 3, 1]
    mixed = [group.group_id for group in shuffled(7)(groups)]
    assert sorted(mixed) == [1, 2, 3, 4] and mixed == [g.group_id for g in shuffled(7)(groups[::-1])]
    assert len({tuple(g.group_id for g in shuffled(seed)(groups)) for seed in range(20)}) > 5


def test_a_claim_takes_what_its_selector_prefers(ledger: Ledger) -> None:
    long, short = make_ready(ledger, task=0), None
    (episode,) = open_running(ledger, task=1)
    ledger.put_round(make_round(episode.episode_id, sampled=[5]))
    ledger.notify_score(episode.episode_id, 1.0).result()
    short = episode.group_id
    batch = ledger.claim(1, min_version=0, selector=shortest_first).result()
    assert batch is not None and batch.group_ids == (short,)
    rest = ledger.claim(1, min_version=0).result()
    assert rest is not None and rest.group_ids == (long,)


def test_a_batch_is_not_committed_from_books_that_do_not_balance(ledger: Ledger) -> None:
    make_ready(ledger, task=0)
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None
    ledger._counts["episodes/scored"] += 1
    with pytest.raises(UnderstudyError, match="1 are not"):
        ledger.commit_step(batch.lease_id, step=1, version=1)
