"""Rules of learner/validation.py and buffers/ledger/validation.py: validation tasks are scored, and never trained."""

from __future__ import annotations

import asyncio

from buffers.ledger.ledger import Ledger
from buffers.records import Episode, Validated
from learner.validation import Validation, validation_figures
from tests.support.buffer_parts import make_ready, make_round, make_task, scored_by_group_state


def play(ledger: Ledger, episode: Episode, *, score: float) -> None:
    ledger.put_round(make_round(episode.episode_id))
    assert ledger.notify_score(episode.episode_id, score).result() is True


def test_validation_episodes_are_never_in_a_batch_and_take_no_room() -> None:
    ledger = Ledger(None)
    group_ids = ledger.open_validation([make_task(1), make_task(2)], group_size=2, greedy=False).result()
    episodes = ledger.start_pending(limit=9, version=3).result()
    assert len(episodes) == 4 and not any(episode.greedy for episode in episodes)
    for episode, score in zip(episodes, (0.0, 1.0, 0.5, 0.25), strict=True):
        play(ledger, episode, score=score)
    assert ledger.claim(1, min_version=0).result() is None
    trained = make_ready(ledger, task=3)
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None and batch.group_ids == (trained,)
    counts = ledger.counts()
    assert counts["groups/validated"] == 2 and counts["groups/open"] == counts["groups/ready"] == 0
    assert scored_by_group_state(ledger) == counts["episodes/scored"] == 5
    assert [one.scores for one in ledger.validated(group_ids).result()] == [(0.0, 1.0), (0.5, 0.25)]
    assert ledger.evict_stale(100).result() == 0
    ledger.close()


def test_a_task_is_validated_again_and_again_greedily() -> None:
    ledger = Ledger(None)
    for _ in range(2):
        ledger.open_validation([make_task(1)], group_size=1, greedy=True).result()
        (episode,) = ledger.start_pending(limit=9, version=0).result()
        assert episode.greedy and episode.task.task_id == "t:1"
        play(ledger, episode, score=1.0)
    assert ledger.counts()["groups/validated"] == 2
    ledger.close()


async def test_figures_come_once_and_a_validation_that_is_due_meanwhile_is_counted() -> None:
    ledger = Ledger(None)
    validation = Validation(ledger, tasks=lambda: [make_task(1), make_task(2)], every=2, samples=1)
    validation.begin(1)
    assert validation.take() == {} and ledger.counts()["groups/validating"] == 0  # not due
    validation.begin(2)
    while ledger.counts()["groups/validating"] < 2:
        await asyncio.sleep(0)
    validation.begin(4)
    good, bad = ledger.start_pending(limit=9, version=2).result()
    assert good.greedy and good.task.task_id == "val/t:1"
    play(ledger, good, score=0.5)
    assert validation.take() == {}
    ledger.fail_episode(bad.episode_id, "crash", max_attempts=1).result()
    figures = await validation.finish()
    assert figures.pop("val/seconds") >= 0.0
    assert figures == {
        "val/step": 2,
        "val/mean": 0.5,
        "val/best": 0.5,
        "val/tasks": 1,
        "val/failed": 1,
        "val/skipped": 1,
    }
    assert validation.take() == {} and validation.means == {2: 0.5}
    ledger.close()


async def test_one_that_is_cancelled_while_it_is_awaited_gives_nothing() -> None:
    ledger = Ledger(None)
    validation = Validation(ledger, tasks=lambda: [make_task(1)], every=1, samples=1)
    validation.begin(1)
    waiting = asyncio.create_task(validation.finish())
    while ledger.counts()["groups/validating"] < 1:
        await asyncio.sleep(0)
    validation.cancel()
    assert await waiting == {}
    ledger.close()


def test_figures_are_means_over_tasks_and_by_source() -> None:
    found = [
        Validated(task_id="1", data_source="a", scores=(0.0, 1.0)),
        Validated(task_id="2", data_source="b", scores=(0.0, 0.0)),
    ]
    assert validation_figures(found, num_tasks=3) == {
        "val/tasks": 2, "val/failed": 1, "val/mean": 0.25, "val/best": 0.5, "val/mean/a": 0.5, "val/mean/b": 0.0,
    }  # fmt: skip
    assert validation_figures([], num_tasks=1) == {"val/tasks": 0, "val/failed": 1}


def test_a_restore_gives_up_a_validation_under_way() -> None:
    ledger = Ledger(None)
    here = ledger.position().result()
    ledger.open_validation([make_task(1)], group_size=1, greedy=True).result()
    ledger.restore(here).result()
    assert ledger.counts()["groups/validating"] == 0 and ledger.counts()["evicted/restart"] == 1
    assert ledger.start_pending(limit=9, version=0).result() == []
    ledger.close()
