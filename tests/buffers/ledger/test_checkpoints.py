"""Rules of buffers/ledger/checkpoints.py: going back to a checkpoint gives back what was trained after it, once and in
order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers.errors import EpisodeClosed, UnderstudyError
from buffers.ledger.ledger import Ledger
from buffers.records import Position
from tests.support.buffer_parts import make_ready, make_round, make_task, open_running, scored_by_group_state


def train(ledger: Ledger, *, step: int, num_groups: int = 1) -> tuple[int, ...]:
    batch = ledger.claim(num_groups, min_version=0).result()
    assert batch is not None
    assert ledger.commit_step(batch.lease_id, step=step, version=step).result() == num_groups
    return batch.group_ids


def here(ledger: Ledger) -> Position:
    return ledger.position().result()


def test_a_restore_gives_back_the_later_batches_in_the_order_in_which_they_were_trained(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        for task in (3, 1, 2, 0):
            make_ready(ledger, task=task)
        first = train(ledger, step=1)
        checkpoint = here(ledger)
        late = make_ready(ledger, task=9)
        later = [train(ledger, step=step) for step in (2, 3)]
        leased = ledger.claim(1, min_version=0).result()
        assert leased is not None
    with Ledger(tmp_path / "ledger.db") as ledger:  # killed: step 4's batch was leased
        assert ledger.restore(checkpoint).result() == 3
        assert here(ledger) == replace(checkpoint, lineage=1, step=1)
        assert ledger.counts()["groups/trained"] == 1 and ledger.counts()["groups/ready"] == 4
        assert scored_by_group_state(ledger) == ledger.counts()["episodes/scored"] == 5
        again = [train(ledger, step=step) for step in (2, 3, 4, 5)]
        assert again == [*later, leased.group_ids, (late,)]
        assert first not in again


def test_a_batch_of_several_groups_is_claimed_again_as_it_was() -> None:
    """The first group completes after others were trained: it does not slip into their batches."""
    ledger = Ledger(None)
    (slow,) = open_running(ledger, task=100)
    groups = [make_ready(ledger, task=task) for task in range(4)]
    start = here(ledger)
    trained = [train(ledger, step=step, num_groups=2) for step in (1, 2)]
    assert trained == [tuple(groups[:2]), tuple(groups[2:])]
    ledger.put_round(make_round(slow.episode_id))
    ledger.notify_score(slow.episode_id, 1.0).result()
    assert ledger.restore(start).result() == 2
    assert [train(ledger, step=step, num_groups=2) for step in (1, 2)] == trained
    assert train(ledger, step=3) == (slow.group_id,)
    ledger.close()


def test_what_a_checkpoint_trained_is_never_trained_again_whatever_lineage_ran_in_between() -> None:
    ledger = Ledger(None)
    for task in range(4):
        make_ready(ledger, task=task)
    start = here(ledger)
    first, second = train(ledger, step=1), train(ledger, step=2)
    at_two = here(ledger)
    ledger.restore(start).result()
    assert train(ledger, step=1) == first
    at_one_again = here(ledger)
    assert (at_one_again.lineage, at_one_again.step) == (1, 1)
    ledger.restore(at_two).result()  # back to the first lineage: both of its groups are trained
    assert ledger.counts()["groups/trained"] == 2 and ledger.counts()["groups/ready"] == 2
    third = train(ledger, step=3)
    assert third not in (first, second)
    ledger.restore(at_one_again).result()
    assert [train(ledger, step=step) for step in (2, 3)] == [second, third]
    ledger.close()


def test_a_checkpoint_of_a_later_lineage_keeps_what_led_to_it_in_the_one_before() -> None:
    ledger = Ledger(None)
    for task in range(3):
        make_ready(ledger, task=task)
    train(ledger, step=1)
    at_one = here(ledger)
    train(ledger, step=2)  # not on the way to what follows
    ledger.restore(at_one).result()
    train(ledger, step=2)
    at_two = here(ledger)
    last = train(ledger, step=3)
    assert ledger.restore(at_two).result() == 1
    assert ledger.counts()["groups/trained"] == 2
    assert train(ledger, step=3) == last
    ledger.close()


def test_a_stale_group_is_evicted_and_not_trained_after_a_restore() -> None:
    ledger = Ledger(None)
    make_ready(ledger, task=0, version=0)
    make_ready(ledger, task=1, version=4)
    start = here(ledger)
    train(ledger, step=1)
    assert ledger.restore(start).result() == 1
    batch = ledger.claim(1, min_version=3).result()
    assert batch is not None and batch.rows[0].versions.max() == 4
    assert ledger.counts()["evicted/stale"] == 1
    ledger.close()


def test_a_validation_under_way_is_given_up_and_its_episodes_have_failed() -> None:
    ledger = Ledger(None)
    start = here(ledger)
    ledger.open_validation([make_task(7)], group_size=2, greedy=True).result()
    episodes = ledger.start_pending(limit=2, version=0).result()
    assert len(episodes) == 2 and ledger.counts()["groups/validating"] == 1
    assert ledger.restore(start).result() == 0
    counts = ledger.counts()
    assert counts["groups/validating"] == 0 and counts["evicted/restart"] == 1 and counts["episodes/failed"] == 2
    for episode in episodes:
        with pytest.raises(EpisodeClosed, match="restart"):
            ledger.notify_score(episode.episode_id, 1.0).result()
    ledger.close()


def test_the_position_in_the_task_files_survives(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        make_ready(ledger, task=5)
        ledger.open_group("t:5", instance=1, group_size=1).result()
        make_ready(ledger, task=6)
        ledger.adopt_episode("mine").result()
    with Ledger(tmp_path / "ledger.db") as ledger:
        assert ledger.times_opened().result() == {"t:5": 2, "t:6": 1}


def test_a_checkpoint_of_other_books_is_refused_and_changes_nothing() -> None:
    ledger, other = Ledger(None), Ledger(None)
    make_ready(ledger, task=0)
    train(ledger, step=1)
    with pytest.raises(UnderstudyError, match="must belong to this ledger"):
        ledger.restore(here(other)).result()
    with pytest.raises(UnderstudyError, match=r"must hold the 5 steps of lineage 0 .* got 1"):
        ledger.restore(replace(here(ledger), step=5)).result()
    assert here(ledger).lineage == 0 and ledger.counts()["groups/trained"] == 1
    ledger.close()
    other.close()


@pytest.mark.seconds
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["ready", "train", "train", "save", "restore"]), st.integers(0, 9)), max_size=40)
)
def test_whatever_happens_a_lineage_trains_each_group_at_most_once_and_loses_none(acts: list[tuple[str, int]]) -> None:
    ledger = Ledger(None)
    chain: list[int] = []  # groups in the order in which what led here trained them
    saved: list[tuple[Position, list[int]]] = [(here(ledger), [])]
    num_ready = 0
    for act, number in acts:
        if act == "ready":
            make_ready(ledger, task=num_ready)
            num_ready += 1
        elif act == "train" and len(chain) < num_ready:
            (group,) = train(ledger, step=len(chain) + 1)
            assert group not in chain
            chain.append(group)
        elif act == "save":
            saved.append((here(ledger), list(chain)))
        elif act == "restore":
            target, kept = saved[number % len(saved)]
            ledger.restore(target).result()
            chain = list(kept)
        counts = ledger.counts()
        assert counts["groups/trained"] == len(chain)
        assert counts["groups/ready"] == num_ready - len(chain)
        assert scored_by_group_state(ledger) == counts["episodes/scored"] == num_ready
        assert here(ledger).step == len(chain)
    ledger.close()
