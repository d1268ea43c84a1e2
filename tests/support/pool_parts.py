"""A task pool that runs, on deadlines that pass when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from buffers.ledger.ledger import Ledger
from buffers.records import Episode
from buffers.tasks.task_pool import TaskPool
from tests.support.buffer_parts import make_round
from tests.support.patience import PATIENCE_S


@dataclass
class FakeTimer:
    due: float
    call: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class FakeClock:
    """Deadlines pass when a test says so."""

    now: float = 0.0
    timers: list[FakeTimer] = field(default_factory=list)

    def call_later(self, delay: float, call: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(self.now + delay, call))
        return self.timers[-1]

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.due <= self.now and not timer.cancelled]:
            timer.cancelled = True
            timer.call()

    @property
    def num_waiting(self) -> int:
        return sum(not timer.cancelled for timer in self.timers)


@dataclass
class Setup:
    pool: TaskPool
    ledger: Ledger
    clock: FakeClock
    closed: list[tuple[str, str]]
    closings: asyncio.Queue[tuple[str, str]]
    runner: asyncio.Task[None]

    async def lease(self) -> Episode:
        episode = await self.pool.lease(wait_s=PATIENCE_S)
        assert episode is not None
        return episode

    async def play(self, episode: Episode, *, score: float = 1.0, version: int = 0) -> None:
        self.ledger.put_round(make_round(episode.episode_id, version=version))
        assert await self.score(episode, score) is True

    async def score(self, episode: Episode, score: float) -> bool:
        """Report it as a server does, and wait until the pool has seen that."""
        stored = await asyncio.wrap_future(self.ledger.notify_score(episode.episode_id, score, max_attempts=3))
        async with asyncio.timeout(PATIENCE_S):
            while (episode.episode_id, "scored") not in self.closed and not self.runner.done():
                await asyncio.sleep(0.001)
        return stored


@asynccontextmanager
async def running_pool(ledger: Ledger | None = None, **settings: Any) -> AsyncIterator[Setup]:
    ledger = ledger or Ledger(None)
    clock, closed, closings = FakeClock(), [], asyncio.Queue()

    def on_closed(episode_id: str, reason: str) -> None:
        closed.append((episode_id, reason))
        closings.put_nowait((episode_id, reason))

    defaults: dict[str, Any] = {
        "group_size": 1,
        "groups_per_step": 1,
        "max_policy_lag": None,
        "max_running": 8,
        "deadline_s": 60.0,
        "max_attempts": 2,
    }
    pool = TaskPool(ledger, **(defaults | settings), on_closed=on_closed, call_later=clock.call_later)
    before = pool.metrics()["pool/started"]
    runner = asyncio.create_task(pool.run())
    try:
        yield Setup(pool, ledger, clock, closed, closings, runner)
    finally:
        pool.close()
        await asyncio.wait([runner])
        ledger.close()
        # Whatever the test did: each slot taken was released once, and no deadline is left behind.
        metrics = pool.metrics()
        released = sum(metrics[f"pool/{reason}"] for reason in ("scored", "failed", "closed"))
        assert metrics["pool/running"] == 0 and metrics["pool/started"] == released
        assert len(closed) == len(set(closed)) == len({episode_id for episode_id, _ in closed}) == released - before
        assert clock.num_waiting == 0
