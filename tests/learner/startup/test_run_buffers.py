"""Rules of learner/startup/run_buffers.py: the keys of the configuration reach the task pool of a run."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from buffers.records import Episode
from configs.load import load_config
from learner.startup import run_buffers
from learner.startup.run_buffers import most_running, open_run_buffers
from tests.support.buffer_parts import make_round, make_task

KEYS = ("agents.max_attempts=1", "buffer.group_size=3", "buffer.groups_per_step=1", "buffer.max_policy_lag=0")


def no_secret(*, host: str) -> bytes:
    raise AssertionError(f"a ledger in the run's own process has no endpoint, asked for {host}")


@pytest.mark.parametrize(("key", "rows"), [("agents.fewest_members=2", 2), ("agents.fewest_members=", None)])
async def test_a_group_goes_on_without_a_member_where_fewest_members_allows_it(
    tmp_path: Path, key: str, rows: int | None
) -> None:
    async with AsyncExitStack() as stack:
        config = load_config(overrides=[*KEYS, key])
        buffers = await open_run_buffers(
            config, stack, folder=tmp_path, secret=no_secret, resume=False, checkpoint=None
        )  # fmt: skip
        running = asyncio.create_task(buffers.pool.run())
        buffers.pool.unpause()
        await buffers.pool.put([make_task(0)])
        episodes: list[Episode] = []
        while len(episodes) < 3:
            episode = await buffers.pool.lease(wait_s=60.0)
            assert episode is not None
            episodes.append(episode)
        await buffers.pool.fail(episodes[0].episode_id, "lost")
        for episode in episodes[1:] if rows else []:
            buffers.ledger.put_round(make_round(episode.episode_id, version=0))
            buffers.ledger.notify_score(episode.episode_id, 1.0).result()
        batch = buffers.ledger.claim(1, min_version=0).result()
        assert (len(batch.rows) if batch else None) == rows
        assert buffers.ledger.counts()["groups/evicted"] == (0 if rows else 1)
        buffers.pool.close()
        await running


AUTO = ("agents.concurrency=auto", "buffer.group_size=3", "buffer.groups_per_step=5", "buffer.max_policy_lag=1")


@pytest.mark.parametrize(
    ("keys", "evaluates", "most"),
    [
        (("agents.concurrency=7",), False, 7),
        (("agents.concurrency=7",), True, 7),
        (AUTO, False, 30),
        ((*AUTO, "buffer.max_policy_lag=0"), False, 15),
        ((*AUTO, "learner.recipe=remax"), False, 40),
        (AUTO, True, 256),
        ((*AUTO, "agents.processes=0"), False, 16),
        ((*AUTO, "agents.processes=0"), True, 16),
        ((*AUTO, "agents.processes=0", "buffer.groups_per_step=1"), False, 6),
        ((*AUTO, "agents.processes=0", "agents.command=[]", "data.scorer=letters"), False, 30),
    ],
)
def test_auto_ends_where_no_more_episodes_could_start(
    keys: tuple[str, ...], evaluates: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_buffers.os, "sched_getaffinity", lambda _: {0, 1})
    assert most_running(load_config(overrides=keys), evaluates=evaluates) == most
