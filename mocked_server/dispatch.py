"""Gives each episode to its player: an agent that asks for it, or a loop of this project, by its row's `agent_name`.

Where there is such a player, the server puts this between the task pool and the agents: it leases every episode, has
those that a player names played, and hands the others on. So one task file, one batch and one capacity rule hold all of
them. Two kinds of players exist: plain prompts (`single_turn_agent`: one generation in this process, scored by a
function), and agent loops, which the pipeline hands in. Invariant: an episode is either played here or given to exactly
one agent; one that ends otherwise (deadline, stale) is played no further; what a player raises ends its own episode only.
No kind of player waits for another: an episode for an agent is held, in its slot, until one asks. It fails when none asks for
as long as an episode may take, or at once where no agent ever asks.

What an agent loop gives back is compared with what was sampled: a token that it says the model sampled (mask 1) is one that the
engine sampled, after just these ids, in this episode; else the episode fails with the place. A sampled token that no trajectory
has with mask 1 is not trained, as in verl. What is trained are the recorded rounds: ids and log-probabilities of a loop are not
believed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from buffers.did_you_mean import one_of
from buffers.errors import AgentError, EpisodeError, ScoreError, TaskError, UnderstudyError
from buffers.records import Episode, Int32, LeasedEpisode, ScoreDetail, Task, UInt8, scored_episode
from buffers.tasks.task_pool import PoolClosed, TaskPool
from mocked_server.conversation.live_episodes import LiveEpisode, LiveRound

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
    """True if programs may ask for them. False: none will, and such a row is refused."""
    default: str | None = None
    """The player of added rows that name none; None: agents."""


AGENTS = Others()
MAX_UNASKED = 16
"""Most episodes that wait here for agents that ask: they leave slots to those of other players."""


@dataclass(slots=True, eq=False)
class Dispatch:
    """See the module. `run` is its loop."""

    pool: TaskPool
    _: KW_ONLY
    players: Mapping[str, Play]
    """Keyed by `agent_name`."""
    others: Others = AGENTS
    """The players of rows that name none of them."""
    open_episode: Callable[[Episode], LeasedEpisode]
    """Lets an episode's key open the model API."""
    notify_score: Callable[[str, float], Awaitable[object]]
    fail: Callable[[str, str], Awaitable[None]]
    wait_ended: Callable[[str], Awaitable[None]]
    """Returns when an episode has ended in any way."""
    _for_agents: asyncio.Queue[Episode | None] = field(default_factory=asyncio.Queue)
    _asking: int = 0
    """Agents that wait for an episode now."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _held: set[str] = field(default_factory=set)
    _watching: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        """Runs until the pool is closed: takes each episode and has it played, or gives it to `lease`."""
        async with asyncio.TaskGroup() as playing:
            with suppress(PoolClosed):
                while True:
                    # Few more episodes lie here for agents than agents ask for: one that is not asked for ends by its deadline and
                    # is retried, which must not repeat without end.
                    while self._for_agents.qsize() > self._asking + MAX_UNASKED:
                        self._changed.clear()
                        await self._changed.wait()
                    episode = await self.pool.lease(wait_s=LEASE_WAIT_S)
                    if episode is None:
                        continue
                    play = self.players.get(episode.task.agent_name or "")
                    if play is not None:
                        playing.create_task(self._run(play, episode), name=f"play {episode.episode_id}")
                    elif self.others.agents:
                        self._held.add(episode.episode_id)
                        self._for_agents.put_nowait(episode)
                    else:
                        await self.fail(
                            episode.episode_id, f"no player for it: agent_name {episode.task.agent_name!r:.60}"
                        )
            self._for_agents.put_nowait(None)

    def checked(self, tasks: Sequence[Task]) -> list[Task]:
        """Tasks that are added, each with a player. Raises TaskError for the first without."""
        named = [task if task.agent_name else replace(task, agent_name=self.others.default) for task in tasks]
        for task in named if not self.others.agents else ():
            if task.agent_name not in self.players:
                rule = one_of(task.agent_name or "", self.players)
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
                    if self.pool.renew(episode.episode_id):
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
        await self.wait_ended(episode_id)
        self._renew_held()

    def _renew_held(self) -> None:
        self._held = {held for held in self._held if self.pool.renew(held)}

    async def _run(self, play: Play, episode: Episode) -> None:
        """Play, but no longer than the episode lives; then report how it went."""
        leased = self.open_episode(episode)
        scored_episode.set(leased)  # of this task, which has no other
        playing = asyncio.ensure_future(play(episode, leased))
        ended = asyncio.ensure_future(self.wait_ended(episode.episode_id))
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
                await self.notify_score(episode_id, played.result())
                return
            except (ScoreError, EpisodeError, ValueError) as refused:
                error = refused
        logger.warning("episode=%s was not scored: %r", episode_id, error)
        if isinstance(error, ScoreError):
            await self.fail(episode_id, f"scorer: {error}")
        else:
            is_plain = isinstance(error, UnderstudyError | ValueError)
            await self.fail(episode_id, str(error) if is_plain else f"{type(error).__name__}: {error}")


Flags = npt.NDArray[np.bool_]


class Trajectory(Protocol):
    """One `AgentLoopOutput`."""

    @property
    def prompt_ids(self) -> list[int]: ...
    @property
    def response_ids(self) -> list[int]: ...
    @property
    def response_mask(self) -> list[int]: ...
    @property
    def reward_score(self) -> float | None: ...
    @property
    def role(self) -> str: ...
    @property
    def step_rewards(self) -> list[float] | None: ...


class LoopOutcome(Protocol):
    """An episode that a loop has played."""

    @property
    def score(self) -> float: ...
    @property
    def outputs(self) -> Sequence[Trajectory]: ...


class LoopPlayer(Protocol):
    """The player of rows that name an agent loop (the pipeline hands in `agents.workers.manager`)."""

    @property
    def names(self) -> frozenset[str]: ...
    async def play(self, task: Task, *, api_key: str, seed: int) -> LoopOutcome: ...


def left_out(live: LiveEpisode, outputs: Sequence[Trajectory]) -> dict[int, UInt8]:
    """Round index -> [S] which sampled tokens are trained, of the rounds of which some are not.

    Raises AgentError at the first token with mask 1 that was not sampled there, and when nothing has mask 1.
    """
    trained = {id(live_round): np.zeros(live_round.num_sampled, np.uint8) for live_round in live.rounds}
    for number, output in enumerate(outputs):
        ids = np.array(output.prompt_ids + output.response_ids, np.int32)
        mask = np.array([0] * len(output.prompt_ids) + output.response_mask, bool)
        sampled = np.zeros(len(ids), bool)
        for live_round, start, alike in _rounds_of(live, ids):
            sampled[start : start + alike] = True
            trained[id(live_round)][:alike] |= mask[start : start + alike]
        _check(mask, sampled=sampled, ids=ids, what=f"trajectory {number}", prompt_length=len(output.prompt_ids))
    if not any(flags.any() for flags in trained.values()):
        raise AgentError("at least one token must have mask 1, got none; there is nothing to train")
    return {
        live_round.round_index: trained[id(live_round)]
        for live_round in live.rounds
        if live_round.round_index is not None and not trained[id(live_round)].all()
    }


def part_scores(live: LiveEpisode, outputs: Sequence[Trajectory]) -> list[tuple[float, ScoreDetail]]:
    """Scores of parts of the episode, beside its own: of each trajectory where several have one, and of single answers.

    Raises AgentError when `step_rewards` are not one for each answer."""
    scores = []
    several = sum(output.reward_score is not None for output in outputs) > 1
    for number, output in enumerate(outputs):
        answers = _answers(live, np.array(output.prompt_ids + output.response_ids, np.int32))
        rewards = output.step_rewards or [0.0] * len(answers)
        if len(rewards) != len(answers):
            raise AgentError(
                f"trajectory {number}: step_rewards must hold one reward for each of its {len(answers)} answers, got "
                f"{len(rewards)}; write 0.0 where there is none"
            )
        scores += [(reward, ScoreDetail(round_index=at)) for at, reward in zip(answers, rewards, strict=True) if reward]
        if output.reward_score is not None and output.role:
            scores.append((output.reward_score, ScoreDetail(role=output.role)))
        elif several and output.reward_score is not None and answers:
            scores.append((output.reward_score, ScoreDetail(branch=answers[-1])))
    return scores


def _answers(live: LiveEpisode, ids: Int32) -> list[int]:
    """The rounds whose answers these ids hold, in order."""
    longest: dict[int, tuple[int, int]] = {}
    for live_round, start, alike in _rounds_of(live, ids):
        if live_round.round_index is not None:
            longest[start] = max(longest.get(start, (0, 0)), (alike, live_round.round_index))
    return [longest[start][1] for start in sorted(longest)]


def _check(mask: Flags, *, sampled: Flags, ids: Int32, what: str, prompt_length: int) -> None:
    foreign = np.flatnonzero(mask & ~sampled)
    if len(foreign):
        at = int(foreign[0])
        raise AgentError(
            f"{what}: a token with mask 1 must be one that generate() sampled after the ids before it, got {ids[at]} at position "
            f"{at - prompt_length} of response_ids; give back what was sampled, unchanged"
        )


def _rounds_of(live: LiveEpisode, ids: Int32) -> Iterator[tuple[LiveRound, int, int]]:
    """(round, where its sampled ids stand, how many of them are these ids) for each round whose prompt these ids begin with."""
    for live_round, alike in live.matches(ids):
        if (num_sampled := alike - len(live_round.tail_ids)) > 0:
            yield live_round, live_round.total - live_round.num_sampled, num_sampled
