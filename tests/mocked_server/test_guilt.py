"""Rules of mocked_server/generation.py: who is to blame for an engine's death, in a real fleet of engines that die when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from buffers.errors import RequestRefused
from buffers.prompt_queue import Prompt, PromptQueue, Response
from mocked_server.conversation.live_episodes import Episodes
from mocked_server.fleet.engine_fleet import EngineFleet
from mocked_server.fleet.member import EngineLost, Sampled
from mocked_server.generation import DEATHS_TOGETHER, Generation
from tests.support.patience import PATIENCE_S

POISON, LENGTH = 666, 12
PARAMS = SimpleNamespace(presence_penalty=0.0, frequency_penalty=0.0, structured_outputs=None, bad_words=None, n=1)


class MortalEngine:
    """Samples 0, 1, 2, ... after every prompt. One with POISON in it ends it. `at_death`: requests under way at its deaths."""

    def __init__(self, name: str) -> None:
        self.name, self.version, self.life = name, 0, 1
        self.is_up = True
        self.serving: dict[str, int] = {}
        """Request -> tokens that it has."""
        self.at_death: list[list[str]] = []
        self._dead = asyncio.Event()
        self._by_itself = False

    def die(self, *, by_itself: bool) -> None:
        self.at_death.append(list(self.serving))
        self.is_up, self._by_itself = False, by_itself
        self._dead.set()

    async def until_dead(self) -> None:
        await self._dead.wait()

    async def restart(self) -> None:
        while self.serving:
            await asyncio.sleep(0)
        self.life += 1
        self.is_up = True
        self._dead.clear()

    async def generate(
        self, ids: list[int], params: Any, *, request_id: str, sampled: Sequence[Sampled] = (), **_: Any
    ) -> AsyncGenerator[Any, None]:
        life, done = self.life, len(sampled[0].token_ids) if sampled else 0
        self.serving[request_id] = done
        try:
            for token in range(done, LENGTH):
                for _ in range(3):
                    await asyncio.sleep(0)
                if POISON in ids and self.is_up:
                    self.die(by_itself=True)
                if not self.is_up:
                    how = "crashed" if self._by_itself else "was killed"
                    raise EngineLost(f"engine {self.name} {how}", life=(self.name, life), by_itself=self._by_itself)
                self.serving[request_id] = token + 1
                yield output(token, ends="length" if token == LENGTH - 1 else None)
        finally:
            del self.serving[request_id]

    async def load_weights(self, folder: Path, *, version: int) -> float:
        raise AssertionError

    async def close(self) -> None: ...


def output(token: int, *, ends: str | None) -> Any:
    completion = SimpleNamespace(
        index=0, token_ids=[token], logprobs=SimpleNamespace(logprobs=[-0.5]), text="", stop_reason=None,
        finish_reason=ends, weight_versions=None,
    )  # fmt: skip
    return SimpleNamespace(outputs=[completion], finished=ends is not None, num_cached_tokens=0)


class Client:
    """The way back to one request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.abandoned = False
        self.response: Response | None = None
        self.error: Exception | None = None
        self.ended = asyncio.Event()

    def push(self, output: Any) -> None: ...

    def finish(self, *responses: Response, last: Any = None) -> None:
        (self.response,) = responses
        self.ended.set()

    def fail(self, error: Exception) -> None:
        if not self.ended.is_set():
            self.error = error
            self.ended.set()

    def on_abandon(self, callback: Callable[[], object]) -> None: ...


class Rounds:
    def put_round(self, _: Any) -> Future[None]:
        stored = Future[None]()
        stored.set_result(None)
        return stored


class Served:
    """A generate loop before `engines`, and whom it blames."""

    def __init__(self, engines: list[MortalEngine]) -> None:
        self.engines = engines
        self.deaths = 0
        self.blamed: list[str] = []
        self.fleet = EngineFleet(engines, record_death=self._count)
        self.queue = PromptQueue()
        self.generation = Generation(
            self.fleet, queue=self.queue, episodes=Episodes(), rounds=Rounds(), blame=self.blamed.append
        )

    def _count(self, name: str, error: Exception) -> None:
        self.deaths += 1

    def ask(self, name: str, *, poison: bool = False) -> Client:
        client = Client(name)
        self.queue.put(
            Prompt(
                request_id=name,
                episode_id=f"episode-{name}",
                reply=client,
                prompt_token_ids=np.array([7, POISON if poison else 8], np.int32),
                sampling=SimpleNamespace(params=PARAMS, extra={}),
            )
        )
        return client

    def serving(self, request: str) -> MortalEngine | None:
        """The engine that has it under way."""
        return next((engine for engine in self.engines if engine.is_up and request in engine.serving), None)

    async def until_under_way(self, *requests: str, alone: bool = False) -> MortalEngine:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                assert not self.blamed
                engine = self.serving(requests[0])
                if engine is not None and {*requests} <= {*engine.serving}:
                    assert not alone or list(engine.serving) == [*requests]
                    return engine
                await asyncio.sleep(0)

    async def until_gone(self, engine: MortalEngine) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while engine.serving:
                await asyncio.sleep(0)


@asynccontextmanager
async def served(num_engines: int) -> AsyncGenerator[Served, None]:
    it = Served([MortalEngine(f"e{number}") for number in range(num_engines)])
    loops = [asyncio.create_task(it.fleet.run()), asyncio.create_task(it.generation.run())]
    await asyncio.sleep(0)
    yield it
    it.queue.close()
    loops[0].cancel()
    await asyncio.gather(*loops, return_exceptions=True)


async def ended(*clients: Client) -> None:
    async with asyncio.timeout(PATIENCE_S):
        for client in clients:
            await client.ended.wait()


def assert_whole(*clients: Client) -> None:
    for client in clients:
        assert client.error is None and client.response is not None, client.error
        assert client.response.sampled_ids.tolist() == list(range(LENGTH))


@pytest.mark.parametrize("num_engines", [1, 3])
async def test_a_stream_goes_on_over_any_number_of_deaths_from_outside(num_engines: int) -> None:
    async with served(num_engines) as it:
        clients = [it.ask(f"r{number}") for number in range(4)]
        for _ in range(10):
            engine = await it.until_under_way("r0")
            engine.die(by_itself=False)
            await it.until_gone(engine)
        await ended(*clients)
        assert_whole(*clients)
        assert it.blamed == [] and it.deaths == 10


@pytest.mark.parametrize("num_engines", [1, 3])
async def test_a_request_that_kills_engines_is_found_with_the_third_whoever_was_there(num_engines: int) -> None:
    async with served(num_engines) as it:
        clients = [it.ask(f"r{number}") for number in range(9)]
        poison = it.ask("poison", poison=True)
        await ended(poison, *clients)
        assert_whole(*clients)
        assert it.blamed == ["episode-poison"] and it.deaths == DEATHS_TOGETHER + 1
        assert isinstance(poison.error, RequestRefused)
        assert "died while it answered this request alone (engine e" in str(poison.error)
        assert "crashed), as 2 others did that served it among others" in str(poison.error)
        assert ["poison"] in [requests for engine in it.engines for requests in engine.at_death], "it was served alone"


async def test_kills_from_outside_neither_convict_a_suspect_nor_clear_it() -> None:
    async with served(2) as it:
        suspect, beside = it.ask("r0"), [it.ask(f"r{number}") for number in range(1, 4)]
        for _ in range(DEATHS_TOGETHER):
            engine = await it.until_under_way("r0")
            engine.die(by_itself=True)
            await it.until_gone(engine)
        for _ in range(5):
            engine = await it.until_under_way("r0", alone=True)
            engine.die(by_itself=False)
            await it.until_gone(engine)
        (await it.until_under_way("r0", alone=True)).die(by_itself=True)
        await ended(suspect, *beside)
        assert_whole(*beside)
        assert it.blamed == ["episode-r0"] and isinstance(suspect.error, RequestRefused)


async def test_a_suspect_that_is_served_alone_to_its_end_is_cleared() -> None:
    async with served(2) as it:
        suspect = it.ask("r0")
        for _ in range(DEATHS_TOGETHER):
            engine = await it.until_under_way("r0")
            engine.die(by_itself=True)
            await it.until_gone(engine)
        await ended(suspect)
        assert_whole(suspect)
        again = it.ask("r0")
        (await it.until_under_way("r0")).die(by_itself=True)
        await ended(again)
        assert_whole(again)
        assert it.blamed == []
