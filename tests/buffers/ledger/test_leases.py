"""Batch leases: fencing, and the order of a batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from buffers.errors import LeaseError, UnderstudyError
from buffers.ledger.ledger import Ledger
from tests.support.buffer_parts import make_ready, scored_by_group_state


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with Ledger(None) as ledger:
        yield ledger


def test_a_released_lease_gives_its_groups_back_and_cannot_commit(ledger: Ledger) -> None:
    make_ready(ledger, task=0)
    first = ledger.claim(1, min_version=0).result()
    assert first is not None
    assert ledger.claim(1, min_version=0).result() is None
    assert ledger.release(first.lease_id).result() == 1
    second = ledger.claim(1, min_version=0).result()
    assert second is not None and second.group_ids == first.group_ids and second.lease_id != first.lease_id
    for late in (
        lambda: ledger.commit_step(first.lease_id, step=1, version=1),
        lambda: ledger.release(first.lease_id),
    ):
        with pytest.raises(LeaseError, match="lease 1 must be active, got released"):
            late().result()
    assert ledger.commit_step(second.lease_id, step=1, version=1).result() == 1
    assert ledger.commit_step(second.lease_id, step=1, version=1).result() == 1
    assert scored_by_group_state(ledger) == ledger.counts()["scored/trained"] == 1 and ledger.imbalance() == 0


def test_the_oldest_released_batch_is_claimed_first_and_as_it_was(ledger: Ledger) -> None:
    for task in range(4):
        make_ready(ledger, task=task)
    first, second = (ledger.claim(2, min_version=0).result() for _ in range(2))
    assert first is not None and second is not None
    ledger.release(second.lease_id)
    ledger.release(first.lease_id)
    batch = ledger.claim(2, min_version=0).result()
    assert batch is not None and batch.group_ids == first.group_ids == (1, 2)


def test_going_back_gives_back_what_was_trained_after_the_checkpoint_and_once(ledger: Ledger) -> None:
    for task in range(2):
        make_ready(ledger, task=task)

    def train(step: int) -> tuple[int, ...]:
        batch = ledger.claim(1, min_version=0).result()
        assert batch is not None
        ledger.commit_step(batch.lease_id, step=step, version=step).result()
        return batch.group_ids

    train(1)
    checkpoint = ledger.position().result()
    lost = train(2)
    assert ledger.restore(checkpoint).result() == 1
    assert train(2) == lost, "trained again, in the new lineage"
    assert ledger.claim(1, min_version=0).result() is None
    assert ledger.counts()["groups/trained"] == 2 and ledger.imbalance() == 0


def test_a_batch_is_not_committed_from_books_that_do_not_balance(ledger: Ledger) -> None:
    make_ready(ledger, task=0)
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None
    ledger._counts["episodes/scored"] += 1
    with pytest.raises(UnderstudyError, match="1 are not"):
        ledger.commit_step(batch.lease_id, step=1, version=1)
