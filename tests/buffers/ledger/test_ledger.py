"""What the ledger promises of groups, scores and its counts; the same in memory and on disk."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers.errors import (
    EpisodeClosed,
    EpisodeError,
    ScoreConflict,
    ScoreError,
    TaskError,
    UnderstudyError,
    UnknownEpisode,
)
from buffers.ledger.ledger import Ledger, LedgerEvent
from buffers.records import Task
from tests.support.buffer_parts import make_ready, make_round, make_task, open_running, scored_by_group_state


@pytest.fixture(params=["memory", "file"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.db" if request.param == "file" else None) as opened:
        yield opened


def test_tasks_are_stored_once(ledger: Ledger) -> None:
    assert ledger.put_tasks([make_task(0), make_task(1)]).result() == 2
    assert ledger.put_tasks([make_task(1), make_task(2)]).result() == 1


def test_one_task_id_never_names_two_tasks(ledger: Ledger) -> None:
    ledger.put_tasks([make_task(0)]).result()
    other = Task(task_id="t:0", prompt=[{"role": "user", "content": "another"}])
    with pytest.raises(TaskError, match="'t:0' must name one task"):
        ledger.put_tasks([make_task(5), other]).result()
    assert ledger.put_tasks([make_task(5)]).result() == 1  # nothing of the refused call was kept


def test_a_task_that_json_cannot_hold_is_refused(ledger: Ledger) -> None:
    with pytest.raises(TaskError, match="'bad' must be JSON"):
        ledger.put_tasks([Task(task_id="bad", prompt=[], ground_truth=float("nan"))])


def test_a_group_has_members_with_ids_that_name_it(ledger: Ledger) -> None:
    ledger.put_tasks([make_task(0)])
    episodes = ledger.open_group("t:0", instance=0, group_size=3).result()
    assert [episode.episode_id for episode in episodes] == ["1-0-0", "1-1-0", "1-2-0"]
    assert episodes[2].task == make_task(0)
    assert ledger.counts()["episodes/pending"] == 3


def test_an_instance_of_a_task_is_opened_once(ledger: Ledger) -> None:
    ledger.put_tasks([make_task(0)])
    assert len(ledger.open_group("t:0", instance=0, group_size=2).result()) == 2
    assert ledger.open_group("t:0", instance=0, group_size=2).result() == []
    assert [e.episode_id for e in ledger.open_group("t:0", instance=1, group_size=1).result()] == ["2-0-0"]
    with pytest.raises(TaskError, match="'t:9'"):
        ledger.open_group("t:9", instance=0, group_size=1).result()


def test_retries_start_before_new_episodes(ledger: Ledger) -> None:
    first = open_running(ledger, task=0)[0]
    ledger.put_tasks([make_task(1)])
    ledger.open_group("t:1", instance=0, group_size=1)
    ledger.fail_episode(first.episode_id, "lost", max_attempts=3).result()
    started = ledger.start_pending(limit=5, version=0).result()
    assert [episode.episode_id for episode in started] == ["1-0-1", "2-0-0"]
    assert started[0].task == make_task(0) and started[0].attempt == 1
    assert ledger.start_pending(limit=5, version=0).result() == []


def test_a_batch_holds_what_was_sampled(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    ledger.put_round(make_round(episode.episode_id, tail=[1, 2], sampled=[7, 8], version=5))
    ledger.put_round(make_round(episode.episode_id, index=1, parent=0, tail=[3], sampled=[9], version=6))
    ledger.notify_score(episode.episode_id, 0.25).result()
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None and batch.group_ids == (1,)
    (row,) = batch.rows
    assert row.ids.tolist() == [1, 2, 7, 8, 3, 9] and row.versions.tolist() == [-1, -1, 5, 5, -1, 6]
    assert row.logprobs[row.mask == 1].tolist() == [-0.125, -0.25, -0.125]
    assert batch.scores.tolist() == [0.25]


def test_a_repeated_score_changes_nothing_and_another_value_is_refused(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    ledger.put_round(make_round(episode.episode_id))
    assert ledger.notify_score(episode.episode_id, 0.5).result() is True
    assert ledger.notify_score(episode.episode_id, 0.5).result() is False
    with pytest.raises(ScoreConflict, match=r"1-0-0 is 0.5 and stays, got 0.75"):
        ledger.notify_score(episode.episode_id, 0.75).result()
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None and batch.scores.tolist() == [0.5]


def test_concurrent_copies_of_a_score_store_one(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    ledger.put_round(make_round(episode.episode_id))
    futures = [ledger.notify_score(episode.episode_id, 1.0) for _ in range(50)]
    assert sorted(future.result() for future in futures) == [False] * 49 + [True]
    assert ledger.counts()["scored/ready"] == 1


@pytest.mark.parametrize(
    "score", [float("nan"), float("inf"), -float("inf"), 1e9, -1e9, 1e30, 10**400, True, "1", None, [1.0]]
)
def test_a_score_that_is_not_a_finite_number_is_refused(ledger: Ledger, score: Any) -> None:
    (episode,) = open_running(ledger, task=0)
    ledger.put_round(make_round(episode.episode_id))
    with pytest.raises(ScoreError, match="score of episode 1-0-0 must be a finite number"):
        ledger.notify_score(episode.episode_id, score).result()
    assert ledger.counts()["episodes/running"] == 1


@pytest.mark.parametrize("score", [1, -2.5, np.float32(0.5), np.int64(3)])
def test_any_finite_number_is_a_score(ledger: Ledger, score: Any) -> None:
    (episode,) = open_running(ledger, task=0)
    ledger.put_round(make_round(episode.episode_id))
    ledger.notify_score(episode.episode_id, score).result()
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None and batch.rows[0].score == float(score)


def test_unknown_episodes_are_refused(ledger: Ledger) -> None:
    for future in (
        ledger.notify_score("9-9-9", 1.0),
        ledger.put_round(make_round("9-9-9")),
        ledger.start_episode("9-9-9", version=0),
        ledger.fail_episode("9-9-9", "lost", max_attempts=1),
        ledger.rounds("9-9-9"),
    ):
        with pytest.raises(UnknownEpisode, match="9-9-9"):
            future.result()


def test_an_ended_episode_takes_neither_rounds_nor_scores(ledger: Ledger) -> None:
    scored, failed = open_running(ledger, task=0, group_size=2)
    ledger.put_round(make_round(scored.episode_id))
    ledger.notify_score(scored.episode_id, 1.0)
    ledger.fail_episode(failed.episode_id, "lost: agent gone", max_attempts=2)
    for episode_id in (scored.episode_id, failed.episode_id):
        with pytest.raises(EpisodeClosed, match=episode_id):
            ledger.put_round(make_round(episode_id, index=1)).result()
        with pytest.raises(EpisodeClosed):
            ledger.fail_episode(episode_id, "again", max_attempts=2).result()
    with pytest.raises(EpisodeClosed, match=r"it ended as failed \(lost: agent gone\)"):
        ledger.notify_score(failed.episode_id, 1.0).result()
    assert ledger.counts()["rounds"] == 1


def test_an_episode_that_has_not_started_takes_nothing(ledger: Ledger) -> None:
    ledger.put_tasks([make_task(0)])
    ledger.open_group("t:0", instance=0, group_size=1)
    for future in (ledger.put_round(make_round("1-0-0")), ledger.notify_score("1-0-0", 1.0)):
        with pytest.raises(EpisodeError, match="it is pending"):
            future.result()


def test_an_episode_without_a_sampled_token_fails_instead_of_being_scored(ledger: Ledger) -> None:
    first, second = open_running(ledger, task=0, group_size=2)
    ledger.put_round(make_round(first.episode_id, sampled=[]))
    ledger.put_round(make_round(first.episode_id, index=1, finish_reason="abort"))
    with pytest.raises(EpisodeClosed, match="got none"):
        ledger.notify_score(first.episode_id, 1.0, max_attempts=2).result()
    counts = ledger.counts()
    assert counts["failed/no rounds"] == 1 and counts["episodes/scored"] == 0
    (retry,) = ledger.start_pending(limit=2, version=0).result()
    assert retry.episode_id == "1-0-1"
    with pytest.raises(EpisodeClosed):
        ledger.notify_score(second.episode_id, 1.0, max_attempts=1).result()
    assert ledger.counts()["evicted/failed"] == 1


def test_a_score_of_an_earlier_attempt_does_not_complete_the_group(ledger: Ledger) -> None:
    (first,) = open_running(ledger, task=0)
    ledger.put_round(make_round(first.episode_id))
    retry = ledger.fail_episode(first.episode_id, "deadline", max_attempts=2).result()
    assert retry is not None and retry.episode_id == "1-0-1"
    with pytest.raises(EpisodeClosed):
        ledger.notify_score(first.episode_id, 1.0).result()
    assert ledger.counts()["groups/ready"] == 0


def test_the_last_failed_attempt_gives_the_group_up(ledger: Ledger) -> None:
    one, two, three = open_running(ledger, task=0, group_size=3)
    ledger.put_round(make_round(one.episode_id))
    ledger.notify_score(one.episode_id, 1.0).result()
    assert ledger.fail_episode(two.episode_id, "crash: code 1", max_attempts=1).result() is None
    with pytest.raises(EpisodeClosed, match="group given up"):
        ledger.put_round(make_round(three.episode_id)).result()
    counts = ledger.counts()
    assert counts["groups/evicted"] == 1 and counts["evicted/failed"] == 1 and counts["scored/evicted"] == 1
    assert counts["failed/crash"] == 1 and counts["failed/group given up"] == 1


def test_a_group_waits_for_its_straggler_and_does_not_block_later_groups(ledger: Ledger) -> None:
    slow = open_running(ledger, task=0, group_size=2)
    ledger.put_round(make_round(slow[0].episode_id))
    ledger.notify_score(slow[0].episode_id, 1.0).result()
    later = make_ready(ledger, task=1, group_size=2)
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None and batch.group_ids == (later,)
    assert ledger.claim(1, min_version=0).result() is None
    ledger.put_round(make_round(slow[1].episode_id))
    ledger.notify_score(slow[1].episode_id, 0.0).result()
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None and batch.group_ids == (slow[0].group_id,) and batch.scores.tolist() == [1.0, 0.0]


def test_a_refused_operation_does_not_touch_its_neighbours(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    futures = [
        ledger.put_round(make_round(episode.episode_id, index=index, parent=parent))
        for index, parent in ((0, None), (0, None), (5, 4), (2**70, None), (1, 0))
    ]
    assert [type(future.exception()) for future in futures] == [
        type(None),
        EpisodeError,
        EpisodeError,
        OverflowError,
        type(None),
    ]
    assert [round_.round_index for round_ in ledger.rounds(episode.episode_id).result()] == [0, 1]


def test_an_aborted_round_cannot_be_a_parent(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    ledger.put_round(make_round(episode.episode_id, finish_reason="abort"))
    with pytest.raises(EpisodeError, match="an aborted round"):
        ledger.put_round(make_round(episode.episode_id, index=1, parent=0)).result()


def test_numbers_that_cannot_be_trained_are_refused(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    bad = make_round(episode.episode_id)
    bad.logprobs[1] = np.nan
    with pytest.raises(EpisodeError, match="logprobs must be finite"):
        ledger.put_round(bad)
    unstamped = np.array([0, -1, 2], dtype=np.int32)
    with pytest.raises(EpisodeError, match="versions must be >= 0, got -1"):
        ledger.put_round(replace(make_round(episode.episode_id), versions=unstamped))
    with pytest.raises(EpisodeError, match="a flag for each of 3 sampled tokens, got 2"):
        ledger.put_round(replace(make_round(episode.episode_id), trained=np.ones(2, dtype=np.uint8)))


def test_a_round_is_read_with_its_memo(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    ledger.put_round(replace(make_round(episode.episode_id), memo=b"kept")).result()
    ledger.put_round(make_round(episode.episode_id, index=1, parent=0)).result()
    assert [each.memo for each in ledger.rounds(episode.episode_id).result()] == [b"kept", b""]


def test_a_round_that_is_damaged_is_named(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        (episode,) = open_running(ledger, task=0)
        ledger.put_round(make_round(episode.episode_id)).result()
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db, db:
        db.execute("UPDATE round SET body = x'00'")
    with (
        Ledger(tmp_path / "ledger.db") as ledger,
        pytest.raises(UnderstudyError, match=f"round 0 of episode {episode.episode_id}: "),
    ):
        ledger.rounds(episode.episode_id).result()


def test_watchers_hear_of_ended_episodes_and_ready_groups_but_not_of_rounds(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    heard: list[LedgerEvent] = []
    unwatch = ledger.watch(heard.append)
    ledger.put_round(make_round(episode.episode_id)).result()
    ledger.notify_score(episode.episode_id, 1.0).result()
    assert ledger.claim(2, min_version=0).result() is None  # waits for the news of the score; is none itself
    unwatch()
    ledger.claim(1, min_version=0).result()
    ledger.rounds(episode.episode_id).result()
    assert [[(c.episode_id, c.state, c.reason) for c in news.closed] for news in heard] == [[("1-0-0", "scored", None)]]
    assert heard[0].counts["groups/ready"] == 1


def test_rounds_from_many_threads_are_all_stored(ledger: Ledger) -> None:
    episodes = open_running(ledger, task=0, group_size=8)

    def play(episode_id: str) -> None:
        for index in range(20):
            ledger.put_round(make_round(episode_id, index=index, parent=index - 1 if index else None)).result()

    threads = [threading.Thread(target=play, args=(episode.episode_id,)) for episode in episodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.counts()["rounds"] == 160 and ledger.counts()["tokens"] == 480
    assert len(ledger.rounds(episodes[7].episode_id).result()) == 20


def test_a_closed_ledger_stores_what_it_took_and_refuses_the_rest(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    future = ledger.put_tasks([make_task(0)])
    ledger.close()
    ledger.close()
    assert future.result() == 1
    with pytest.raises(UnderstudyError, match=r"ledger\.db must be open"):
        ledger.put_tasks([make_task(1)])


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["score", "score", "score", "fail", "abort", "claim", "commit", "release", "evict", "open"]),
        st.integers(0, 5),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(events=EVENTS, group_size=st.integers(1, 3))
def test_batches_hold_complete_groups_and_the_books_balance_in_any_order(
    events: list[tuple[str, int]], group_size: int
) -> None:
    trained: list[int] = []
    with Ledger(None) as ledger:
        running: list[str] = []
        leases: list[Any] = []
        version = num_tasks = 0
        for kind, number in events:
            if kind == "open":
                ledger.put_tasks([make_task(num_tasks)])
                ledger.open_group(f"t:{num_tasks}", instance=0, group_size=group_size).result()
                num_tasks += 1
                running += [e.episode_id for e in ledger.start_pending(limit=10, version=version).result()]
            elif kind in ("score", "fail", "abort") and running:
                episode_id = running.pop(number % len(running))
                if kind != "abort":
                    ledger.put_round(make_round(episode_id, version=version))
                if kind == "fail":
                    future: Any = ledger.fail_episode(episode_id, "lost", max_attempts=2)
                else:
                    future = ledger.notify_score(episode_id, float(number), max_attempts=2)
                assert future.exception() is None or isinstance(future.exception(), EpisodeClosed)
                running += [e.episode_id for e in ledger.start_pending(limit=10, version=version).result()]
            elif kind == "claim" and (batch := ledger.claim(1 + number % 2, min_version=version - 1).result()):
                leases.append(batch)
                for group_id in batch.group_ids:
                    rows = [row for row in batch.rows if row.group_id == group_id]
                    assert sorted(int(row.episode_id.split("-")[1]) for row in rows) == list(range(group_size))
                    assert max(row.versions[row.mask == 1].max() for row in rows) >= version - 1
            elif kind == "commit" and leases:
                batch = leases.pop()
                version += 1
                ledger.commit_step(batch.lease_id, step=version, version=version).result()
                trained += batch.group_ids
            elif kind == "release" and leases:
                ledger.release(leases.pop().lease_id).result()
            elif kind == "evict":
                ledger.evict_stale(version).result()
            assert scored_by_group_state(ledger) == ledger.counts()["episodes/scored"]
        assert len(trained) == len(set(trained))
        counts = ledger.counts()
        assert counts["groups/trained"] == len(trained) and counts["scored/trained"] == len(trained) * group_size
        assert counts["episodes/pending"] == 0
