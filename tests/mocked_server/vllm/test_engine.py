"""The real engine: exact log-probabilities, and weights that change while a request runs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from buffers.errors import EngineDied, EngineError
from configs.tiny_model import make_tiny_model
from mocked_server.fleet.member import EngineLost
from mocked_server.request_context import AnswerRecorder
from mocked_server.vllm.engine import VLLMEngine
from mocked_server.vllm.process import engine_health
from mocked_server.vllm.process.engine_health import STOPPED
from tests.mocked_server.vllm.hosted.test_remote_engine import leaver_at, until_given_up
from tests.support.patience import PATIENCE_S, begun
from tests.support.served_models import ENDLESS, LONG

pytestmark = pytest.mark.engine

PROMPT = [40, 41, 42, 43]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def other_model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=1)


@pytest.fixture
def original_weights(rollout, tiny_model):
    yield
    rollout.update_weights(tiny_model, version=0)


def sampling(num_tokens: int, *, seed: int):
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=num_tokens, logprobs=0, seed=seed, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )


async def generate(engine, num_tokens: int, *, seed: int, on_token=None):
    recorder = AnswerRecorder(f"r-{seed}")
    outputs = engine.generate(PROMPT, sampling(num_tokens, seed=seed), request_id=f"r-{seed}-{time.monotonic_ns()}")
    async for output in outputs:
        recorder.add(output)
        if on_token is not None:
            on_token()
    (response,) = recorder.responses(version=-1)
    return response


def recomputed(folder: Path, response) -> torch.Tensor:
    """[S] log-probabilities of the sampled ids under the model in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([PROMPT + response.sampled_ids.tolist()])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, len(PROMPT) - 1 : -1]
    return logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0]


def test_recorded_logprobs_equal_the_models(rollout, tiny_model):
    async def many():
        return await asyncio.gather(*(generate(rollout.engine, 32, seed=seed) for seed in range(16)))

    for response in rollout.wait(many()):
        assert set(response.versions.tolist()) == {0}
        assert len(response.sampled_ids) == 32
        difference = (recomputed(tiny_model, response) - torch.tensor(response.logprobs)).abs().max()
        assert difference < TOLERANCE


def test_weights_change_under_a_running_request_and_each_token_names_its_version(
    rollout, tiny_model, other_model, original_weights
):
    engine = rollout.engine

    async def swap_midway():
        running = await begun(partial(generate, engine, LONG, seed=1))
        await engine.load_weights(other_model, version=1)
        return await running

    response = rollout.wait(swap_midway())
    versions = torch.tensor(response.versions)
    assert len(versions) == LONG, "the request was neither dropped nor restarted"
    assert versions.tolist() == sorted(versions.tolist()) and set(versions.tolist()) == {0, 1}
    recorded = torch.tensor(response.logprobs)
    old, new = recomputed(tiny_model, response), recomputed(other_model, response)
    assert (old - recorded)[versions == 0].abs().max() < TOLERANCE
    assert (new - recorded)[versions == 1].abs().max() < TOLERANCE
    assert (old - recorded)[versions == 1].abs().max() > 0.01, "the two models must differ for this to show anything"


def test_an_engine_whose_load_fails_midway_samples_nothing_until_it_is_started_again(
    rollout, tiny_model, other_model, original_weights, tmp_path
):
    engine = rollout.engine
    weights = load_file(other_model / "model.safetensors")
    last = sorted(weights)[-1]
    save_file({**weights, last: weights[last][:-1].clone()}, tmp_path / "model.safetensors")
    seen = []

    async def fail_midway():
        began = asyncio.Event()

        def on_token():
            seen.append(engine.version)
            began.set()

        running = asyncio.create_task(generate(engine, ENDLESS, seed=1, on_token=on_token))
        await began.wait()
        with pytest.raises(Exception, match="Attempted to load weight"):
            await engine.load_weights(tmp_path, version=1)
        assert not engine.dead and await engine._llm.is_paused()
        number = -1
        while (
            len(seen) != number
        ):  # outputs that were on their way; it would end if it sampled from half-loaded weights
            number = len(seen)
            await asyncio.sleep(0.5)
        assert number < ENDLESS
        engine._weights = {"": (tiny_model, 0)}
        await engine.restart()
        with pytest.raises(EngineError, match="died while it answered"):
            await asyncio.wait_for(running, PATIENCE_S)
        return await generate(engine, 8, seed=2)

    response = rollout.wait(fail_midway())
    assert set(response.versions.tolist()) == {0}
    assert (recomputed(tiny_model, response) - torch.tensor(response.logprobs)).abs().max() < TOLERANCE


def test_an_engine_that_is_killed_before_the_last_message_of_its_start_is_not_waited_for(rollout, monkeypatch):
    from vllm.v1.engine import utils

    def kill(*given):
        for process in given[-1].engine_manager.processes:
            process.kill()
            process.join()

    engine = VLLMEngine(rollout.engine._vllm_config, name="killed")
    monkeypatch.setattr(utils, "wait_for_engine_startup", kill)
    monkeypatch.setattr("mocked_server.vllm.engine.READY_S", 1)
    with pytest.raises(EngineDied, match="Timed out waiting for engine core processes"):
        rollout.wait(asyncio.wait_for(engine.start(), PATIENCE_S))
    rollout.wait(engine.close())


def test_a_tied_head_is_refreshed_by_a_reload(rollout, tiny_model, other_model, original_weights):
    """vLLM keeps a packed copy of a tied output head on CPU, which a plain reload leaves at the old weights."""
    rollout.update_weights(other_model, version=3)
    response = rollout.wait(generate(rollout.engine, 16, seed=5))
    assert set(response.versions.tolist()) == {3}
    assert (recomputed(other_model, response) - torch.tensor(response.logprobs)).abs().max() < TOLERANCE


def test_closing_the_iterator_aborts_the_request(rollout):
    engine = rollout.engine

    async def leave_early():
        outputs = engine.generate(PROMPT, sampling(ENDLESS, seed=9), request_id="leaver")
        async for _ in outputs:
            break
        assert await leaver_at(engine)()
        await outputs.aclose()
        await until_given_up(engine, leaver_at(engine))

    rollout.wait(leave_early())


def test_what_waits_for_an_engine_that_is_replaced_is_told_and_the_next_one_answers(
    rollout, tiny_model, original_weights
):
    engine = rollout.engine

    async def replace_midway():
        answering = asyncio.Event()
        running = asyncio.create_task(generate(engine, ENDLESS, seed=1, on_token=answering.set))
        await answering.wait()
        await engine.restart()
        with pytest.raises(EngineError, match="died while it answered"):
            await asyncio.wait_for(running, PATIENCE_S)
        return await generate(engine, 8, seed=2)

    before = Path(engine._folder)
    response = rollout.wait(replace_midway())
    folder = Path(engine._folder)
    assert not before.exists(), "the sockets of the engine that was replaced are left"
    assert len([path for path in folder.iterdir() if path.is_socket()]) >= 2
    assert folder.stat().st_mode & 0o777 == 0o700, "no other user may enter"
    assert (recomputed(tiny_model, response) - torch.tensor(response.logprobs)).abs().max() < TOLERANCE


def test_weights_that_were_on_their_way_when_the_engine_was_replaced_reach_the_next_one(
    rollout, other_model, original_weights, monkeypatch
):
    engine = rollout.engine

    async def never_answered(*_):
        monkeypatch.undo()
        await asyncio.Event().wait()

    async def replace_meanwhile():
        monkeypatch.setattr(engine, "_load", never_answered)
        loading = asyncio.create_task(engine.load_weights(other_model, version=1))
        await asyncio.sleep(0.01)  # between two looks whether the engine lives
        await engine.restart()
        await asyncio.wait_for(loading, PATIENCE_S)
        return await generate(engine, 8, seed=3)

    response = rollout.wait(replace_meanwhile())
    assert set(response.versions.tolist()) == {1}
    assert (recomputed(other_model, response) - torch.tensor(response.logprobs)).abs().max() < TOLERANCE


def test_an_engine_that_slept_has_an_empty_cache_without_memory_and_answers(rollout):
    engine = rollout.engine

    async def cached(number):
        prompt = PROMPT * 100
        outputs = engine.generate(prompt, sampling(2, seed=0), request_id=f"cached-{number}-{time.monotonic_ns()}")
        return [output.num_cached_tokens async for output in outputs][-1]

    async def sleep_between():
        before = [await cached(number) for number in range(2)]
        took = psutil.Process(process_of(engine)).memory_info().rss
        await engine.sleep()
        freed = took - psutil.Process(process_of(engine)).memory_info().rss
        await engine.wake_up()
        return [*before[1:], await cached(2), freed]

    kept, after, freed = rollout.wait(sleep_between())
    assert kept > 0 and after == 0
    assert freed > 0.9 * 0.0625 * 2**30, "the cache's memory goes back to the system"


def test_an_engine_that_says_more_than_its_process_reads_leaves_it_time_for_all_else(rollout, monkeypatch):
    engine = rollout.engine
    decoder = engine._llm.engine_core.decoder
    decode = decoder.decode

    def slowly(frames):
        time.sleep(0.005)
        return decode(frames)

    async def first():
        outputs = engine.generate(PROMPT, sampling(LONG, seed=1), request_id=f"fast-{time.monotonic_ns()}")
        async with aclosing(outputs):
            async for output in outputs:
                return output.finished

    monkeypatch.setattr(decoder, "decode", slowly)
    assert rollout.wait(first()) is False, "the answer was read to its end before anything else had its turn"


@pytest.mark.parametrize("by_load", [False, True])
def test_an_engine_that_slept_without_requests_has_no_weights_and_gets_them_before_the_next(
    rollout, other_model, original_weights, by_load
):
    """Again by itself, once for several requests, or by newer ones that are loaded meanwhile."""
    engine = rollout.engine
    rollout.update_weights(other_model, version=1)

    async def weights():
        return (await engine._llm.collective_rpc("compute_weight_checksums"))[0]

    async def sleep_between():
        full = await weights()
        await engine.sleep()
        bare = await weights()
        await engine.wake_up()
        first = [engine.load_weights(other_model, version=2)] if by_load else []
        *_, one, two = await asyncio.gather(*first, generate(engine, 8, seed=1), generate(engine, 8, seed=2))
        return full, bare, [one, two], await weights()

    full, bare, responses, after = rollout.wait(sleep_between())
    assert bare != full and after == full, "vLLM has no sums of what it packed"
    for response in responses:
        assert set(response.versions.tolist()) == {1 + by_load}
        assert (recomputed(other_model, response) - torch.tensor(response.logprobs)).abs().max() < TOLERANCE


def test_a_caller_that_leaves_does_not_end_the_load_that_it_waited_for(
    rollout, other_model, original_weights, monkeypatch
):
    engine, loads = rollout.engine, []
    load = engine._load

    async def counted(*args, **more):
        loads.append(args)
        await load(*args, **more)

    async def leave():
        await engine.sleep()
        leaving = asyncio.create_task(generate(engine, 8, seed=1))
        while not loads:
            await asyncio.sleep(0)
        leaving.cancel()
        return await generate(engine, 8, seed=2)

    rollout.update_weights(other_model, version=1)
    monkeypatch.setattr(engine, "_load", counted)
    response = rollout.wait(leave())
    assert len(loads) == 1
    assert (recomputed(other_model, response) - torch.tensor(response.logprobs)).abs().max() < TOLERANCE


def test_an_engine_that_cannot_load_again_what_it_gave_back_is_lost_and_its_next_process_has_it(
    rollout, other_model, original_weights, monkeypatch
):
    engine = rollout.engine

    async def failing(*_, **__):
        raise EngineError("no memory")

    async def lose():
        await engine.sleep()
        monkeypatch.setattr(engine, "_load", failing)
        with pytest.raises(EngineLost, match="is down"):
            await asyncio.wait_for(generate(engine, 8, seed=1), PATIENCE_S)
        monkeypatch.undo()
        await engine.restart()
        return await generate(engine, 8, seed=2)

    rollout.update_weights(other_model, version=1)
    response = rollout.wait(lose())
    assert (recomputed(other_model, response) - torch.tensor(response.logprobs)).abs().max() < TOLERANCE


def test_an_engine_that_slept_beside_a_request_keeps_its_weights(rollout, other_model, original_weights):
    engine = rollout.engine
    rollout.update_weights(other_model, version=1)

    async def sleep_within():
        running = await begun(partial(generate, engine, LONG, seed=1))
        await engine.sleep()
        return engine._is_bare, await running

    is_bare, response = rollout.wait(sleep_within())
    assert not is_bare and len(response.sampled_ids) == LONG
    assert (recomputed(other_model, response) - torch.tensor(response.logprobs)).abs().max() < TOLERANCE


def params(num_tokens: int, *, as_whole: bool, **more):
    found = sampling(num_tokens, seed=0)
    found.seed = None
    from vllm.sampling_params import RequestOutputKind

    found.output_kind = RequestOutputKind.FINAL_ONLY if as_whole else RequestOutputKind.DELTA
    for name, value in more.items():
        setattr(found, name, value)
    return found


def process_of(engine) -> int:
    (process,) = engine._llm.engine_core.resources.engine_manager.processes
    return process.pid


async def kill_midway(engine, *, name: str, as_whole: bool, n: int = 1, by: signal.Signals = signal.SIGKILL):
    """End the engine's process in the middle of an answer, restart it, and continue to 100 tokens more than it had sampled:
    (responses, texts of what streamed, what it had sampled)."""
    recorder = AnswerRecorder(name)
    texts: dict[int, str] = {}

    async def read(num_tokens, sampled):
        asked = params(num_tokens, as_whole=as_whole, n=n)
        async for output in engine.generate(PROMPT, asked, request_id=name, sampled=sampled):
            recorder.add(output)
            for part in output.outputs:
                texts[part.index] = texts.get(part.index, "") + part.text

    async def half():
        while True:
            states = [s for k, s in engine._llm.output_processor.request_states.items() if name in k]
            if len(states) == n and all(s.detokenizer.num_output_tokens() >= 20 for s in states):
                return
            await asyncio.sleep(0.001)

    running = asyncio.create_task(read(ENDLESS, ()))
    await half()
    os.kill(process_of(engine), by)
    with pytest.raises(EngineLost) as lost:
        await asyncio.wait_for(running, PATIENCE_S)
    assert lost.value.by_itself == (by == signal.SIGSEGV) and by.name in str(lost.value)
    await engine.restart()
    sampled = lost.value.sampled if as_whole else recorder.so_far(n)
    assert len(sampled) == n and all(len(one.token_ids) >= 19 for one in sampled)
    engine.version = 5
    await engine._llm.update_weight_version("5")
    await asyncio.wait_for(read(max(len(one.token_ids) for one in sampled) + 100, sampled), PATIENCE_S)
    await engine._llm.update_weight_version("0")
    engine.version = 0
    return recorder.responses(version=-1), texts, sampled


@pytest.mark.parametrize(
    ("n", "as_whole", "by"),
    [
        pytest.param(1, False, signal.SIGSEGV, id="1-stream", marks=pytest.mark.long),
        pytest.param(1, True, signal.SIGTERM, id="1-whole", marks=pytest.mark.long),
        pytest.param(3, False, signal.SIGKILL, id="3-stream"),
        pytest.param(3, True, signal.SIGKILL, id="3-whole"),
        pytest.param(3, False, signal.SIGTERM, id="3-stream-told", marks=pytest.mark.long),
        pytest.param(3, True, signal.SIGTERM, id="3-whole-told"),
    ],
)
def test_an_answer_goes_on_where_the_engine_that_died_had_come_to(rollout, tiny_model, as_whole, n, by):
    engine, tokenizer = rollout.engine, rollout.engine._llm.tokenizer
    responses, texts, sampled = rollout.wait(
        kill_midway(engine, name=f"{by.name}-{as_whole}-{n}", as_whole=as_whole, n=n, by=by)
    )
    assert len(responses) == n
    whole = max(len(one.token_ids) for one in sampled) + 100
    for index, (response, before) in enumerate(zip(responses, sampled, strict=True)):
        ids = response.sampled_ids.tolist()
        assert len(ids) == whole and ids[: len(before.token_ids)] == before.token_ids
        assert response.versions.tolist() == [0] * len(before.token_ids) + [5] * (whole - len(before.token_ids))
        assert (recomputed(tiny_model, response) - torch.tensor(response.logprobs)).abs().max() < TOLERANCE
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert texts[index] == response.text and texts[index].rstrip("\ufffd") == text.rstrip("\ufffd")


def looks_at(engine, monkeypatch) -> Callable[[float], Awaitable[None]]:
    """Shortens what the watch on the engine's silence waits for; gives a wait until it has looked for so many of its seconds."""
    monkeypatch.setattr(engine_health, "STUCK_S", 1.0)
    monkeypatch.setattr(engine_health, "IDLE_S", 1.0)
    looks = 0

    def processor_time(processes):
        nonlocal looks
        looks += 1
        return engine_health.processor_time(processes)

    monkeypatch.setattr("mocked_server.vllm.engine.processor_time", processor_time)

    async def looked(seconds: float) -> None:
        until = looks + seconds / engine_health.LOOK_S
        while looks < until:
            await asyncio.sleep(0.05)

    return looked


@pytest.mark.parametrize("at", ["first", "last"])
def test_an_engine_whose_output_waits_for_a_disk_is_not_silent(rollout, monkeypatch, at):
    engine, process = rollout.engine, process_of(rollout.engine)
    looked = looks_at(engine, monkeypatch)

    async def read_slowly() -> int:
        number = 0
        async for output in engine.generate(PROMPT, params(8, as_whole=False), request_id=f"slow-{at}"):
            number += len(output.outputs[0].token_ids)
            if output.finished == (at == "last"):
                await looked(3.0)
        return number

    assert rollout.wait(asyncio.wait_for(read_slowly(), PATIENCE_S)) == 8
    assert engine.is_up and process_of(engine) == process


def test_a_stopped_engine_of_which_nothing_is_asked_is_seen_and_one_that_rests_is_left_alone(rollout, monkeypatch):
    engine, process = rollout.engine, process_of(rollout.engine)
    looked = looks_at(engine, monkeypatch)
    rollout.wait(asyncio.wait_for(looked(5.0), PATIENCE_S))
    assert engine.is_up and process_of(engine) == process
    os.kill(process, signal.SIGSTOP)
    rollout.wait(asyncio.wait_for(engine.until_dead(), PATIENCE_S))
    assert engine._see_ending() == STOPPED
    rollout.wait(engine.restart())
    assert engine.is_up


async def test_an_engine_that_ends_while_it_is_closed_leaves_nothing_open() -> None:
    closed: list[str] = []

    def shutdown(timeout: float | None) -> None:
        raise psutil.NoSuchProcess(1)

    def resources() -> None:
        closed.append("resources")

    resources.engine_dead = False
    engine = VLLMEngine(SimpleNamespace(lora_config=None))
    engine._llm = SimpleNamespace(
        output_handler=None,
        shutdown=shutdown,
        engine_core=SimpleNamespace(resources=resources),
    )
    await engine.close()
    assert closed == ["resources"] and engine._llm is None
