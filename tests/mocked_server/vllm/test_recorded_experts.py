"""The real engine says which experts each token used: those that the learner's own routers choose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.families import make_family
from buffers.records import UNKNOWN_EXPERT
from configs.schema import RolloutConfig, ServerConfig
from mocked_server.fleet.member import probe
from mocked_server.request_context import AnswerRecorder
from mocked_server.rollout import VLLMRollout
from mocked_server.vllm.engine import free_sampling
from mocked_server.vllm.engine_arguments import EngineSettings
from tests.learner.experts.test_routing import chosen, policy_of
from tests.support.patience import begun

pytestmark = pytest.mark.engine


def sampling(tokens: int, *, start: int = 0, **more: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kind = RequestOutputKind.DELTA
    return SamplingParams(max_tokens=tokens, logprobs=0, output_kind=kind, routed_experts_prompt_start=start, **more)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_family("qwen3_moe", tmp_path_factory.mktemp("models") / "qwen3_moe")
    settings = EngineSettings(
        model_path=folder,
        served_name="policy",
        dtype="float32",
        rollout=RolloutConfig(max_tokens=256, max_model_len=512, kv_cache_gb=0.0625),
        server=ServerConfig(),
        router_replay=True,
    )
    with VLLMRollout(settings) as rollout:
        yield rollout, folder


async def answer(engine: Any, prompt: list[int], params: Any, *, name: str) -> Any:
    recorder = AnswerRecorder(name)
    async for output in engine.generate(prompt, params, request_id=name):
        recorder.add(output)
    return recorder.responses(version=0)[0]


def test_the_engines_experts_are_the_learners_for_all_tokens_but_the_last(mixture: Any, tmp_path: Path) -> None:
    """Several at once, in steps that mix prompts and samples; one of them from a place of its prompt on, one ended by a stop."""
    rollout, _ = mixture
    policy = policy_of("qwen3_moe", tmp_path)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 500, length).tolist() for length in (9, 140, 30, 12)]
    limits: list[dict[str, Any]] = [
        {"tokens": 40},
        {"tokens": 3, "start": 100},
        {"tokens": 25},
        {"tokens": 200, "stop": list("etaoin")},
    ]

    async def all_of_them() -> list[Any]:
        asked = zip(prompts, limits, strict=True)
        return await asyncio.gather(
            *(
                answer(rollout.engine, ids, sampling(seed=n, **more), name=f"r{n}")
                for n, (ids, more) in enumerate(asked)
            )
        )

    for prompt, limit, response in zip(prompts, limits, rollout.wait(all_of_them()), strict=True):
        ids = np.array([*prompt, *response.sampled_ids.tolist()], dtype=np.int32)
        start = limit.get("start", 0)
        assert response.experts.shape == (len(ids) - 1 - start, 2, 2) and response.experts.dtype == np.uint8
        own = np.sort(chosen(policy, ids)[start:-1], axis=-1)
        assert (own == np.sort(response.experts, axis=-1)).mean() > 0.999, "but for ties"


def test_weights_that_come_meanwhile_lose_and_repeat_no_tokens_experts(mixture: Any, tmp_path: Path) -> None:
    """All that was computed is computed again then. The weights are the same ones, so that the experts can be known."""
    rollout, folder = mixture
    policy = policy_of("qwen3_moe", tmp_path)
    prompt = np.random.default_rng(2).integers(3, 500, 20).tolist()

    async def generate(on_token: Callable[[], object]) -> Any:
        recorder = AnswerRecorder("r")
        async for output in rollout.engine.generate(prompt, sampling(450, ignore_eos=True), request_id="meanwhile"):
            recorder.add(output)
            on_token()
        return recorder.responses(version=0)[0]

    async def with_new_weights() -> Any:
        running = await begun(generate)
        await rollout.engine.load_weights(folder, version=1)
        return await running

    response = rollout.wait(with_new_weights())
    assert set(response.versions.tolist()) == {0, 1}
    ids = np.array([*prompt, *response.sampled_ids.tolist()], dtype=np.int32)
    assert response.experts.shape == (469, 2, 2)
    own = np.sort(chosen(policy, ids)[:-1], axis=-1)
    assert (own == np.sort(response.experts, axis=-1)).mean() > 0.999


def test_a_probe_has_the_experts_of_all_its_tokens_but_the_last(mixture: Any, tmp_path: Path) -> None:
    rollout, _ = mixture
    policy = policy_of("qwen3_moe", tmp_path)
    prompt = np.random.default_rng(3).integers(3, 500, 200).tolist()
    ids, sampled, experts = rollout.wait(
        probe(rollout.engine, prompt, params=free_sampling(tokens=12, temperature=1.0))
    )
    assert len(ids) == len(prompt) + len(sampled) == len(experts) == 224
    assert (experts[-1] == UNKNOWN_EXPERT).all()
    own = np.sort(chosen(policy, np.array(ids, dtype=np.int32))[:-1], axis=-1)
    assert (own == np.sort(experts[:-1], axis=-1)).mean() > 0.999, "but for ties"
