"""Who plays an episode, and how its end is reported, whatever the player or the store does. Fakes for pool and store."""

from __future__ import annotations

import asyncio

import pytest

from agents.agent_loop import AgentLoopOutput
from agents.loop_config import LoopSpec
from agents.loop_manager import AgentLoopManager, loop_row
from agents.loop_worker import LoopResult
from buffers.errors import AgentError
from buffers.records import Episode, Task
from buffers.task_pool import PoolClosed
from mocked_server.dispatch import Dispatch


def episode(number, agent_name):
    task = Task(task_id=f"t{number}", prompt=[{"role": "user", "content": "?"}], agent_name=agent_name)
    return Episode(episode_id=f"e{number}", task=task, group_id=number, sample_index=0)


class Desk:
    """A pool that gives out these episodes, and a store that remembers what it was told."""

    def __init__(self, *episodes):
        self.episodes = list(episodes)
        self.told = []
        self.ended = {each.episode_id: asyncio.Event() for each in episodes}

    async def lease(self, *, wait_s):
        if not self.episodes:
            raise PoolClosed("no more")
        return self.episodes.pop(0)

    async def notify_score(self, episode_id, score):
        self.told.append((episode_id, score))

    async def fail(self, episode_id, reason):
        self.told.append((episode_id, reason))

    async def wait_ended(self, episode_id):
        await self.ended[episode_id].wait()


async def run(desk, **players):
    made = Dispatch(
        desk,
        players=players,
        open_episode=lambda each: each.episode_id,
        notify_score=desk.notify_score,
        fail=desk.fail,
        wait_ended=desk.wait_ended,
    )
    await asyncio.wait_for(made.run(), 5)
    return desk.told


async def plays(score):
    async def play(*_):
        if isinstance(score, Exception):
            raise score
        return score

    return play


async def test_a_player_that_fails_ends_its_own_episode_and_the_others_are_played():
    desk = Desk(episode(1, "bad"), episode(2, "good"))
    told = await run(desk, bad=await plays(AgentError("no score")), good=await plays(0.5))
    assert sorted(told) == [("e1", "no score"), ("e2", 0.5)]


async def test_an_episode_that_ended_otherwise_is_played_no_further_and_reports_nothing():
    desk = Desk(episode(1, "slow"))
    stopped = asyncio.Event()

    async def play(*_):
        desk.ended["e1"].set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    assert await run(desk, slow=play) == []
    assert stopped.is_set()


@pytest.mark.parametrize("rewards", [{}, {"a": "much"}, None])
async def test_an_episode_that_nobody_judges_fails_with_the_remedy(rewards):
    manager = AgentLoopManager([LoopSpec(name="mine", target="x.Y")], num_workers=1)
    output = AgentLoopOutput(
        prompt_ids=[1], response_ids=[2], response_mask=[1], extra_fields={"tool_rewards": rewards} if rewards else {}
    )
    with pytest.raises(AgentError, match=r"got none; set data\.scorer"):
        await manager._judge(episode(1, "mine").task, LoopResult(outputs=(output,)))


def test_a_row_is_handed_to_loops_as_verl_does_and_extra_info_hides_no_column():
    row = {"prompt": "p", "task_id": "t", "extra_info": {"index": 3, "task_id": "other"}}
    assert loop_row(row) == {"index": 3, "raw_prompt": "p", **row}
