"""The real engine with adapters: a generation ends under the one it began with, and nothing pauses."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from configs.schema import LoraConfig, RolloutConfig, ServerConfig
from learner.model.lora import add_adapter, peft_names, write_description
from mocked_server.fleet.member import ADAPTER_OF
from mocked_server.request_context import AnswerRecorder
from mocked_server.rollout import VLLMRollout
from mocked_server.vllm.adapters import lora_words
from mocked_server.vllm.engine import VLLMEngine
from mocked_server.vllm.engine_arguments import EngineSettings
from tests.support.patience import begun
from tests.support.served_models import ENDLESS, MAX_MODEL_LEN

pytestmark = pytest.mark.engine

PROMPT = [40, 41, 42, 43]
TOLERANCE = 1e-5
RANK, KEPT = 4, 2
MORE = 20
"""Outputs of an answer that is given up, after all that it was needed for."""


def settings_of(model: Path, *, kept: int) -> EngineSettings:
    return EngineSettings(
        model_path=model,
        served_name="policy",
        dtype="float32",
        rollout=RolloutConfig(max_tokens=256, max_model_len=MAX_MODEL_LEN, kv_cache_gb=0.0625),
        server=ServerConfig(),
        lora_rank=RANK,
        kept_versions=kept,
    )


@pytest.fixture(scope="module")
def adapted(tiny_model: Path) -> Iterator[VLLMRollout]:
    with VLLMRollout(settings_of(tiny_model, kept=KEPT)) as rollout:
        yield rollout


@pytest.fixture
def engine(adapted: VLLMRollout) -> VLLMEngine:
    return adapted.engine


Make = Callable[[int], Path]


@pytest.fixture
def make(tiny_model: Path, tmp_path: Path) -> Make:
    """A folder with a random adapter, other for each number."""

    def made(number: int) -> Path:
        lm = AutoModelForCausalLM.from_pretrained(tiny_model)
        config = add_adapter(lm, rank=RANK, alpha=8.0, seed=number)
        generator = torch.Generator().manual_seed(number)
        weights = {name: weight.detach() for name, weight in lm.named_parameters() if "lora_" in name}
        for name, weight in weights.items():
            if ".lora_B." in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
        folder = tmp_path / f"version-{number}"
        folder.mkdir()
        save_file(peft_names(weights), folder / "adapter_model.safetensors")
        write_description(folder, config=config)
        return folder

    return made


async def generate(
    engine: VLLMEngine, num_tokens: int, *, seed: int, on_token: Callable[[], object] = int, role: str = "",
    over: asyncio.Event | None = None,
) -> Any:  # fmt: skip
    """`over`: it is given up once that is set and some tokens more have come, so that it is under way as long as the test needs."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        max_tokens=num_tokens, logprobs=0, seed=seed, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    recorder = AnswerRecorder(f"r-{seed}")
    own = {ADAPTER_OF: role} if role else {}
    outputs, left = engine.generate(PROMPT, params, request_id=f"r-{seed}-{time.monotonic_ns()}", **own), MORE
    async with aclosing(outputs):
        async for output in outputs:
            recorder.add(output)
            on_token()
            left -= over is not None and over.is_set()
            if not left:
                break
    (response,) = recorder.responses(version=-1)
    return response


def difference(model: Path, adapter: Path, response: Any) -> float:
    """The largest, between the recorded log-probabilities and those that peft computes with this adapter."""
    lm = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    ids = torch.tensor([PROMPT + response.sampled_ids.tolist()])
    with torch.no_grad():
        logits = lm(ids[:, :-1]).logits[0, len(PROMPT) - 1 :]
    own = logits.gather(1, ids[0, len(PROMPT) :, None])[:, 0] - logits.logsumexp(-1)
    return float((own - torch.tensor(response.logprobs)).abs().max())


def test_a_generation_ends_under_the_adapter_it_began_with(
    adapted: VLLMRollout, engine: VLLMEngine, make: Make, tiny_model: Path
) -> None:
    first, second = make(1), make(2)

    async def load_midway() -> tuple[Any, Any]:
        await engine.load_weights(first, version=1)
        over = asyncio.Event()
        running = await begun(partial(generate, engine, ENDLESS, seed=1, over=over))
        await engine.load_weights(second, version=2)
        later = await generate(engine, 100, seed=2)  # beside the first one, in the same steps
        assert not running.done(), "the first generation must still run for this to show anything"
        over.set()
        return await running, later

    one, other = adapted.wait(load_midway())
    assert len(one.sampled_ids) > 100 and set(one.versions.tolist()) == {1}
    assert len(other.sampled_ids) == 100 and set(other.versions.tolist()) == {2}
    assert difference(tiny_model, first, one) < TOLERANCE
    assert difference(tiny_model, second, other) < TOLERANCE
    assert difference(tiny_model, second, one) > 0.01, "the two adapters must differ for this to show anything"


def test_old_adapters_go_unless_they_are_used_and_those_outlive_their_folder(
    adapted: VLLMRollout, engine: VLLMEngine, make: Make, tiny_model: Path, tmp_path: Path
) -> None:
    folders = [make(number) for number in range(3, 9)]

    async def load_all() -> tuple[Any, set[int]]:
        await engine.load_weights(folders[0], version=3)
        over = asyncio.Event()
        running = await begun(partial(generate, engine, ENDLESS, seed=3, over=over))
        shutil.copytree(folders[0], tmp_path / "copy")
        for number, folder in enumerate(folders[1:], start=4):
            shutil.rmtree(folders[0], ignore_errors=True)  # as the next version's publication does
            await engine.load_weights(folder, version=number)
            await generate(engine, 1, seed=number)
        loaded = await engine._llm.list_loras()
        assert not running.done()
        over.set()
        return await running, loaded

    response, loaded = adapted.wait(load_all())
    assert set(response.versions.tolist()) == {3}
    assert difference(tiny_model, tmp_path / "copy", response) < TOLERANCE
    assert len(loaded) == KEPT + 1, "the newest ones, and the one that is used"
    adapted.wait(engine.load_weights(folders[-1], version=9))
    assert len(adapted.wait(engine._llm.list_loras())) == KEPT
    assert len(list(tmp_path.glob("loaded-*"))) == KEPT


def test_a_new_engine_process_has_the_newest_adapter(
    adapted: VLLMRollout, engine: VLLMEngine, make: Make, tiny_model: Path
) -> None:
    folder = make(10)
    adapted.wait(engine.load_weights(make(9), version=9))
    adapted.wait(engine.load_weights(folder, version=10))
    adapted.wait(engine.restart())
    response = adapted.wait(generate(engine, 20, seed=4))
    assert set(response.versions.tolist()) == {10}
    assert difference(tiny_model, folder, response) < TOLERANCE


def test_each_role_has_versions_of_its_own_and_a_new_one_leaves_the_others_generations_alone(
    adapted: VLLMRollout, make: Make, tiny_model: Path
) -> None:
    """Last, as it ends with an engine of its own: the roles' adapters come back with a new process."""
    folders = {
        (role, version): make(10 * number + version) for number, role in enumerate("ab", 3) for version in (5, 6)
    }
    with VLLMRollout(settings_of(tiny_model, kept=2 * KEPT)) as rollout:
        engine = rollout.engine

        async def load(role: str, version: int) -> None:
            await engine.load_adapter(folders[role, version], role=role, version=version)

        async def swap_midway() -> tuple[Any, Any, Any]:
            await load("a", 5)
            await load("b", 6)
            over = asyncio.Event()
            running = await begun(partial(generate, engine, ENDLESS, seed=1, role="b", over=over))
            old = await begun(partial(generate, engine, ENDLESS, seed=2, role="a", over=over))
            await load("a", 6)
            new = await generate(engine, 20, seed=3, role="a")
            assert not running.done() and not old.done(), "they must still run for this to show anything"
            over.set()
            return await running, await old, new

        other, old, new = rollout.wait(swap_midway())
        assert [set(one.versions.tolist()) for one in (other, old, new)] == [{6}, {5}, {6}]
        assert difference(tiny_model, folders["b", 6], other) < TOLERANCE
        assert difference(tiny_model, folders["a", 5], old) < TOLERANCE
        assert difference(tiny_model, folders["a", 6], new) < TOLERANCE
        assert difference(tiny_model, folders["a", 6], other) > 0.01, "the roles must differ for this to show anything"
        assert engine.version == 6
        rollout.wait(engine.restart())
        for role in "ab":
            response = rollout.wait(generate(engine, 20, seed=4, role=role))
            assert set(response.versions.tolist()) == {6}
            assert difference(tiny_model, folders[role, 6], response) < TOLERANCE
        assert len(rollout.wait(engine._llm.list_loras())) == 2


def test_vllm_gets_the_least_of_its_ranks_that_holds_ours() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert lora_words(rank=4, kept=2)[1:4] == ["--max-lora-rank", "8", "--max-loras"]
    assert lora_words(rank=32, kept=1)[2::2] == ["32", "2", "2"]
    most = LoraConfig.model_fields["rank"].metadata
    assert max(get_args(MaxLoRARanks)) == next(one.le for one in most if hasattr(one, "le"))
