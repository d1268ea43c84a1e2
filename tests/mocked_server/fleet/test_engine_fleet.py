"""Rules of mocked_server/fleet/engine_fleet.py, with engines that answer by the word of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffers.errors import EngineDied, EngineError
from mocked_server.fleet.engine_fleet import PROBE_DEATHS, Caller, EngineFleet
from mocked_server.fleet.member import EngineFigures, EngineLost, Sampled
from tests.support.patience import PATIENCE_S

FIGURES = {
    "waiting": 0, "tokens_held": 0, "kv_capacity": 0, "sampled_tokens": 0, "prompt_tokens": 0, "cached_tokens": 0,
    "preemptions": 0,
}  # fmt: skip


class WordEngine:
    """It says its name with each answer, which takes until `gate` is set. `starts_badly`: errors of its next starts."""

    def __init__(self, name: str, *starts_badly: EngineError) -> None:
        self.name, self.version, self.lives = name, 0, 0
        self.is_up = False
        self.errors = list(starts_badly)
        self.gate = asyncio.Event()
        self.gate.set()
        self.died = asyncio.Event()
        self.weights: tuple[Path, int] | None = None
        self.loading = False
        self.closed = False
        self.asked: list[str] = []

    async def start(self) -> None:
        self.lives += 1
        if self.errors:
            raise self.errors.pop(0)
        self.died.clear()
        self.is_up = True
        if self.weights is not None:
            self.version = self.weights[1]

    async def restart(self) -> None:
        await asyncio.sleep(0.01)
        await self.start()

    def die(self) -> None:
        self.is_up = False
        self.died.set()
        self.gate.set()

    async def until_dead(self) -> None:
        await self.died.wait()

    async def generate(
        self, ids: list[int], params: Any, *, request_id: str, sampled: Sequence[Sampled] = (), **_: Any
    ) -> AsyncGenerator[Any, None]:
        life = self.lives
        self.asked.append(request_id)
        await self.gate.wait()
        if not self.is_up or self.lives != life:
            raise EngineLost(f"{self.name} died", life=(self.name, life))
        yield self.name

    async def load_weights(self, folder: Path, *, version: int) -> float:
        self.weights = folder, version
        if self.is_up:
            self.loading = True
            await asyncio.sleep(0.01)
            self.loading, self.version = False, version
        return 0.01

    async def sleep(self) -> None: ...
    async def wake_up(self) -> None: ...

    async def close(self) -> None:
        self.closed = True
        self.die()

    def figures(self) -> EngineFigures:
        return EngineFigures(
            name=self.name,
            is_up=self.is_up,
            version=self.version,
            running=0,
            restarts=max(0, self.lives - 1),
            **FIGURES,
        )


async def ask(fleet: EngineFleet, episode: str, *, tokens: int = 10) -> str:
    outputs = fleet.generate([1] * tokens, None, request_id=episode, caller=Caller(episode_id=episode))
    (answer,) = [output async for output in outputs]
    return str(answer)


async def test_an_engine_that_dies_is_started_again_and_its_episodes_are_served_by_others() -> None:
    a, b = WordEngine("a"), WordEngine("b")
    deaths: list[str] = []
    fleet = EngineFleet([a, b], record_death=lambda name, _: deaths.append(name))
    await fleet.start()
    keeping = asyncio.create_task(fleet.run())
    assert {await ask(fleet, "x"), await ask(fleet, "y")} == {"a", "b"}
    a.gate.clear()
    asking = asyncio.create_task(ask(fleet, "x"))
    await asyncio.sleep(0)
    a.errors.append(EngineError("no room yet"))
    a.die()
    with pytest.raises(EngineLost):
        await asking
    assert await ask(fleet, "x") == "b", "asked again before anybody looked"
    async with asyncio.timeout(PATIENCE_S):
        while not a.is_up:
            await asyncio.sleep(0.001)
    assert deaths == ["a", "a"] and await ask(fleet, "x") == "b", "it stays where its history is"
    keeping.cancel()


async def test_an_engine_that_dies_too_often_leaves_and_the_last_one_ends_the_run() -> None:
    engines = [WordEngine("a"), WordEngine("b")]
    fleet = EngineFleet(engines)
    await fleet.start()
    keeping = asyncio.create_task(fleet.run())
    await asyncio.sleep(0)
    engines[0].die()
    assert [await ask(fleet, name) for name in "xyz"] == ["b"] * 3
    async with asyncio.timeout(PATIENCE_S):
        while not engines[0].closed:
            await asyncio.sleep(0.001)
    assert [figures.name for figures in fleet.figures()] == ["b"] and not keeping.done()
    engines[1].die()
    with pytest.raises(ExceptionGroup) as ended:
        await asyncio.wait_for(keeping, PATIENCE_S)
    assert isinstance(ended.value.exceptions[0], EngineError) and "engine b died" in str(ended.value.exceptions[0])


async def test_an_engine_that_is_killed_while_it_starts_is_started_again_and_other_errors_end_the_start() -> None:
    deaths: list[str] = []
    engine = WordEngine("a", EngineDied("killed"), EngineDied("killed"))
    await EngineFleet([engine], record_death=lambda name, _: deaths.append(name)).start()
    assert engine.lives == 3 and deaths == ["a", "a"]
    with pytest.raises(ExceptionGroup, match="unhandled"):
        await EngineFleet([WordEngine("a", EngineError("no such model"))]).start()


async def test_weights_are_loaded_one_engine_after_the_other_and_who_lags_takes_no_call(tmp_path: Path) -> None:
    engines = [WordEngine(name) for name in "abc"]
    fleet = EngineFleet(engines, max_policy_lag=0)
    await fleet.start()
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, sum(engine.loading for engine in engines))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    loading = asyncio.create_task(fleet.load_weights(tmp_path, version=1))
    await asyncio.sleep(0)
    assert await ask(fleet, "x") == "a", "the first that has them: the others lag"
    await loading
    watching.cancel()
    assert most == 1 and [figures.version for figures in fleet.figures()] == [1, 1, 1] and fleet.version == 1


async def test_an_engine_that_is_down_while_weights_come_has_them_when_it_is_back(tmp_path: Path) -> None:
    a, b = WordEngine("a"), WordEngine("b")
    fleet = EngineFleet([a, b], record_death=lambda *_: None)
    await fleet.start()
    a.die()
    await fleet.load_weights(tmp_path, version=3)
    assert (a.version, b.version) == (0, 3)
    keeping = asyncio.create_task(fleet.run())
    async with asyncio.timeout(PATIENCE_S):
        while not a.is_up:
            await asyncio.sleep(0.001)
    assert a.version == 3
    keeping.cancel()


async def test_an_engine_that_joins_has_the_newest_weights_and_takes_new_episodes(tmp_path: Path) -> None:
    fleet = EngineFleet([WordEngine("a")], record_death=lambda *_: None)
    await fleet.start()
    keeping = asyncio.create_task(fleet.run())
    await fleet.load_weights(tmp_path, version=2)
    assert await ask(fleet, "x") == "a"
    late = WordEngine("b")
    await fleet.add(late)
    assert late.version == 2 and await ask(fleet, "y") == "b"
    late.die()
    async with asyncio.timeout(PATIENCE_S):
        while late.lives != 2:  # it is kept as the others
            await asyncio.sleep(0.001)
    await fleet.remove("b")
    await asyncio.sleep(0.01)
    assert late.lives == 2 and late.closed and await ask(fleet, "y") == "a"
    keeping.cancel()


async def test_a_request_that_finds_no_engine_waits_for_one() -> None:
    engine = WordEngine("a")
    fleet = EngineFleet([engine], record_death=lambda *_: None)
    await fleet.start()
    engine.die()
    asking = asyncio.create_task(ask(fleet, "x"))
    await asyncio.sleep(0.01)
    assert not asking.done()
    keeping = asyncio.create_task(fleet.run())
    assert await asyncio.wait_for(asking, PATIENCE_S) == "a"
    keeping.cancel()


async def test_an_engine_that_joins_while_weights_are_published_begins_with_the_newest() -> None:
    """The files of older versions go as soon as all engines of the fleet have newer ones."""

    class Slow(WordEngine):
        async def start(self) -> None:
            await begun.wait()
            await super().start()

    begun = asyncio.Event()
    first, late = WordEngine("e0"), Slow("e1")
    fleet = EngineFleet([first])
    await fleet.start()
    await fleet.load_weights(Path("/w1"), version=1)
    joining = asyncio.create_task(fleet.add(late))
    await asyncio.sleep(0)
    await fleet.load_weights(Path("/w2"), version=2)
    begun.set()
    await joining
    assert (late.version, first.version) == (2, 2) and fleet.names == ["e0", "e1"]
    await fleet.close()


async def ask_alone(fleet: EngineFleet, episode: str, *apart_from: str) -> str:
    caller = Caller(episode_id=episode, alone=True, apart_from=frozenset(apart_from))
    (answer,) = [output async for output in fleet.generate([1], None, request_id=episode, caller=caller)]
    return str(answer)


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_who_is_served_alone_waits_for_an_engine_that_serves_nothing_and_keeps_others_away() -> None:
    a = WordEngine("a")
    fleet = EngineFleet([a], record_death=lambda *_: None)
    await fleet.start()
    a.gate.clear()
    first = asyncio.create_task(ask(fleet, "x"))
    await turns()
    alone = asyncio.create_task(ask_alone(fleet, "y"))
    late = asyncio.create_task(ask(fleet, "z"))
    await turns()
    assert a.asked == ["x"]
    opened, a.gate = a.gate, asyncio.Event()
    opened.set()
    await first
    await fleet.load_weights(Path("v1"), version=1)  # it does not open the engine to others
    await turns()
    assert a.asked == ["x", "y"] and not late.done()
    a.gate.set()
    assert await alone == "a" and await late == "a" and a.asked == ["x", "y", "z"]


async def test_who_is_served_alone_gets_another_engine_than_those_that_died_of_it_where_there_is_one() -> None:
    engines = [WordEngine(name) for name in "abc"]
    fleet = EngineFleet(engines, record_death=lambda *_: None)
    await fleet.start()
    assert await ask_alone(fleet, "x", "a", "b") == "c" and await ask_alone(fleet, "x", "a", "c") == "b"
    assert await ask_alone(fleet, "x", "a", "b", "c") in "abc"
    engines[2].gate.clear()
    alone = asyncio.create_task(ask_alone(fleet, "x", "a", "b"))
    await turns()
    engines[2].die()
    with pytest.raises(EngineLost):
        await alone
    assert await ask_alone(fleet, "x", "a", "b") in "ab", "the one that is down is not waited for"


async def test_an_engine_that_dies_or_a_caller_that_leaves_while_it_is_emptied_blocks_nobody() -> None:
    engines = [WordEngine(name) for name in "ab"]
    fleet = EngineFleet(engines, record_death=lambda *_: None)
    await fleet.start()
    for engine in engines:
        engine.gate.clear()
    busy = [asyncio.create_task(ask(fleet, name)) for name in "xy"]
    await turns()
    alone = asyncio.create_task(ask_alone(fleet, "z", "b"))
    await turns()
    engines[0].die()
    await turns()
    assert engines[1].asked == ["y"] and not alone.done()
    alone.cancel()
    await asyncio.gather(alone, return_exceptions=True)
    engines[1].gate.set()
    assert await ask(fleet, "w") == "b"
    await asyncio.gather(*busy, return_exceptions=True)


class PoisonedEngine(WordEngine):
    """Its first `deaths` lives end with a request, by themselves or not."""

    def __init__(self, name: str, *, deaths: int, by_itself: bool = False) -> None:
        super().__init__(name)
        self.deaths, self.by_itself = deaths, by_itself

    async def generate(self, ids: list[int], params: Any, **_: Any) -> AsyncGenerator[Any, None]:
        if self.lives <= self.deaths:
            life = self.name, self.lives
            self.die()
            raise EngineLost(f"{self.name} died", life=life, by_itself=self.by_itself)
        sampled = SimpleNamespace(token_ids=[7], logprobs=SimpleNamespace(logprobs=[-1.0]))
        yield SimpleNamespace(finished=True, outputs=[sampled])


async def probed(*engines: PoisonedEngine, without: str = "") -> list[str]:
    """Engines that answered a probe of a fleet, with those that are up when `without` has left it, if one leaves."""
    fleet = EngineFleet(engines, record_death=lambda *_: None)
    await fleet.start()
    keeping = asyncio.create_task(fleet.run())
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(PATIENCE_S):
            if without:
                await fleet.remove(without)
            answers = await fleet.probe([5], params=None)
        assert all(answer == ([5, 7, 7], [-1.0, -1.0], None) for answer in answers.values())
        return list(answers)
    finally:
        keeping.cancel()


async def test_a_probe_that_an_engine_dies_of_each_time_does_not_pass() -> None:
    assert await probed(PoisonedEngine("a", deaths=PROBE_DEATHS - 1, by_itself=True)) == ["a"]
    poisoned = PoisonedEngine("a", deaths=2 * PROBE_DEATHS, by_itself=True)
    with pytest.raises(EngineLost, match="a died"):
        await probed(poisoned)
    assert poisoned.lives == PROBE_DEATHS


async def test_what_is_killed_from_outside_is_asked_again_where_no_other_answers() -> None:
    assert await probed(PoisonedEngine("a", deaths=2 * PROBE_DEATHS)) == ["a"]
    sound, killed = PoisonedEngine("a", deaths=0), PoisonedEngine("b", deaths=1)
    assert await probed(sound, killed) == ["a"], "it gets the same weights with its restart"
    assert await probed(sound, PoisonedEngine("b", deaths=1), without="a") == ["b"]


async def test_a_probe_of_an_engine_that_nobody_starts_again_says_so() -> None:
    fleet = EngineFleet([PoisonedEngine("a", deaths=1)])
    await fleet.start()
    with pytest.raises(EngineLost, match="a died"):
        await fleet.probe([5], params=None)
