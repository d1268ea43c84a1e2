"""A seed of a request whose prompt is computed in several parts, on a CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.schema import RolloutConfig, ServerConfig
from mocked_server.request_context import AnswerRecorder
from mocked_server.rollout import VLLMRollout
from mocked_server.vllm.engine_arguments import EngineSettings

pytestmark = pytest.mark.engine

PART = 64
LENGTHS = (16, PART, PART + 1, 4 * PART, 400)


@pytest.fixture(scope="module")
def in_parts(tiny_model: Path) -> Iterator[VLLMRollout]:
    """An engine that computes a prompt in parts of 64 tokens."""
    config = RolloutConfig(
        max_tokens=64, max_model_len=512, kv_cache_gb=0.0625, engine_args={"max_num_batched_tokens": PART}
    )
    settings = EngineSettings(
        model_path=tiny_model, served_name="policy", dtype="float32", rollout=config, server=ServerConfig()
    )
    with VLLMRollout(settings) as rollout:
        yield rollout


async def sampled(rollout: VLLMRollout, length: int, *, seed: int) -> list[int]:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(max_tokens=24, logprobs=0, seed=seed, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    recorder = AnswerRecorder("r")
    prompt = [40 + k % 200 for k in range(length)]
    async for output in rollout.engine.generate(prompt, params, request_id=f"r-{length}-{seed}"):
        recorder.add(output)
    return recorder.responses(version=0)[0].sampled_ids.tolist()


def test_a_seed_gives_the_same_answer_however_the_prompt_is_computed(in_parts, rollout) -> None:
    """Alone, and beside others, whose parts are computed in between."""

    async def together(engine: VLLMRollout) -> list[list[int]]:
        return await asyncio.gather(*(sampled(engine, length, seed=7) for length in LENGTHS))

    alone = [in_parts.wait(sampled(in_parts, length, seed=7)) for length in LENGTHS]
    assert alone == in_parts.wait(together(in_parts)) == rollout.wait(together(rollout))
    assert in_parts.wait(sampled(in_parts, LENGTHS[-1], seed=8)) != alone[-1]
    assert in_parts.engine.is_up
