"""Who plays an episode, and how its end is reported, whatever the player or the store does. Fakes for pool and store."""

from __future__ import annotations

import asyncio

import pytest

from agents.agent_loop import AgentLoopOutput
from agents.workers.config import LoopSpec
from agents.workers.manager import AgentLoopManager, loop_row
from agents.workers.worker import LoopResult
from buffers.errors import AgentError, TaskError
from buffers.records import Episode, Task
from buffers.tasks.task_pool import PoolClosed
from mocked_server.dispatch import Dispatch, Others
from tests.support.patience import PATIENCE_S


def episode(number, agent_name):
    task = Task(task_id=f"t{number}", prompt=[{"role": "user", "content": "?"}], agent_name=agent_name)
    return Episode(episode_id=f"e{number}", task=task, group_id=number, sample_index=0)


class ScriptedService:
    """A pool that gives out these episodes, and a store that remembers what it was told."""

    def __init__(self, *episodes):
        self.episodes = list(episodes)
        self.told = []
        self.ended = {each.episode_id: asyncio.Event() for each in episodes}
        self.renewed = []

    def renew(self, episode_id):
        self.renewed.append(episode_id)
        return not self.ended[episode_id].is_set()

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


def dispatch(service, *, agents=True, default=None, **players):
    return Dispatch(
        service,
        players=players,
        others=Others(agents=agents, default=default),
        open_episode=lambda each: each.episode_id,
        notify_score=service.notify_score,
        fail=service.fail,
        wait_ended=service.wait_ended,
    )


async def run(service, **given):
    await asyncio.wait_for(dispatch(service, **given).run(), PATIENCE_S)
    return service.told


async def plays(score):
    async def play(*_):
        if isinstance(score, Exception):
            raise score
        return score

    return play


async def test_a_player_that_fails_ends_its_own_episode_and_the_others_are_played():
    service = ScriptedService(episode(1, "bad"), episode(2, "good"))
    told = await run(service, bad=await plays(AgentError("no score")), good=await plays(0.5))
    assert sorted(told) == [("e1", "no score"), ("e2", 0.5)]


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError("deep"), type("Own", (Exception,), {})("mine")])
async def test_whatever_a_player_raises_ends_its_own_episode(error):
    service = ScriptedService(episode(1, "bad"), episode(2, "good"))
    told = await run(service, bad=await plays(error), good=await plays(0.5))
    assert sorted(told) == [("e1", f"{type(error).__name__}: {error}"), ("e2", 0.5)]


async def test_episodes_for_agents_that_nobody_asks_for_hold_no_player_up():
    service = ScriptedService(*[episode(number, None) for number in range(5)], episode(5, "good"))
    assert await run(service, good=await plays(0.5)) == [("e5", 0.5)]


async def test_an_agent_that_asks_gets_what_was_held_with_a_deadline_that_begins_anew():
    service = ScriptedService(*[episode(number, None) for number in range(3)])
    made = dispatch(service)
    await made.run()
    service.ended["e0"].set()  # failed meanwhile: nobody is given it
    assert (await made.lease(wait_s=1)).episode_id == "e1"
    assert set(service.renewed) == {"e0", "e1", "e2"}  # and those that wait go on waiting, as somebody asks
    assert (await made.lease(wait_s=1)).episode_id == "e2"
    for _ in range(2):
        with pytest.raises(PoolClosed):
            await made.lease(wait_s=1)


async def test_an_agent_that_asks_in_vain_is_told_so():
    assert await dispatch(ScriptedService()).lease(wait_s=0) is None


async def test_what_nobody_plays_is_refused_when_it_is_added_and_fails_where_it_is_there():
    service = ScriptedService(episode(1, "nobody"), episode(2, "good"))
    told = await run(service, agents=False, good=await plays(0.5))
    assert sorted(told) == [("e1", "no player for it: agent_name 'nobody'"), ("e2", 0.5)]
    made = dispatch(service, agents=False, default="good", good=await plays(0.5))
    tasks = [episode(1, None).task, episode(2, "good").task]
    assert [task.agent_name for task in made.checked(tasks)] == ["good", "good"]
    with pytest.raises(TaskError, match=r"agent_name of task 't3' must be one of \['good'\], got 'godo'; did you mean"):
        made.checked([*tasks, episode(3, "godo").task])
    assert [task.agent_name for task in dispatch(service).checked([*tasks, episode(3, "any").task])] == [
        None,
        "good",
        "any",
    ]


async def test_an_episode_that_ended_otherwise_is_played_no_further_and_reports_nothing():
    service = ScriptedService(episode(1, "slow"))
    stopped = asyncio.Event()

    async def play(*_):
        service.ended["e1"].set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    assert await run(service, slow=play) == []
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
