"""Plain prompts: tasks of a file that need no agent. One generation each, scored by a function.

With a score function the server puts this between the task pool and the agents: it leases every episode, answers the plain ones
through the same prompt queue as everybody's, and hands the others on. So one task file, one batch and one capacity rule hold both.
Invariant: an episode is either answered here or given to exactly one agent. At most two episodes wait here for an agent to ask.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from buffers.errors import EngineError, EpisodeError, ScoreError
from buffers.records import Episode, Task
from buffers.task_pool import PoolClosed, TaskPool

logger = logging.getLogger(__name__)

PLAIN = "single_turn_agent"
"""`agent_name` of a plain prompt (verl's name for it)."""
LEASE_WAIT_S = 3600.0

ScoreFn = Callable[[Task, str], float | Awaitable[float]]
"""(task, the model's answer) -> score; one that takes long gives an awaitable."""


class PlainPrompts:
    """`answer(episode)` opens the episode, generates once and returns the text; `notify_score` and `fail` end it."""

    def __init__(
        self,
        pool: TaskPool,
        *,
        score_fn: ScoreFn,
        answer: Callable[[Episode], Awaitable[str]],
        notify_score: Callable[[str, float], Awaitable[object]],
        fail: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._pool = pool
        self._score_fn = score_fn
        self._answer = answer
        self._notify_score = notify_score
        self._fail = fail
        self._for_agents: asyncio.Queue[Episode | None] = asyncio.Queue(maxsize=1)

    async def run(self) -> None:
        """Until the pool is closed: takes each episode; gives plain ones an answer and a score, others to `lease`."""
        async with asyncio.TaskGroup() as answers:
            with suppress(PoolClosed):
                while True:
                    episode = await self._pool.lease(wait_s=LEASE_WAIT_S)
                    if episode is None:
                        continue
                    if episode.task.agent_name == PLAIN:
                        answers.create_task(self._play(episode), name=f"plain prompt {episode.episode_id}")
                    else:
                        await self._for_agents.put(episode)
            await self._for_agents.put(None)

    async def lease(self, *, wait_s: float) -> Episode | None:
        """The next episode for an agent, None when there is none within `wait_s`. Raises PoolClosed."""
        try:
            episode = await asyncio.wait_for(self._for_agents.get(), wait_s)
        except TimeoutError:
            return None
        if episode is None:
            self._for_agents.put_nowait(None)  # for the next one who asks
            raise PoolClosed("task pool was closed: no more tasks")
        return episode

    async def _play(self, episode: Episode) -> None:
        try:
            text = await self._answer(episode)
            outcome = self._score_fn(episode.task, text)
            score = await outcome if isinstance(outcome, Awaitable) else outcome
            await self._notify_score(episode.episode_id, score)
        except ScoreError as error:
            logger.warning("episode=%s was not scored: %s", episode.episode_id, error)
            await self._fail(episode.episode_id, f"scorer: {error}")
        except (EngineError, EpisodeError, ValueError) as error:
            logger.warning("episode=%s plain prompt failed: %s", episode.episode_id, error)
            await self._fail(episode.episode_id, str(error))
