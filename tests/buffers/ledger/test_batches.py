"""What the ledger promises of batches: full, fresh, trained once; the same in memory and on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from buffers.errors import LeaseError, UnknownEpisode
from buffers.ledger.ledger import Ledger
from buffers.records import ScoreDetail
from tests.support.buffer_parts import make_ready, make_round, make_task, open_running


@pytest.fixture(params=["memory", "file"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.db" if request.param == "file" else None) as opened:
        yield opened


def test_only_full_batches_are_claimed_oldest_groups_first(ledger: Ledger) -> None:
    make_ready(ledger, task=0)
    assert ledger.claim(2, min_version=0).result() is None
    assert ledger.counts()["groups/ready"] == 1
    make_ready(ledger, task=1)
    make_ready(ledger, task=2)
    batch = ledger.claim(2, min_version=0).result()
    assert batch is not None and batch.group_ids == (1, 2)
    assert ledger.counts()["groups/leased"] == 2 and ledger.counts()["groups/ready"] == 1


def test_a_group_is_stale_when_all_its_tokens_are_too_old(ledger: Ledger) -> None:
    old, other = open_running(ledger, task=0, group_size=2)
    for episode in (old, other):
        ledger.put_round(make_round(episode.episode_id, version=2))
        ledger.notify_score(episode.episode_id, 1.0).result()
    long, mate = open_running(ledger, task=1, group_size=2)
    ledger.put_round(make_round(long.episode_id, version=1))
    ledger.put_round(make_round(long.episode_id, index=1, parent=0, version=3))  # its fresh tail is trained
    ledger.put_round(make_round(mate.episode_id, version=1))
    for episode in (long, mate):
        ledger.notify_score(episode.episode_id, 1.0).result()
    batch = ledger.claim(1, min_version=3).result()
    assert batch is not None and batch.group_ids == (long.group_id,)
    assert ledger.counts()["evicted/stale"] == 1
    assert [sorted(set(row.versions[row.mask == 1].tolist())) for row in batch.rows] == [[1, 3], [1]]


def test_a_claim_evicts_what_is_stale_even_where_there_is_no_full_batch(ledger: Ledger) -> None:
    make_ready(ledger, task=0, version=0)
    make_ready(ledger, task=1, version=1)
    assert ledger.claim(3, min_version=1).result() is None
    assert ledger.counts()["evicted/stale"] == 1 == ledger.counts()["groups/ready"]


def test_an_episode_that_is_not_there_has_no_rounds(ledger: Ledger) -> None:
    with pytest.raises(UnknownEpisode):
        ledger.rounds("no-such-0-0").result()


def test_a_group_whose_fresh_tokens_were_left_out_is_stale(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    ledger.put_round(make_round(episode.episode_id, version=1))
    ledger.put_round(newer := make_round(episode.episode_id, index=1, parent=0, version=3))
    nothing = np.zeros(len(newer.sampled_ids), np.uint8)
    ledger.mask_tokens(episode.episode_id, {1: nothing}).result()
    ledger.notify_score(episode.episode_id, 1.0).result()
    assert ledger.claim(1, min_version=3).result() is None
    assert ledger.counts()["evicted/stale"] == 1


def test_a_round_is_as_fresh_as_its_newest_token(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    ledger.put_round(replace(make_round(episode.episode_id), versions=np.array([1, 1, 3], dtype=np.int32)))
    ledger.notify_score(episode.episode_id, 1.0).result()
    assert ledger.claim(1, min_version=3).result() is not None


def test_an_untrained_old_token_does_not_make_a_group_stale(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    ledger.put_round(make_round(episode.episode_id, version=0, finish_reason="abort"))
    ledger.put_round(make_round(episode.episode_id, index=1, version=3))
    ledger.notify_score(episode.episode_id, 1.0).result()
    assert ledger.claim(1, min_version=3).result() is not None


def test_tokens_that_are_left_out_are_stored_and_come_back_as_context(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    some = np.array([1, 0, 1], dtype=np.uint8)
    ledger.put_round(replace(make_round(episode.episode_id), trained=some))
    ledger.put_round(make_round(episode.episode_id, index=1, parent=0))
    first, second = ledger.rounds(episode.episode_id).result()
    assert first.trained is not None and first.trained.tolist() == [1, 0, 1] and second.trained is None
    ledger.notify_score(episode.episode_id, 1.0).result()
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None and batch.rows[0].mask.tolist() == [0, 0, 1, 0, 1, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("told", "judged", "expected"),
    [("Count.", "", "Count."), ("Count.", "Guess.", "Guess."), ("", "", None), (3, "", None)],
)
def test_rows_have_the_hint_of_a_judge_or_else_of_their_task(
    ledger: Ledger, told: object, judged: str, expected: str | None
) -> None:
    ledger.put_tasks([replace(make_task(0), extra_info={"hint": told})])
    ledger.open_group("t:0", instance=0, group_size=1)
    (episode,) = ledger.start_pending(limit=1, version=0).result()
    ledger.put_round(make_round(episode.episode_id))
    ledger.notify_score(episode.episode_id, 1.0, detail=ScoreDetail(hint=judged)).result()
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None and [row.hint for row in batch.rows] == [expected]


def test_rows_say_which_members_of_a_group_were_sampled_greedily(ledger: Ledger) -> None:
    ledger.put_tasks([make_task(0)])
    ledger.open_group("t:0", instance=0, group_size=3, num_greedy=1)
    for episode in ledger.start_pending(limit=3, version=0).result():
        ledger.put_round(make_round(episode.episode_id))
        ledger.notify_score(episode.episode_id, 1.0).result()
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None and [row.greedy for row in batch.rows] == [True, False, False]


def test_a_round_keeps_how_it_ended_and_one_that_was_aborted_is_in_no_row(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    ledger.put_round(make_round(episode.episode_id, finish_reason="length"))
    ledger.put_round(make_round(episode.episode_id, index=1, parent=0, finish_reason="abort"))
    assert [each.finish_reason for each in ledger.rounds(episode.episode_id).result()] == ["length", "abort"]
    ledger.notify_score(episode.episode_id, 1.0).result()
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None and [(row.num_trained, row.truncated) for row in batch.rows] == [(3, (0,))]


def test_what_runs_is_never_stale(ledger: Ledger) -> None:
    old = open_running(ledger, task=0, group_size=2)
    for episode in old:
        ledger.put_round(make_round(episode.episode_id, version=0))
    ledger.notify_score(old[0].episode_id, 1.0)
    make_ready(ledger, task=2, version=0)
    assert ledger.evict_stale(1).result() == 1
    counts = ledger.counts()
    assert counts["evicted/stale"] == 1 and counts["groups/open"] == 1 and counts["episodes/running"] == 1
    ledger.put_round(make_round(old[1].episode_id, index=1, parent=0, version=2))
    assert ledger.notify_score(old[1].episode_id, 1.0).result() is True
    assert ledger.claim(1, min_version=2).result() is not None


def test_tokens_of_a_failed_attempt_do_not_make_a_group_stale(ledger: Ledger) -> None:
    (first,) = open_running(ledger, task=0)
    ledger.put_round(make_round(first.episode_id, version=0))
    ledger.fail_episode(first.episode_id, "lost", max_attempts=2)
    assert ledger.evict_stale(1).result() == 0
    (retry,) = ledger.start_pending(limit=1, version=1).result()
    ledger.put_round(make_round(retry.episode_id, version=1))
    ledger.notify_score(retry.episode_id, 1.0)
    assert ledger.claim(1, min_version=1).result() is not None


def test_a_committed_step_is_trained_once_and_answers_again(ledger: Ledger) -> None:
    make_ready(ledger, task=0)
    make_ready(ledger, task=1)
    batch = ledger.claim(2, min_version=0).result()
    assert batch is not None
    assert ledger.commit_step(batch.lease_id, step=1, version=1).result() == 2
    assert ledger.commit_step(batch.lease_id, step=1, version=1).result() == 2
    counts = ledger.counts()
    assert counts["groups/trained"] == 2 and counts["groups/leased"] == 0
    with pytest.raises(LeaseError, match="committed with step 1, got step 2"):
        ledger.commit_step(batch.lease_id, step=2, version=2).result()
    with pytest.raises(LeaseError, match="committed"):
        ledger.release(batch.lease_id).result()


def test_a_released_lease_cannot_commit(ledger: Ledger) -> None:
    make_ready(ledger, task=0)
    first = ledger.claim(1, min_version=0).result()
    assert first is not None and ledger.release(first.lease_id).result() == 1
    with pytest.raises(LeaseError, match="lease 1 must be active, got released"):
        ledger.commit_step(first.lease_id, step=1, version=1).result()
    second = ledger.claim(1, min_version=0).result()
    assert second is not None and second.group_ids == first.group_ids and second.lease_id != first.lease_id
    with pytest.raises(LeaseError, match="unknown"):
        ledger.commit_step(99, step=1, version=1).result()


def test_a_step_number_is_used_once(ledger: Ledger) -> None:
    make_ready(ledger, task=0)
    make_ready(ledger, task=1)
    first, second = ledger.claim(1, min_version=0).result(), ledger.claim(1, min_version=0).result()
    assert first is not None and second is not None
    ledger.commit_step(first.lease_id, step=1, version=1).result()
    with pytest.raises(LeaseError, match="step 1 is committed by lease 1"):
        ledger.commit_step(second.lease_id, step=1, version=1).result()
    assert ledger.commit_step(second.lease_id, step=2, version=2).result() == 1
