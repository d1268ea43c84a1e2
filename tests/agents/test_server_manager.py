"""Which server answers: least loaded first, the same one afterwards, another one when it fails."""

from __future__ import annotations

import asyncio

import pytest

from agents import server_manager
from agents.server_manager import AsyncLLMServerManager, ServerUnavailable
from buffers.errors import AgentError, UnderstudyError
from tests.support.loop_parts import ScriptedServer
from tests.support.patience import PATIENCE_S


class GatedServer(ScriptedServer):
    """Answers once `open` is set."""

    def __init__(self):
        super().__init__(lambda _: [1])
        self.open = asyncio.Event()
        self.running = 0

    async def generate(self, request_id, **options):
        self.running += 1
        try:
            await self.open.wait()
            return await super().generate(request_id, **options)
        finally:
            self.running -= 1


async def ask(manager, request_id):
    return await manager.generate(request_id, prompt_ids=[1], sampling_params={})


async def asked(manager, *request_ids):
    tasks = []
    for request_id in request_ids:
        tasks.append(asyncio.create_task(ask(manager, request_id)))
        await asyncio.sleep(0)
    return tasks


async def test_first_rounds_go_to_the_least_loaded_server():
    servers = [GatedServer() for _ in range(3)]
    manager = AsyncLLMServerManager(servers)
    tasks = await asked(manager, *"abcdef")
    assert [server.running for server in servers] == [2, 2, 2]
    servers[1].open.set()
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    tasks += await asked(manager, "g", "h")
    assert len(servers[1].prompts) + servers[1].running == 4, "the one that is free gets both"
    for server in servers:
        server.open.set()
    await asyncio.gather(*tasks)


async def test_later_rounds_go_to_the_server_of_the_first():
    servers = [ScriptedServer(lambda _: [1]) for _ in range(4)]
    manager = AsyncLLMServerManager(servers)
    for _ in range(5):
        for episode in range(40):
            await ask(manager.keyed(f"key{episode}"), f"episode-{episode}")
    assert [len(server.seen) for server in servers] == [10] * 4
    assert all(set(server.seen.values()) == {4} for server in servers)


async def test_each_episode_is_recorded_under_its_own_key():
    servers = [ScriptedServer(lambda _: [1]) for _ in range(2)]
    manager = AsyncLLMServerManager(servers, api_key="own")
    views = [manager.keyed(f"key{episode}") for episode in range(4)]
    for _ in range(2):
        for episode, view in enumerate(views):
            await ask(view, f"episode-{episode}")
    await ask(manager, "episode-9")
    assert [server.keys for server in servers] == [["key0", "key2"] * 2 + ["own"], ["key1", "key3"] * 2]


async def test_only_the_latest_routes_are_remembered():
    servers = [ScriptedServer(lambda _: [1]) for _ in range(2)]
    manager = AsyncLLMServerManager(servers, max_cache_size=10)
    for episode in range(1000):
        await ask(manager, f"episode-{episode}")
    assert len(manager._routes.sticky) == 10
    assert list(manager._routes.sticky)[-1] == "episode-999"


async def test_requests_of_a_dead_server_are_answered_by_another():
    servers = [ScriptedServer(lambda _: [1]) for _ in range(2)]
    manager = AsyncLLMServerManager(servers)
    first = {episode: await ask(manager, f"episode-{episode}") for episode in range(6)}
    assert len(first) == 6
    servers[0].dead = True
    second = await asyncio.gather(*(ask(manager, f"episode-{episode}") for episode in range(6)))
    assert [output.token_ids for output in second] == [[1]] * 6
    assert len(servers[1].prompts) == 3 + 6
    assert manager.num_failovers >= 1
    servers[0].dead = False
    assert await manager.check_health() == 2
    await ask(manager, "new")
    await ask(manager, "newer")
    assert len(servers[0].prompts) == 3 + 1, "it takes part again"


async def test_a_hanging_server_holds_up_nobody_elses_request():
    hanging, well = GatedServer(), ScriptedServer(lambda _: [1])
    manager = AsyncLLMServerManager([hanging, well])
    (stuck,) = await asked(manager, "stuck")
    assert hanging.running == 1
    answers = await asyncio.wait_for(asyncio.gather(*(ask(manager, f"free-{n}") for n in range(1))), PATIENCE_S)
    assert answers[0].token_ids == [1]
    assert not stuck.done()
    stuck.cancel()


async def test_a_server_that_does_not_answer_its_health_check_is_ill_after_the_deadline(monkeypatch):
    class Silent(ScriptedServer):
        async def healthy(self):
            await asyncio.Event().wait()

    monkeypatch.setattr(server_manager, "HEALTH_DEADLINE_S", 0.01)
    silent, well = Silent(lambda _: [1]), ScriptedServer(lambda _: [1])
    manager = AsyncLLMServerManager([silent, well])
    assert await asyncio.wait_for(manager.check_health(), PATIENCE_S) == 1
    for request in "abc":
        await ask(manager, request)
    assert (len(silent.prompts), len(well.prompts)) == (0, 3), "it takes no new requests"


async def test_a_server_that_says_it_is_ill_takes_no_requests_until_it_is_well():
    class Ill(ScriptedServer):
        well = False

        async def healthy(self):
            return self.well

    ill, well = Ill(lambda _: [1]), ScriptedServer(lambda _: [1])
    manager = AsyncLLMServerManager([ill, well])
    assert await manager.check_health() == 1
    for request in "abc":
        await ask(manager, request)
    assert (len(ill.prompts), len(well.prompts)) == (0, 3)
    ill.well = True
    assert await manager.check_health() == 2
    for request in "de":
        await ask(manager, request)
    assert (len(ill.prompts), len(well.prompts)) == (1, 4)


async def test_without_any_server_the_request_fails_and_says_so():
    server = ScriptedServer(lambda _: [1])
    server.dead = True
    with pytest.raises(ServerUnavailable, match="none of 1 servers answered"):
        await ask(AsyncLLMServerManager([server], patience_s=0.05), "a")
    with pytest.raises(UnderstudyError, match="at least one server"):
        AsyncLLMServerManager([])


async def test_what_a_server_says_about_the_request_is_no_failure_of_the_server():
    class Refusing(ScriptedServer):
        async def generate(self, request_id, **options):
            raise AgentError("the prompt is too long")

    manager = AsyncLLMServerManager([Refusing([])])
    with pytest.raises(AgentError, match="too long"):
        await ask(manager, "a")
    assert manager.num_failovers == 0


async def test_all_servers_sleep_and_wake_up():
    servers = [ScriptedServer([]) for _ in range(3)]
    manager = AsyncLLMServerManager(servers)
    await manager.sleep()
    assert [server.slept for server in servers] == [1, 1, 1]
    await manager.wake_up()
    assert [server.slept for server in servers] == [0, 0, 0]
