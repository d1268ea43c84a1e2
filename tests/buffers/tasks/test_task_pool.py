"""The pool starts the right episodes at the right time, and releases every slot once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from buffers.errors import EpisodeClosed, TaskError
from buffers.ledger.ledger import Ledger
from buffers.records import Replay, ScoreDetail, Task
from buffers.tasks.parquet import write_tasks
from buffers.tasks.task_pool import PoolClosed
from tests.support.buffer_parts import make_round, make_task
from tests.support.patience import PATIENCE_S
from tests.support.pool_parts import running_pool

SHORT_S = 0.05
"""For waits that must end with nothing."""


async def test_the_members_of_a_group_are_served_before_the_next_task() -> None:
    async with running_pool(group_size=2) as setup:
        await setup.pool.put([make_task(0), make_task(1)])
        leased = [await setup.lease() for _ in range(4)]
        assert [episode.episode_id for episode in leased] == ["1-0-0", "1-1-0", "2-0-0", "2-1-0"]
        assert [episode.task.task_id for episode in leased] == ["t:0", "t:0", "t:1", "t:1"]


async def test_nothing_to_do_is_none_after_the_wait() -> None:
    async with running_pool() as setup:
        assert await setup.pool.lease(wait_s=SHORT_S) is None
        assert setup.pool.metrics()["pool/agents_waiting"] == 0


async def test_a_pool_that_is_held_gives_out_nothing_before_it_begins() -> None:
    async with running_pool(paused=True, times_opened={"t:0": 3}) as setup:
        await setup.pool.put([make_task(0)])
        assert await setup.pool.lease(wait_s=SHORT_S) is None
        waiting = asyncio.create_task(setup.lease())
        await asyncio.sleep(0)
        setup.pool.unpause()
        assert (await waiting).task.task_id == "t:0"
        assert setup.ledger.times_opened().result() == {"t:0": 4}  # three were opened by an earlier process


async def test_a_waiting_lease_is_woken_by_a_new_task() -> None:
    async with running_pool() as setup:
        waiting = asyncio.create_task(setup.lease())
        await asyncio.sleep(0)
        await setup.pool.put([make_task(0)])
        assert (await waiting).episode_id == "1-0-0"


async def test_many_waiting_leases_get_one_episode_each() -> None:
    async with running_pool(group_size=4, max_running=16) as setup:
        waiting = [asyncio.create_task(setup.lease()) for _ in range(16)]
        await setup.pool.put([make_task(number) for number in range(4)])
        episodes = await asyncio.gather(*waiting)
        assert len({episode.episode_id for episode in episodes}) == 16
        assert setup.ledger.counts()["groups/open"] == 4


async def test_an_endless_source_is_read_only_as_far_as_needed() -> None:
    read: list[str] = []

    def endless() -> Iterator[Task]:
        while True:
            for number in range(2):
                read.append(f"t:{number}")
                yield make_task(number)

    async with running_pool() as setup:
        setup.pool.add_source(endless())
        episodes = [await setup.lease() for _ in range(5)]
        assert [episode.task.task_id for episode in episodes] == ["t:0", "t:1", "t:0", "t:1", "t:0"]
        assert len({episode.group_id for episode in episodes}) == 5  # each pass is a new instance of the task
        assert len(read) == 5


async def test_a_broken_source_ends_the_pool_loudly() -> None:
    def broken() -> Iterator[Task]:
        raise TaskError("tasks.parquet, row 3: bad")
        yield

    async with running_pool() as setup:
        setup.pool.add_source(broken())
        with pytest.raises(PoolClosed):
            await setup.lease()
        with pytest.raises(TaskError, match="row 3"):
            await setup.runner


async def test_at_most_max_running_episodes_run() -> None:
    async with running_pool(max_running=2) as setup:
        await setup.pool.put([make_task(number) for number in range(3)])
        first, _ = await setup.lease(), await setup.lease()
        assert await setup.pool.lease(wait_s=SHORT_S) is None
        await setup.play(first)
        assert (await setup.lease()).episode_id == "3-0-0"


async def test_the_number_of_slots_changes_while_the_pool_runs() -> None:
    async with running_pool(max_running=1) as setup:
        await setup.pool.put([make_task(number) for number in range(6)])
        first = await setup.lease()
        waiting = asyncio.create_task(setup.lease())
        assert await setup.pool.lease(wait_s=SHORT_S) is None
        setup.pool.max_running = 3  # the one who waits is woken
        second, third = await waiting, await setup.lease()
        assert setup.pool.metrics()["pool/slots"] == 3 and setup.pool.metrics()["pool/running"] == 3
        setup.pool.max_running = 1  # all three are played to their ends
        for episode in (first, second):
            await setup.play(episode)
            assert await setup.pool.lease(wait_s=SHORT_S) is None
        await setup.play(third)
        assert (await setup.lease()).episode_id == "4-0-0"
        assert await setup.pool.lease(wait_s=SHORT_S) is None
        assert [reason for _, reason in setup.closed] == ["scored"] * 3


@pytest.mark.parametrize("number", [0, -1])
async def test_a_pool_has_a_slot_at_least(number: int) -> None:
    async with running_pool() as setup:
        with pytest.raises(ValueError, match=f"max_running must be >= 1, got {number}"):
            setup.pool.max_running = number


async def test_no_group_opens_beyond_the_staleness_capacity() -> None:
    async with running_pool(groups_per_step=2, max_policy_lag=1, max_running=100) as setup:
        await setup.pool.put([make_task(number) for number in range(10)])
        first = [await setup.lease() for _ in range(4)]  # (0 + 1 + 1) * 2
        assert await setup.pool.lease(wait_s=SHORT_S) is None
        for episode in first:
            await setup.play(episode)
        assert await setup.pool.lease(wait_s=SHORT_S) is None  # scored is not trained
        batch = await asyncio.wrap_future(setup.ledger.claim(2, min_version=0))
        assert batch is not None
        await asyncio.wrap_future(setup.ledger.commit_step(batch.lease_id, step=1, version=1))
        assert await setup.pool.lease(wait_s=SHORT_S) is None  # trained is not published
        waiting = asyncio.create_task(setup.lease())
        await asyncio.sleep(0)
        await setup.pool.set_version(1)
        assert (await waiting).episode_id == "5-0-0"
        assert (await setup.lease()).episode_id == "6-0-0"
        assert await setup.pool.lease(wait_s=SHORT_S) is None


async def test_places_of_stored_groups_are_no_room_for_new_ones() -> None:
    async with running_pool(groups_per_step=2, max_policy_lag=0, max_running=100) as setup:
        await setup.pool.put([make_task(number) for number in range(10)])
        replay = Replay(num_groups=1, min_version=0, only="all", times=9)
        for step, opens in ((1, 2), (2, 1), (3, 1), (4, 2)):
            assert setup.pool.admissible() == opens
            for _ in range(opens):
                await setup.play(await setup.lease())
            assert await setup.pool.lease(wait_s=SHORT_S) is None
            own = replay if opens == 1 else None
            batch = await asyncio.wrap_future(setup.ledger.claim(2, min_version=0, replay=own))
            assert batch is not None and batch.num_stored == 2 - opens
            await asyncio.wrap_future(setup.ledger.commit_step(batch.lease_id, step=step, version=step))
            assert setup.pool.admissible() == 0
            await setup.pool.set_version(step, num_stored=1 if step < 3 else 0)


async def test_a_lag_of_zero_is_a_barrier_between_steps() -> None:
    async with running_pool(groups_per_step=1, max_policy_lag=0) as setup:
        await setup.pool.put([make_task(0), make_task(1)])
        await setup.play(await setup.lease())
        assert setup.pool.admissible() == 0
        batch = await asyncio.wrap_future(setup.ledger.claim(1, min_version=0))
        assert batch is not None
        await asyncio.wrap_future(setup.ledger.commit_step(batch.lease_id, step=1, version=1))
        assert await setup.pool.lease(wait_s=SHORT_S) is None
        await setup.pool.set_version(1)
        assert (await setup.lease()).episode_id == "2-0-0"


async def test_an_evicted_group_makes_room_for_another() -> None:
    async with running_pool(group_size=2, groups_per_step=1, max_policy_lag=0, max_attempts=1) as setup:
        await setup.pool.put([make_task(0), make_task(1)])
        first, second = await setup.lease(), await setup.lease()
        assert setup.pool.admissible() == 0
        await setup.pool.fail(first.episode_id, "crash: code 1")
        assert (await setup.lease()).episode_id == "2-0-0"
        assert setup.closed == [(first.episode_id, "failed"), (second.episode_id, "failed")]
        with pytest.raises(EpisodeClosed, match="group given up"):
            await setup.score(second, 1.0)


async def test_a_new_version_evicts_groups_that_waited_too_long() -> None:
    async with running_pool(group_size=2, groups_per_step=4, max_policy_lag=1) as setup:
        await setup.pool.put([make_task(0), make_task(1)])
        old, mate, young = await setup.lease(), await setup.lease(), await setup.lease()
        await setup.play(old, version=0)
        await setup.play(mate, version=0)
        setup.ledger.put_round(make_round(young.episode_id, version=0))
        await setup.pool.set_version(1)
        assert setup.ledger.counts().get("evicted/stale", 0) == 0
        await setup.pool.set_version(2)
        assert setup.ledger.counts()["evicted/stale"] == 1
        assert await setup.score(young, 1.0) is True


async def test_an_episode_past_its_deadline_fails_and_is_tried_again_first() -> None:
    async with running_pool(deadline_s=10.0) as setup:
        await setup.pool.put([make_task(0), make_task(1)])
        first = await setup.lease()
        setup.clock.advance(9.9)
        assert setup.closed == []
        setup.clock.advance(0.2)
        assert await setup.closings.get() == (first.episode_id, "failed")
        assert setup.ledger.counts()["failed/deadline"] == 1
        retry = await setup.lease()
        assert (retry.episode_id, retry.attempt, retry.task) == ("1-0-1", 1, make_task(0))
        with pytest.raises(EpisodeClosed, match="deadline"):
            await setup.score(first, 1.0)
        await setup.play(retry)
        setup.clock.advance(100.0)
        assert setup.closed == [("1-0-0", "failed"), ("1-0-1", "scored")]


async def test_an_episode_past_its_deadline_has_the_scores_that_came_until_then() -> None:
    async with running_pool(deadline_s=10.0) as setup:
        await setup.pool.put([make_task(0)])
        episode = await setup.lease()
        setup.ledger.put_round(make_round(episode.episode_id))
        setup.ledger.notify_score(episode.episode_id, 0.5, detail=ScoreDetail(judge="style", final=False)).result()
        setup.clock.advance(10.1)
        assert await setup.closings.get() == (episode.episode_id, "scored")
        batch = setup.ledger.claim(1, min_version=0).result()
        assert batch is not None and [(row.score, row.judges) for row in batch.rows] == [(0.5, {"style": 0.5})]


async def test_a_straggler_does_not_hold_up_other_groups() -> None:
    async with running_pool(group_size=2) as setup:
        await setup.pool.put([make_task(number) for number in range(3)])
        straggler, mate = await setup.lease(), await setup.lease()
        await setup.play(mate)
        for _ in range(4):
            await setup.play(await setup.lease())
        batch = await asyncio.wrap_future(setup.ledger.claim(2, min_version=0))
        assert batch is not None and batch.group_ids == (2, 3)
        await setup.play(straggler)
        assert setup.ledger.counts()["groups/ready"] == 1


async def test_a_score_that_comes_around_the_pool_releases_the_slot() -> None:
    async with running_pool(max_running=1) as setup:
        await setup.pool.put([make_task(0), make_task(1)])
        episode = await setup.lease()
        setup.ledger.put_round(make_round(episode.episode_id))
        await asyncio.wrap_future(setup.ledger.notify_score(episode.episode_id, 1.0))
        assert await setup.closings.get() == (episode.episode_id, "scored")
        assert (await setup.lease()).episode_id == "2-0-0"


async def test_an_episode_that_sampled_nothing_is_tried_again() -> None:
    async with running_pool() as setup:
        await setup.pool.put([make_task(0)])
        episode = await setup.lease()
        with pytest.raises(EpisodeClosed, match="got none"):
            await setup.score(episode, 1.0)
        assert (await setup.lease()).episode_id == "1-0-1"
        assert setup.closed == [("1-0-0", "failed")]


async def test_an_agent_that_leaves_while_it_waits_loses_no_episode() -> None:
    async with running_pool(max_running=1) as setup:
        waiting = [asyncio.create_task(setup.pool.lease(wait_s=PATIENCE_S)) for _ in range(3)]
        await asyncio.sleep(0)
        await setup.pool.put([make_task(0)])
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (await setup.lease()).episode_id == "1-0-0"


async def test_an_episode_given_to_an_agent_that_just_left_goes_to_the_next() -> None:
    async with running_pool() as setup:
        pool: Any = setup.pool
        await setup.pool.put([make_task(0)])
        waiting = asyncio.create_task(setup.pool.lease(wait_s=PATIENCE_S))
        await asyncio.sleep(0)
        (waiter,) = pool._waiting
        waiter.add_done_callback(lambda _: waiting.cancel())  # in the same turn of the loop
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await setup.lease()).episode_id == "1-0-0"


async def test_closing_wakes_those_who_wait() -> None:
    async with running_pool() as setup:
        waiting = asyncio.create_task(setup.pool.lease(wait_s=PATIENCE_S))
        await asyncio.sleep(0)
        setup.pool.close()
        with pytest.raises(PoolClosed, match="no more tasks"):
            await waiting
        with pytest.raises(PoolClosed):
            await setup.pool.lease(wait_s=PATIENCE_S)


async def test_a_sealed_pool_closes_once_its_last_episode_is_done() -> None:
    async with running_pool() as setup:
        await setup.pool.put([make_task(0)])
        setup.pool.seal()
        first = await setup.lease()
        waiting = asyncio.create_task(setup.lease())
        await asyncio.sleep(0)
        await setup.pool.fail(first.episode_id, "lost")
        retry = await waiting  # a retry may still come: the pool was not done
        assert retry.episode_id == "1-0-1"
        last = asyncio.create_task(setup.pool.lease(wait_s=PATIENCE_S))
        await setup.play(retry)
        with pytest.raises(PoolClosed):
            await last
        await setup.runner


async def test_tasks_may_be_queued_from_another_thread(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    write_tasks(path, [make_task(number) for number in range(3)])
    async with running_pool() as setup:
        waiting = [asyncio.create_task(setup.lease()) for _ in range(3)]
        await asyncio.sleep(0)
        thread = threading.Thread(target=setup.pool.enqueue_task, args=(str(path),))  # as in RFC #1172
        thread.start()
        assert [(await task).task.ground_truth for task in waiting] == [0, 1, 2]
        thread.join()


async def test_a_file_with_a_bad_row_is_queued_by_no_row(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    rows = [{"prompt": "x", "task_id": str(number)} for number in range(2000)]
    pq.write_table(pa.Table.from_pylist([*rows, {"prompt": "", "task_id": "bad"}]), path)
    async with running_pool() as setup:
        with pytest.raises(TaskError, match="row 2000: column 'prompt'"):
            await asyncio.to_thread(setup.pool.enqueue_task, path)
        assert await setup.pool.lease(wait_s=SHORT_S) is None


async def test_reasons_are_one_line_and_of_few_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffers.tasks.task_pool.MAX_KINDS", 2)
    async with running_pool(max_attempts=10) as setup:
        await setup.pool.put([make_task(0)])
        for reason in ("a\ud800\x1b[2J\n: b", "second: 1", "third: 1", "fourth: 1", "second: 2", "x" * 9999):
            await setup.pool.fail((await setup.lease()).episode_id, reason)
        kinds = {name: number for name, number in setup.ledger.counts().items() if name.startswith("failed/")}
        assert kinds == {"failed/a  [2J ": 1, "failed/second": 2, "failed/other": 3}


async def test_a_reason_is_cut_at_no_colon_of_an_address() -> None:
    async with running_pool(max_attempts=10) as setup:
        await setup.pool.put([make_task(0)])
        told = (
            "see https://huggingface.co/docs",
            "C:\\models is no folder: look",
            "scorer: see https://a.b",
            "deadline",
        )
        for reason in told:
            await setup.pool.fail((await setup.lease()).episode_id, reason)
        kinds = {name for name in setup.ledger.counts() if name.startswith("failed/")}
        assert kinds == {"failed/error", "failed/scorer", "failed/deadline"}
        details = await asyncio.wrap_future(setup.ledger.failure_details())
        assert details["error"] in (f"error: {told[0]}", f"error: {told[1]}") and details["scorer"] == told[2]


async def test_a_renewed_deadline_begins_anew_and_an_ended_episode_has_none() -> None:
    async with running_pool(deadline_s=10.0, max_attempts=1) as setup:
        await setup.pool.put([make_task(0)])
        episode = await setup.lease()
        setup.clock.advance(9.0)
        assert setup.pool.renew(episode.episode_id)
        setup.clock.advance(9.0)
        assert setup.closed == []
        setup.clock.advance(2.0)
        assert await setup.closings.get() == (episode.episode_id, "failed")
        assert not setup.pool.renew(episode.episode_id)


async def test_a_restarted_pool_serves_interrupted_episodes_and_skips_finished_tasks(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"groups_per_step": 1, "max_policy_lag": 1}
    tasks = [make_task(number) for number in range(3)]
    async with running_pool(Ledger(tmp_path / "ledger.db"), **settings) as setup:
        await setup.pool.put(tasks)
        await setup.play(await setup.lease())
        await setup.lease()
        batch = await asyncio.wrap_future(setup.ledger.claim(1, min_version=0))
        assert batch is not None
        await asyncio.wrap_future(setup.ledger.commit_step(batch.lease_id, step=1, version=1))
    async with running_pool(Ledger(tmp_path / "ledger.db"), **settings) as setup:  # the weights start anew: version 0
        await setup.pool.put(tasks)
        assert (await setup.lease()).episode_id == "2-0-1"
        fresh = await setup.lease()
        assert fresh.task == make_task(2) and fresh.sample_index == 0
        assert await setup.pool.lease(wait_s=SHORT_S) is None


async def test_a_run_that_is_resumed_counts_on(tmp_path: Path) -> None:
    """What ran when the process before ended has failed, and is tried again."""
    for time in range(3):
        async with running_pool(Ledger(tmp_path / "ledger.db"), group_size=1, groups_per_step=8) as setup:
            await setup.pool.put([make_task(4 * time + number) for number in range(3)])
            await setup.play(await setup.lease())
            failed = await setup.lease()
            await setup.pool.fail(failed.episode_id, "lost")
            metrics, counts = setup.pool.metrics(), setup.ledger.counts()
            assert metrics["pool/scored"] == counts["episodes/scored"] == time + 1
            assert metrics["pool/failed"] == counts["episodes/failed"] > time
            ended = metrics["pool/scored"] + metrics["pool/failed"]
            assert metrics["pool/started"] == ended + metrics["pool/running"]


async def test_metrics_count_slots_by_what_became_of_them() -> None:
    async with running_pool(groups_per_step=4, max_policy_lag=0) as setup:
        await setup.pool.put([make_task(number) for number in range(3)])
        first, second, _ = await setup.lease(), await setup.lease(), await setup.lease()
        await setup.play(first)
        await setup.pool.fail(second.episode_id, "lost")
        assert setup.pool.metrics() == {
            "pool/started": 3,
            "pool/slots": 8,
            "pool/running": 1,
            "pool/agents_waiting": 0,
            "pool/scored": 1,
            "pool/failed": 1,
            "pool/closed": 0,
            "pool/admissible_groups": 1,
            "ledger/scored": 1,
            "ledger/open": 0,
            "ledger/ready": 1,
            "ledger/leased": 0,
            "ledger/trained": 0,
            "ledger/evicted": 0,
            "ledger/dead": 0,
            "ledger/validation": 0,
            "ledger/difference": 0,
        }


async def test_a_nearly_full_disk_stops_new_episodes_and_they_start_again_by_themselves() -> None:
    room = [False]
    async with running_pool(has_room=lambda: room[0]) as setup:
        await setup.pool.put([make_task(0)])
        assert await setup.pool.lease(wait_s=0.05) is None
        assert setup.ledger.counts()["groups/open"] == 0
        waiting = asyncio.create_task(setup.pool.lease(wait_s=60.0))
        await asyncio.sleep(0)
        room[0] = True
        setup.clock.advance(1.0)
        assert (await waiting) is not None


async def test_members_without_an_attempt_left_shrink_their_group_to_its_least_size() -> None:
    async with running_pool(group_size=3, min_group_size=2, max_attempts=1) as setup:
        await setup.pool.put([make_task(0)])
        first, second, third = [await setup.lease() for _ in range(3)]
        await setup.pool.fail(first.episode_id, "lost")
        await setup.play(second)
        await setup.play(third)
        batch = setup.ledger.claim(1, min_version=0).result()
        assert batch is not None and len(batch.rows) == 2 and setup.pool.metrics()["pool/running"] == 0


async def test_a_pool_takes_over_what_an_earlier_process_started(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        async with running_pool(ledger=ledger) as setup:
            await setup.pool.put([make_task(0)])
            episode = await setup.lease()
    with Ledger(path, resume_episodes=True) as ledger:
        async with running_pool(ledger=ledger, max_running=1) as setup:
            setup.pool.adopt_running(ledger.running_episodes().result())
            assert setup.pool.metrics()["pool/running"] == 1
            await setup.play(episode)
            assert setup.pool.metrics()["pool/running"] == 0
            assert ledger.counts()["groups/ready"] == 1


async def test_an_episode_that_starts_while_the_pool_closes_is_released_as_closed() -> None:
    async with running_pool() as setup:
        await setup.pool.put([make_task(0)])
        setup.ledger.open_group("t:0", instance=0, group_size=1).result()
        setup.pool.close()
        await asyncio.wait([setup.runner])
        started = setup.ledger.start_pending(limit=1, version=0)
        assert len(started.result()) == 1
        setup.pool._on_started(started)  # it was asked for before, and answered after
        assert setup.pool.metrics()["pool/running"] == 0
        assert setup.closed == [("1-0-0", "closed")]
