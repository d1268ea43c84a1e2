"""Figures of engines as people read them, and the pool that follows: mocked_server/fleet/engine_watch.py, engine_rates.py."""

from __future__ import annotations

import asyncio

import pytest

from mocked_server.fleet import engine_watch
from mocked_server.fleet.admission import Admission
from mocked_server.fleet.engine_watch import EngineRates, EngineWatch, kv_share, lines_of
from mocked_server.fleet.member import EngineFigures
from tests.mocked_server.fleet.scripted_figures import figures
from tests.support.patience import PATIENCE_S


class FakePool:
    def __init__(self) -> None:
        self.max_running = 64
        self.counts = {"pool/running": 0.0, "pool/scored": 0.0}

    def metrics(self) -> dict[str, float]:
        return self.counts


class Watched:
    """A watch whose engines and clock are set by the test."""

    def __init__(self, *engines: EngineFigures, admission: Admission | None = None) -> None:
        self.engines = list(engines)
        self.now = 50.0
        self.pool = FakePool()
        self.watch = EngineWatch(lambda: self.engines, pool=self.pool, admission=admission, clock=lambda: self.now)

    def look(self, *engines: EngineFigures, after_s: float = 1.0) -> None:
        self.now += after_s
        self.engines = list(engines)
        self.watch.look()


def test_the_pool_has_the_slots_that_admission_gives_from_the_start() -> None:
    watched = Watched(figures(), admission=Admission(episode_tokens=100, most=40))
    assert watched.pool.max_running == 10
    watched.pool.counts = {"pool/running": 10.0, "pool/scored": 10.0}
    watched.look(figures(running=10, kv=0.4))
    assert watched.pool.max_running == 12
    watched.look(figures(running=12, kv=0.4, preemptions=1))
    assert watched.pool.max_running == 8


def test_a_number_of_slots_that_is_given_stays() -> None:
    watched = Watched(figures())
    watched.look(figures(running=10, kv=5.0, preemptions=1))
    assert watched.pool.max_running == 64


async def test_the_loop_looks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "LOOK_S", 0.0)
    watched = Watched(figures(), admission=Admission(episode_tokens=100, most=40))
    running = asyncio.create_task(watched.watch.run())
    watched.engines = [figures(), figures("e1")]
    async with asyncio.timeout(PATIENCE_S):
        while watched.pool.max_running != 20:
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_a_steps_figures_are_of_each_engine_and_rates_are_since_the_last_step() -> None:
    watched = Watched(figures("e0", sampled_tokens=100), figures("e1"))
    first = figures("e0", sampled_tokens=350, prompt_tokens=200, cached_tokens=150, running=3, waiting=1, kv=0.25)
    watched.look(first, figures("e1", is_up=False, version=2, restarts=1, preemptions=4, moved_in=5), after_s=2.0)
    assert watched.watch.metrics() == {
        "engine/up": 1.0,
        "engine/e0/running": 3.0, "engine/e0/waiting": 1.0, "engine/e0/tokens_per_s": 125.0, "engine/e0/kv_share": 0.25,
        "engine/e0/cached_share": 0.75, "engine/e0/version": 0.0, "engine/e0/restarts": 0.0,
        "engine/e0/preemptions": 0.0, "engine/e0/moved_in": 0.0,
        "engine/e1/running": 0.0, "engine/e1/waiting": 0.0, "engine/e1/tokens_per_s": 0.0, "engine/e1/kv_share": 0.0,
        "engine/e1/version": 2.0, "engine/e1/restarts": 1.0, "engine/e1/preemptions": 4.0, "engine/e1/moved_in": 5.0,
    }  # fmt: skip
    watched.now += 1.0
    second = watched.watch.metrics()
    assert second["engine/e0/tokens_per_s"] == 0.0 and "engine/e0/cached_share" not in second


def test_rates_of_the_panel_are_of_the_last_ten_seconds() -> None:
    watched = Watched(figures())
    for second in range(1, 31):
        watched.look(figures(sampled_tokens=10 * second if second <= 15 else 150 + 100 * (second - 15)))
    assert watched.watch.status()["e0"]["tokens_per_s"] == 100.0
    assert watched.watch.lines() == ["e0    0 running  100 tokens/s  KV 0%  version 0"]


def test_a_line_says_what_is_not_as_usual() -> None:
    busy = figures("e1", running=12, waiting=3, kv=0.456, version=7, preemptions=2, moved_in=4, restarts=1)
    down = figures("e10", is_up=False, version=6)
    rates = [
        EngineRates(now=busy, tokens_per_s=1234.5, cached_share=0.934),
        EngineRates(now=down, tokens_per_s=0.0, cached_share=None),
    ]
    assert lines_of(rates) == [
        "e1   12 running  3 waiting  1,234 tokens/s  KV 46%  cached 93%  version 7  2 preempted  4 moved in  1 restarts",
        "e10 down  0 tokens/s  KV 0%  version 6",
    ]


def test_engines_beyond_the_eighth_share_a_line() -> None:
    fleet = [figures(f"e{number}", running=number, kv=number / 20, is_up=number != 9) for number in range(11)]
    lines = lines_of([EngineRates(now=engine, tokens_per_s=10.0, cached_share=None) for engine in fleet])
    assert len(lines) == 9 and lines[7].startswith("e7 ")
    assert lines[8] == "3 more  27 running  30 tokens/s  KV up to 50%  1 down"


def test_an_engine_that_joins_has_done_all_of_its_work_since() -> None:
    (rates,) = EngineRates.between([], [figures("e3", sampled_tokens=40)], seconds=4.0)
    assert rates.tokens_per_s == 10.0


def test_the_share_of_an_unknown_cache_is_zero() -> None:
    assert kv_share(figures(kv_capacity=0, tokens_held=5)) == 0.0
