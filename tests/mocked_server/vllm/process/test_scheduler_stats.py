"""What the scheduler says of itself: preemptions for lack of cache are told from those of new weights, by rule and on an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from configs.schema import RolloutConfig, ServerConfig
from mocked_server.fleet.member import EngineFigures
from mocked_server.vllm.engine import VLLMEngine
from mocked_server.vllm.engine_arguments import EngineSettings, make_args, make_vllm_config, set_process_environment
from mocked_server.vllm.process.engine_health import SchedulerStats
from tests.support.patience import PATIENCE_S


def step(stats: SchedulerStats, *, running: int = 8, waiting: int = 0, preempted: int = 0) -> int:
    stats.step(running=running, waiting=waiting, kv_share=0.5, preempted=preempted)
    return stats.preemptions


def test_preemptions_are_counted_and_the_last_steps_figures_are_kept() -> None:
    stats = SchedulerStats()
    assert [step(stats, preempted=1), step(stats), step(stats, running=5, waiting=3, preempted=2)] == [1, 1, 3]
    assert (stats.waiting, stats.kv_share) == (3, 0.5)


def test_those_that_new_weights_set_aside_are_not_counted() -> None:
    stats = SchedulerStats()
    step(stats, running=8)
    stats.cleared(under_way=9)
    assert not stats.is_settled
    assert [step(stats, preempted=5), step(stats, preempted=3), step(stats, preempted=2)] == [0, 0, 2]
    assert stats.is_settled


def test_what_was_set_aside_and_never_came_back_hides_nothing_once_the_engine_was_idle() -> None:
    stats = SchedulerStats()
    step(stats, running=8)
    stats.cleared(under_way=8)
    assert step(stats, running=0, preempted=2) == 0
    assert step(stats, preempted=1) == 1


def test_requests_that_had_ended_are_not_set_aside() -> None:
    stats = SchedulerStats()
    step(stats, running=8)
    stats.cleared(under_way=1)  # the others were aborted, which no step tells
    assert step(stats, preempted=3) == 2


async def started(tiny_model: Path, *, kv_cache_gb: float) -> VLLMEngine:
    set_process_environment()
    settings = EngineSettings(
        model_path=tiny_model, served_name="policy", dtype="float32", server=ServerConfig(),
        rollout=RolloutConfig(max_tokens=256, max_model_len=512, kv_cache_gb=kv_cache_gb),
    )  # fmt: skip
    engine = VLLMEngine(make_vllm_config(make_args(settings)), count_preemptions=True)
    await engine.start()
    return engine


async def generate(engine: VLLMEngine, number: int, *, tokens: int, prompt: list[int] | None = None) -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        max_tokens=tokens, ignore_eos=True, seed=number, output_kind=RequestOutputKind.FINAL_ONLY, logprobs=0
    )
    prompt = prompt or [40 + number, *range(50, 80)]
    async for _ in engine.generate(prompt, params, request_id=f"r-{number}"):
        pass


@asynccontextmanager
async def under_way(
    engine: VLLMEngine, numbers: range, *, tokens: int, prompt: list[int] | None = None
) -> AsyncIterator[list[int]]:
    """So many generations at once, each followed by the same again until the block ends. Gives those that have ended."""
    ended: list[int] = []
    is_over = asyncio.Event()

    async def again(number: int) -> None:
        while not is_over.is_set():
            await generate(engine, number, tokens=tokens, prompt=prompt)
            ended.append(number)

    async with asyncio.TaskGroup() as group:
        for number in numbers:
            group.create_task(again(number))
        yield ended
        is_over.set()


async def look_until(engine: VLLMEngine, holds: Callable[[EngineFigures], bool]) -> EngineFigures:
    async with asyncio.timeout(PATIENCE_S):
        while not holds(figures := engine.figures()):
            await asyncio.sleep(0.005)
    return figures


@pytest.mark.engine
async def test_a_full_cache_preempts_and_new_weights_do_not(tiny_model: Path) -> None:
    engine = await started(tiny_model, kv_cache_gb=0.002)
    try:
        capacity = engine.figures().kv_capacity
        assert 1500 < capacity < 2500  # 0.002 GiB of 1,024 bytes
        async with under_way(engine, range(4), tokens=200) as few:
            seen = await look_until(engine, lambda now: now.running == 4 and now.tokens_held > 4 * 60)
            await engine.load_weights(tiny_model, version=1)
        assert seen.waiting == 0 and seen.tokens_held < capacity
        assert engine.figures().preemptions == 0, "four fit; the cache was cleared under them"

        async with under_way(engine, range(4, 20), tokens=250) as many:
            await look_until(
                engine, lambda now: now.running == 16 and now.waiting > 0 and now.tokens_held > 0.6 * capacity
            )
        idle = engine.figures()
        assert idle.preemptions > 0 and (idle.running, idle.waiting, idle.tokens_held) == (0, 0, 0)
        assert idle.sampled_tokens == len(few) * 200 + len(many) * 250
        assert idle.prompt_tokens == (len(few) + len(many)) * 31

        looks, shared = list[EngineFigures](), [*range(50, 350)]
        async with under_way(engine, range(20, 21), tokens=200, prompt=shared):
            await look_until(engine, lambda now: now.tokens_held > 300)
            async with under_way(engine, range(21, 24), tokens=200, prompt=shared) as alike:
                while len(alike) < 6 or looks[-1].running < 4:
                    looks.append(await look_until(engine, lambda now: now.running > 0))
                    await asyncio.sleep(0.005)
        # In blocks of 128 tokens: two that are shared and two of each are 1,280; three or four of each would be 1,536 or more.
        assert 600 < max(now.tokens_held for now in looks) < 1450
        await engine.restart()
        assert engine.figures().kv_capacity == capacity and engine.figures().restarts == 1
    finally:
        await engine.close()
