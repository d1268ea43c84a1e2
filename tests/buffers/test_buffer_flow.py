"""Pool, ledger and learner's sampling together: agents that fail at random, weights that move on."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from buffers.errors import EpisodeClosed
from buffers.ledger.ledger import Ledger
from buffers.multi_round import MultiRoundBufferDataset
from buffers.tasks.task_pool import PoolClosed, TaskPool
from tests.support.buffer_parts import make_round, make_task, scored_by_group_state
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.seconds

GROUPS_PER_STEP, GROUP_SIZE, STEPS = 4, 4, 15


@pytest.mark.parametrize("lag", [0, 1, 3])
async def test_staleness_is_bounded_and_the_books_balance_whatever_agents_do(tmp_path: Path, lag: int) -> None:
    rng = random.Random(lag)
    version = 0
    seen_lags: set[int] = set()
    with Ledger(tmp_path / "ledger.db") as ledger:
        pool = TaskPool(
            ledger,
            group_size=GROUP_SIZE,
            groups_per_step=GROUPS_PER_STEP,
            max_policy_lag=lag,
            max_running=32,
            deadline_s=0.2,
            max_attempts=2,
        )
        dataset = MultiRoundBufferDataset(ledger)

        async def agent() -> None:
            while True:
                try:
                    episode = await pool.lease(wait_s=5.0)
                except PoolClosed:
                    return
                if episode is None:
                    continue
                try:
                    for index in range(rng.randint(1, 3)):
                        round_ = make_round(
                            episode.episode_id, index=index, parent=index - 1 if index else None, version=version
                        )
                        await asyncio.wrap_future(ledger.put_round(round_))
                    fate = rng.random()
                    if fate < 0.05:
                        await pool.fail(episode.episode_id, "crash")
                    elif fate < 0.98:  # the rest is forgotten: the deadline ends it
                        await asyncio.wrap_future(ledger.notify_score(episode.episode_id, rng.random(), max_attempts=2))
                except EpisodeClosed:
                    continue  # too old, or its group was given up

        async with asyncio.TaskGroup() as group:
            group.create_task(pool.run())
            pool.add_source(make_task(number) for number in range(10_000))
            for _ in range(40):
                group.create_task(agent())
            for step in range(1, STEPS + 1):
                batch = await asyncio.wait_for(dataset.sample(GROUPS_PER_STEP, min_version=version - lag), PATIENCE_S)
                assert len(batch.group_ids) == GROUPS_PER_STEP
                assert len({row.episode_id for row in batch.rows}) == GROUPS_PER_STEP * GROUP_SIZE
                groups = [[row for row in batch.rows if row.group_id == group_id] for group_id in batch.group_ids]
                seen_lags |= {version - max(int(row.versions.max()) for row in rows) for rows in groups}
                version += 1
                await asyncio.wrap_future(ledger.commit_step(batch.lease_id, step=step, version=version))
                await pool.set_version(version)
            pool.close()
        counts, metrics = ledger.counts(), pool.metrics()
        assert scored_by_group_state(ledger) == counts["episodes/scored"]
        assert counts["scored/trained"] == STEPS * GROUPS_PER_STEP * GROUP_SIZE
        assert metrics["pool/running"] == 0
        assert metrics["pool/started"] == sum(metrics[f"pool/{how}"] for how in ("scored", "failed", "closed"))
        assert max(seen_lags) <= lag
        assert counts["failed/crash"] > 0
