"""Gives each episode to its player: an agent that asks for it, or a loop of this project, by its row's `agent_name`.

Where there is such a player, the server puts this between the task pool and the agents: it leases every episode, has
those that a player names played, and hands the others on. So one task file, one batch and one capacity rule hold all of
them. Two kinds of players exist: plain prompts (`single_turn_agent`: one generation in this process, scored by a
function), and agent loops, which the pipeline hands in. Invariant: an episode is either played here or given to exactly
one agent; one that ends otherwise (deadline, stale) is played no further; what a player raises ends its own episode only.
No kind of player waits for another: an episode for an agent is held, in its slot, until one asks. It fails when none asks for
as long as an episode may take, or at once where no agent ever asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from buffers.did_you_mean import one_of
from buffers.errors import EpisodeError, ScoreError, TaskError, UnderstudyError
from buffers.records import Episode, LeasedEpisode, Task
from buffers.tasks.task_pool import PoolClosed, TaskPool

logger = logging.getLogger(__name__)

PLAIN = "single_turn_agent"
"""`agent_name` of a plain prompt (verl's name for it)."""
LEASE_WAIT_S = 3600.0

ScoreFn = Callable[[Task, str], float | Awaitable[float]]
"""(task, the model's answer) -> score; one that takes long gives an awaitable."""
Play = Callable[[Episode, LeasedEpisode], Awaitable[float]]
"""Plays an opened episode and returns its score. What it raises is the reason why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """The players of rows that name none of ours."""

    agents: bool = True
    """Whether programs may ask for them. False: none will, and such a row is refused."""
    default: str | None = None
    """The player of added rows that name none; None: agents."""


AGENTS = Others()
MAX_UNASKED = 16
"""Most episodes that wait here for agents that ask: they leave slots to those of other players."""


class Dispatch:
    """`players`: by `agent_name`; `others`: who plays what names none of them. `open_episode` lets an episode's key open the
    model API; `notify_score` and `fail` end it; `wait_ended` returns when it has ended in any way."""

    def __init__(
        self,
        pool: TaskPool,
        *,
        players: Mapping[str, Play],
        others: Others = AGENTS,
        open_episode: Callable[[Episode], LeasedEpisode],
        notify_score: Callable[[str, float], Awaitable[object]],
        fail: Callable[[str, str], Awaitable[None]],
        wait_ended: Callable[[str], Awaitable[None]],
    ) -> None:
        self._pool = pool
        self._players = players
        self._others = others
        self._open = open_episode
        self._notify_score = notify_score
        self._fail = fail
        self._wait_ended = wait_ended
        self._for_agents: asyncio.Queue[Episode | None] = asyncio.Queue()
        self._asking = 0
        """Agents that wait for an episode now."""
        self._changed = asyncio.Event()
        self._held: set[str] = set()
        self._watching: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Runs until the pool is closed: takes each episode and has it played, or gives it to `lease`."""
        async with asyncio.TaskGroup() as playing:
            with suppress(PoolClosed):
                while True:
                    await self._until_wanted()
                    episode = await self._pool.lease(wait_s=LEASE_WAIT_S)
                    if episode is None:
                        continue
                    play = self._players.get(episode.task.agent_name or "")
                    if play is not None:
                        playing.create_task(self._run(play, episode), name=f"play {episode.episode_id}")
                    elif self._others.agents:
                        self._held.add(episode.episode_id)
                        self._for_agents.put_nowait(episode)
                    else:
                        await self._fail(
                            episode.episode_id, f"no player for it: agent_name {episode.task.agent_name!r:.60}"
                        )
            self._for_agents.put_nowait(None)

    async def _until_wanted(self) -> None:
        """Wait until few more episodes lie here for agents than agents ask for: one that is not asked for ends by its deadline
        and is retried, which must not repeat without end."""
        while self._for_agents.qsize() > self._asking + MAX_UNASKED:
            self._changed.clear()
            await self._changed.wait()

    def checked(self, tasks: Sequence[Task]) -> list[Task]:
        """Tasks that are added, each with a player. Raises TaskError for the first without."""
        named = [task if task.agent_name else replace(task, agent_name=self._others.default) for task in tasks]
        for task in named if not self._others.agents else ():
            if task.agent_name not in self._players:
                rule = one_of(task.agent_name or "", self._players)
                raise TaskError(
                    f"agent_name of task {task.task_id!r:.100} must be {rule}; there is no other player in this run"
                )
        return named

    async def lease(self, *, wait_s: float) -> Episode | None:
        """The next episode for an agent, None when there is none within `wait_s`. Raises PoolClosed."""
        self._renew_held()
        self._asking += 1
        self._changed.set()
        try:
            async with asyncio.timeout(wait_s):
                while (episode := await self._for_agents.get()) is not None:
                    self._held.discard(episode.episode_id)
                    if self._pool.renew(episode.episode_id):
                        watching = asyncio.create_task(self._renew_after(episode.episode_id))
                        self._watching.add(watching)
                        watching.add_done_callback(self._watching.discard)
                        return episode
        except TimeoutError:
            return None
        finally:
            self._asking -= 1
            self._changed.set()
        self._for_agents.put_nowait(None)  # for the next one who asks
        raise PoolClosed("task pool was closed: no more tasks")

    async def _renew_after(self, episode_id: str) -> None:
        """An agent that has ended an episode has as long again to ask for the next one."""
        await self._wait_ended(episode_id)
        self._renew_held()

    def _renew_held(self) -> None:
        self._held = {held for held in self._held if self._pool.renew(held)}

    async def _run(self, play: Play, episode: Episode) -> None:
        """Play, but no longer than the episode lives; then report how it went."""
        leased = self._open(episode)
        playing = asyncio.ensure_future(play(episode, leased))
        ended = asyncio.ensure_future(self._wait_ended(episode.episode_id))
        try:
            await asyncio.wait({playing, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            playing.cancel()
            await asyncio.wait({playing})
        if not playing.cancelled():
            await self._report(episode.episode_id, playing)

    async def _report(self, episode_id: str, played: asyncio.Future[float]) -> None:
        error = (
            played.exception()
        )  # of an agent loop or a scorer, which are other people's programs: it may be anything
        if error is None:
            try:
                await self._notify_score(episode_id, played.result())
                return
            except (ScoreError, EpisodeError, ValueError) as refused:
                error = refused
        logger.warning("episode=%s was not scored: %r", episode_id, error)
        if isinstance(error, ScoreError):
            await self._fail(episode_id, f"scorer: {error}")
        else:
            is_plain = isinstance(error, UnderstudyError | ValueError)
            await self._fail(episode_id, str(error) if is_plain else f"{type(error).__name__}: {error}")
