"""Rules of stored groups in the ledger: which join a batch, how often at most, and what a crash or a way back leaves of it."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers.errors import LeaseError
from buffers.ledger.doctor import findings
from buffers.ledger.episodes import recover
from buffers.ledger.ledger import Ledger
from buffers.records import Eligible, Position, Replay, TrainBatch
from tests.support.buffer_parts import make_round, open_running, scored_by_group_state

REPLAY = Replay(num_groups=2, min_version=0, only="all", times=2)
TASKS = count()


def make_group(ledger: Ledger, *scores: float, version: int = 0) -> int:
    """A ready group of one member for each score."""
    members = open_running(ledger, task=next(TASKS), group_size=len(scores), version=version)
    for member, score in zip(members, scores, strict=True):
        ledger.put_round(make_round(member.episode_id, version=version))
        ledger.notify_score(member.episode_id, score).result()
    return members[0].group_id


def claim(ledger: Ledger, num_groups: int, *, replay: Replay | None = REPLAY) -> TrainBatch:
    batch = ledger.claim(num_groups, min_version=0, replay=replay).result()
    assert batch is not None
    return batch


def train(ledger: Ledger, num_groups: int, *, step: int, replay: Replay | None = REPLAY) -> tuple[int, ...]:
    batch = claim(ledger, num_groups, replay=replay)
    assert ledger.commit_step(batch.lease_id, step=step, version=step).result() == num_groups
    return batch.group_ids


def test_stored_groups_take_places_of_a_batch_with_their_true_versions_and_fresh_ones_take_the_rest() -> None:
    ledger = Ledger(None)
    first = [make_group(ledger, 1.0, version=3) for _ in range(4)]
    batch = claim(ledger, 4)
    assert batch.group_ids == tuple(first) and batch.num_stored == 0  # none was trained before: all are fresh
    assert ledger.count_stored(REPLAY).result() == 0
    ledger.commit_step(batch.lease_id, step=1, version=1).result()
    assert ledger.count_stored(REPLAY).result() == 2
    assert ledger.claim(4, min_version=0, replay=REPLAY).result() is None  # two fresh ones are waited for
    late = [make_group(ledger, 1.0, version=4) for _ in range(3)]
    again = claim(ledger, 4)
    assert again.group_ids == (*late[:2], *first[2:]) and again.num_stored == 2
    assert [row.times_trained for row in again.rows] == [0, 0, 1, 1]
    assert [int(row.versions.max()) for row in again.rows] == [4, 4, 3, 3]
    for old, new in zip(batch.rows[2:], again.rows[2:], strict=True):
        assert all((getattr(old, name) == getattr(new, name)).all() for name in ("ids", "mask", "logprobs", "versions"))
    assert again.fresh.group_ids == again.group_ids and [row.group_id for row in again.fresh.rows] == late[:2]
    ledger.commit_step(again.lease_id, step=2, version=2).result()
    assert ledger.counts()["groups/trained"] == 6 and scored_by_group_state(ledger) == 7
    ledger.close()


def test_those_trained_least_often_come_first_then_the_newest_and_none_beyond_its_times() -> None:
    ledger = Ledger(None)
    one = replace(REPLAY, num_groups=1, times=3)
    old, new = make_group(ledger, 1.0, version=1), make_group(ledger, 1.0, version=2)
    train(ledger, 2, step=1, replay=None)
    found = []
    for step in range(2, 6):
        make_group(ledger, 1.0, version=0)
        found.append(train(ledger, 2, step=step, replay=replace(one, min_version=1))[1])
    assert found == [new, old, new, old]
    assert ledger.count_stored(replace(one, min_version=1)).result() == 0
    assert ledger.count_stored(replace(one, min_version=1, times=4)).result() == 1
    assert ledger.count_stored(replace(one, min_version=3, times=4)).result() == 0
    ledger.close()


@pytest.mark.parametrize(("fresh", "num_groups", "stored"), [(3, 8, 3), (3, 12, 1), (1, 12, 0), (4, 8, 4), (5, 8, 4)])
def test_of_a_smaller_batch_no_larger_part_is_stored(fresh: int, num_groups: int, stored: int) -> None:
    ledger = Ledger(None)
    replay = replace(REPLAY, num_groups=4)
    for _ in range(6):
        make_group(ledger, 1.0)
    train(ledger, 6, step=1, replay=None)
    assert (
        ledger.claim(num_groups, min_version=0, replay=replay, fewest=1).result() is None
    )  # a fresh one is waited for
    groups = [make_group(ledger, 1.0) for _ in range(fresh)]
    batch = ledger.claim(num_groups, min_version=0, replay=replay, fewest=1).result()
    assert batch is not None and batch.num_stored == stored
    assert batch.group_ids[: -stored or None] == tuple(groups[: num_groups - stored])
    ledger.close()


@pytest.mark.parametrize(("only", "number"), [("all", 4), ("mixed", 2), ("solved", 2)])
def test_which_groups_are_eligible(only: Eligible, number: int) -> None:
    ledger = Ledger(None)
    groups = [make_group(ledger, *scores) for scores in ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (-1.0, 0.0))]
    train(ledger, 4, step=1, replay=None)
    make_group(ledger, 1.0, 0.0)
    replay = replace(REPLAY, num_groups=4, only=only)
    expected = {"all": groups, "mixed": [groups[1], groups[3]], "solved": [groups[1], groups[2]]}[only]
    assert ledger.count_stored(replay).result() == number
    batch = claim(ledger, number + 1, replay=replay)
    assert list(batch.group_ids[1:]) == expected
    ledger.close()


def test_a_stored_group_is_in_one_batch_at_a_time_and_free_again_when_that_is_given_back() -> None:
    ledger = Ledger(None)
    stored = make_group(ledger, 1.0)
    train(ledger, 1, step=1)
    fresh = [make_group(ledger, 1.0) for _ in range(3)]
    first = claim(ledger, 2)
    assert first.group_ids == (fresh[0], stored)
    assert claim(ledger, 2).group_ids == (fresh[1], fresh[2])
    assert ledger.release(first.lease_id).result() == 1
    assert ledger.counts()["groups/trained"] == 1
    assert claim(ledger, 2).group_ids == first.group_ids
    with pytest.raises(LeaseError):
        ledger.commit_step(first.lease_id, step=2, version=2).result()
    ledger.close()


def test_a_batch_that_was_given_back_is_made_again_with_the_stored_groups_that_it_had(tmp_path: Path) -> None:
    """Killed twice before the next checkpoint; and by the rule that holds then, no stored group would join."""
    path = tmp_path / "ledger.db"
    one = replace(REPLAY, num_groups=1)
    with Ledger(path) as ledger:
        for _ in range(2):
            make_group(ledger, 1.0, version=1)
        train(ledger, 2, step=1)
        checkpoint = ledger.position().result()
        for _ in range(3):
            make_group(ledger, 1.0)
        made = [train(ledger, 2, step=step, replay=one) for step in (2, 3)]
        leased = claim(ledger, 2, replay=one).group_ids
        assert made[0][1] == 2 and all(batch[1] < batch[0] for batch in (*made, leased))
    other = replace(one, only="mixed")
    for done in (1, 2):
        with Ledger(path) as ledger:  # killed
            assert ledger.restore(checkpoint).result() == 3
            assert ledger.run(findings).result() == []
            assert ledger.count_stored(other).result() == 0
            again = [train(ledger, 2, step=step, replay=other) for step in range(2, 2 + done)]
            assert again == made[:done]
    with Ledger(path) as ledger:
        ledger.restore(checkpoint).result()
        assert [train(ledger, 2, step=step, replay=other) for step in (2, 3, 4)] == [*made, leased]
        assert ledger.run(findings).result() == []


def test_without_replay_what_a_batch_lacks_then_is_fresh() -> None:
    ledger = Ledger(None)
    start = ledger.position().result()
    make_group(ledger, 1.0)
    train(ledger, 1, step=1)
    fresh = [make_group(ledger, 1.0) for _ in range(2)]
    assert train(ledger, 2, step=2) == (fresh[0], 1)
    ledger.restore(replace(start, step=1)).result()
    assert train(ledger, 2, step=2, replay=None) == tuple(fresh)
    ledger.close()


@pytest.mark.parametrize(
    "broken",
    [
        "INSERT INTO step VALUES (9, 0, 9, {lease}, 9, 1); INSERT INTO trained VALUES (9, 1)",
        "INSERT INTO joined VALUES ({lease}, 1)",
        "UPDATE grp SET num_trained = 0 WHERE group_id = 1",
        "UPDATE grp SET state = 'ready', lease_id = NULL WHERE group_id = 1",
    ],
)
def test_the_tables_themselves_refuse_that_a_group_is_trained_more_often(broken: str) -> None:
    ledger = Ledger(None)
    make_group(ledger, 1.0)
    train(ledger, 1, step=1)
    make_group(ledger, 1.0)
    train(ledger, 2, step=2)  # group 1 for the second time
    make_group(ledger, 1.0)
    lease = claim(ledger, 1, replay=replace(REPLAY, num_groups=0)).lease_id

    def write(db: sqlite3.Connection) -> None:
        for statement in broken.format(lease=lease).split(";"):
            db.execute(statement)

    with pytest.raises(Exception, match=r"more often than its lease|joins a batch once|CHECK constraint"):
        ledger.run(write).result()
    ledger.close()


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["ready", "claim", "claim", "commit", "commit", "release", "save", "restore", "die"]),
        st.integers(0, 9),
    ),
    min_size=20,
    max_size=60,
)


@pytest.mark.seconds
@settings(max_examples=200, deadline=None)
@given(ACTS, st.integers(1, 3), st.integers(0, 1), st.sampled_from(["all", "mixed"]))
def test_whatever_happens_no_group_is_trained_more_than_so_many_times_in_what_led_here(
    acts: list[tuple[str, int]], times: int, number: int, only: Eligible
) -> None:
    ledger = Ledger(None)
    replay = Replay(num_groups=number, min_version=0, only=only, times=times)
    chain: list[tuple[int, ...]] = []  # the batches that led here
    saved: list[tuple[Position, list[tuple[int, ...]]]] = [(ledger.position().result(), [])]
    leases: list[TrainBatch] = []
    for act, choice in acts:
        if act == "ready":
            for score in (1.0, float(choice % 2)):
                make_group(ledger, score, 0.0)
        elif act == "claim":
            if (batch := ledger.claim(2, min_version=0, replay=replay).result()) is not None:
                assert len(set(batch.group_ids)) == 2 and batch.num_stored <= number
                leases.append(batch)
        elif act == "commit" and leases:
            batch = leases.pop(0)
            chain.append(batch.group_ids)
            ledger.commit_step(batch.lease_id, step=len(chain), version=len(chain)).result()
        elif act == "release" and leases:
            ledger.release(leases.pop().lease_id).result()
        elif act == "save":
            saved.append((ledger.position().result(), list(chain)))
        elif act in ("restore", "die"):
            _forget(ledger, leases)
            target, kept = saved[choice % len(saved)] if act == "restore" else (ledger.position().result(), chain)
            ledger.restore(target).result()
            chain = list(kept)
        trained = Counter(group for batch in chain for group in batch)
        assert max(trained.values(), default=0) <= times
        assert ledger.counts()["groups/trained"] == len(trained)
        assert ledger.run(findings).result() == []
    ledger.close()


def _forget(ledger: Ledger, leases: list[TrainBatch]) -> None:
    """Its process died: what was leased is given back."""
    leases.clear()
    forget: Callable[[sqlite3.Connection], Any] = lambda db: recover(db, resume_episodes=True)  # noqa: E731
    ledger.run(forget).result()
