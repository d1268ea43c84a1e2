"""A vLLM server in a process of its own is an engine as the one in this process: over real HTTP, with the same model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from buffers.errors import EngineDied, EngineError, RequestRefused
from configs.tiny_model import make_tiny_model
from mocked_server.fleet.member import EngineLost, Sampled
from mocked_server.servers.http_client import Needs
from mocked_server.servers.server_engine import RunningServer, ServerEngine
from mocked_server.vllm.engine_requests import ServedRequests
from tests.mocked_server.servers.same_answers import assert_alike, logprobs_under
from tests.mocked_server.vllm.hosted.test_remote_engine import (
    CASES,
    LENGTHS,
    PROMPT,
    outputs_of,
    plain,
    sampling,
    until_given_up,
)
from tests.support.patience import PATIENCE_S
from tests.support.served_models import ENDLESS, LONG, START_S, Served, config_of, start_vllm, vllm_server

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NEEDS = Needs(max_model_len=1024, vocabulary=512, temperature=1.0, dtype="float32", learns=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """It begins with another model's weights: those of the run are loaded into it. The one server of the tests that is started as a
    user does."""
    folder = tmp_path_factory.mktemp("served")
    with vllm_server(make_tiny_model(folder / "other", seed=7), log=folder / "log.txt", imports=True) as served:
        yield served


def engine_for(url: str, model: Path, **more: Any) -> ServerEngine:
    place = RunningServer(url, timeout_s=more.pop("timeout_s", 60.0))
    return ServerEngine(place, ServedRequests(config_of(model)), model=model, needs=NEEDS, name="e7", **more)


@pytest.fixture(scope="module")
def engine(rollout: Any, served: Served, tiny_model: Path) -> Iterator[ServerEngine]:
    async def start() -> ServerEngine:
        engine = engine_for(served.url, tiny_model)
        await engine.start()
        return engine

    engine = rollout.wait(start())
    yield engine
    rollout.wait(engine.close())


@pytest.mark.parametrize("case", [case for case in CASES if case != "prompt too"])
def test_a_server_answers_as_an_engine_here(rollout: Any, engine: ServerEngine, case: str) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    fields = dict(CASES[case])
    if "structured" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(choice=fields.pop("structured"))
    here = rollout.wait(outputs_of(rollout.engine, sampling(**fields), f"here-{case}"))
    there = rollout.wait(outputs_of(engine, sampling(**fields), f"there-{case}"))
    assert_alike(plain(here), plain(there))
    assert {output.request_id for output in there} == {f"there-{case}"}
    assert len(there) == 1 or fields.get("kind") != "FINAL_ONLY"


def test_a_stop_string_cuts_the_same_text(rollout: Any, engine: ServerEngine) -> None:
    (whole,) = rollout.wait(outputs_of(rollout.engine, sampling(kind="FINAL_ONLY"), "all"))
    text = whole.outputs[0].text
    stop = text[len(text) // 2 :][:3]
    for kind in ("DELTA", "FINAL_ONLY"):
        params = {"stop": [stop], "kind": kind}
        here = rollout.wait(outputs_of(rollout.engine, sampling(**params), f"here-{kind}"))
        there = rollout.wait(outputs_of(engine, sampling(**params), f"there-{kind}"))
        assert_alike(plain(here), plain(there))
        assert there[-1].outputs[0].stop_reason == stop and there[-1].outputs[0].finish_reason == "stop"


def test_the_whole_so_far_comes_with_each_output(rollout: Any, engine: ServerEngine) -> None:
    for length in LENGTHS:
        params = sampling(kind="CUMULATIVE", max_tokens=length)
        outputs = rollout.wait(outputs_of(engine, params, f"so-far-{length}"))
        texts = [output.outputs[0].text for output in outputs]
        if len(texts) > 1:
            break
    assert len(texts) > 1 and all(later.startswith(text) for text, later in pairwise(texts))
    assert len(outputs[-1].outputs[0].token_ids) == length


def test_cached_prompt_tokens_are_told(rollout: Any, engine: ServerEngine) -> None:
    prompt = list(range(60, 60 + 300))
    rollout.wait(outputs_of(engine, sampling(), "first", prompt))
    again = rollout.wait(outputs_of(engine, sampling(), "again", prompt))
    assert again[-1].num_cached_tokens >= 128


@pytest.mark.parametrize("kind", ["DELTA", "FINAL_ONLY"])
def test_what_another_engine_sampled_is_continued(rollout: Any, engine: ServerEngine, kind: str) -> None:
    params = {"temperature": 0.0, "logprobs": 0, "flat_logprobs": True, "kind": kind}
    whole = rollout.wait(outputs_of(rollout.engine, sampling(**params), f"whole-{kind}"))
    (told,) = plain(whole)[0].values()
    parts = rollout.wait(
        outputs_of(rollout.engine, sampling(**{**params, "kind": "DELTA", "max_tokens": 10}), f"ten-{kind}")
    )
    sent = "".join(part.outputs[0].text for part in parts) if kind == "DELTA" else ""
    from vllm.logprobs import FlatLogprobs

    half = FlatLogprobs()
    half.extend(told["logprobs"][:10])
    sampled = Sampled(index=0, token_ids=told["ids"][:10], logprobs=half, versions=[("0", 0)], num_sent_chars=len(sent))
    rest = rollout.wait(outputs_of(engine, sampling(**params), f"rest-{kind}", sampled=[sampled]))
    (found,) = plain(rest)[0].values()
    begun = told["ids"][:10] if kind == "DELTA" else []
    assert sent + found["text"] == told["text"] and begun + found["ids"] == told["ids"]
    assert [(span.version, span.start, span.end) for span in found["versions"]] == [("0", 0, 24)]


def test_closing_the_iterator_ends_the_request_at_the_server(
    rollout: Any, engine: ServerEngine, served: Served
) -> None:
    async def is_running() -> bool:
        text = (await asyncio.to_thread(httpx.get, f"{served.url}/metrics", trust_env=False)).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
        return sum(float(line.split()[-1]) for line in lines) > 0

    async def leave_early() -> None:
        outputs = engine.generate(PROMPT, sampling(max_tokens=ENDLESS), request_id="leaver")
        async for _ in outputs:
            break
        assert engine.figures().running == 1
        await outputs.aclose()
        assert engine.figures().running == 0
        await until_given_up(engine, is_running)

    rollout.wait(leave_early())


def test_what_vllm_or_the_server_cannot_do_is_refused_with_its_field(rollout: Any, engine: ServerEngine) -> None:
    for fields, field in (({"logprobs": 100_000}, "logprobs"), ({"prompt_logprobs": 1}, "prompt_logprobs")):
        with pytest.raises(RequestRefused) as refused:
            rollout.wait(outputs_of(engine, sampling(**fields), "refused"))
        assert refused.value.field == field
    with pytest.raises(RequestRefused, match="lora_request is for the engines of this run"):
        rollout.wait(outputs_of(engine, sampling(), "adapter", lora_request=object()))
    assert engine.is_up and engine.figures().running == 0


def test_each_token_has_the_version_that_sampled_it_through_a_load(
    rollout: Any, engine: ServerEngine, tiny_model: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)

    async def swap(number: int) -> list[Any]:
        outputs: list[Any] = []
        stream = engine.generate(
            [*PROMPT, number], sampling(max_tokens=LONG, logprobs=0, seed=number), request_id=f"swapped-{number}"
        )
        async with aclosing(stream):
            async for output in stream:
                outputs.append(output)
                if number == 0 and len(outputs) == 5:
                    assert await engine.load_weights(other, version=5) > 0.0
                    assert engine.version == 5 and engine.figures().version == 5
        return outputs

    async def both() -> list[list[Any]]:
        return list(await asyncio.gather(swap(0), swap(1)))

    try:
        for number, outputs in enumerate(rollout.wait(both())):
            (told,) = plain(outputs)[0].values()
            first, second = told["versions"]
            assert (first.version, second.version) == ("0", "5") and 0 < first.end == second.start
            assert second.end == len(told["ids"]) == LONG
            ids = [*PROMPT, number, *told["ids"]]
            found = [entry[token].logprob for entry, token in zip(told["logprobs"], told["ids"])]
            before, after = (logprobs_under(model, ids, start=5) for model in (tiny_model, other))
            assert found[: first.end] == pytest.approx(before[: first.end], abs=1e-4)
            assert found[second.start :] == pytest.approx(after[second.start :], abs=1e-4)
    finally:
        rollout.wait(engine.load_weights(tiny_model, version=0))


def test_its_figures_are_counted_here(rollout: Any, engine: ServerEngine) -> None:
    before = engine.figures()
    rollout.wait(outputs_of(engine, sampling(max_tokens=30), "counted"))
    after = engine.figures()
    assert after.sampled_tokens - before.sampled_tokens == 30 and after.prompt_tokens - before.prompt_tokens == 4
    assert after.kv_capacity == 65_536 and after.is_up and after.name == "e7"


def test_many_requests_stream_at_once(rollout: Any, engine: ServerEngine) -> None:
    async def many() -> list[list[Any]]:
        return list(
            await asyncio.gather(
                *(outputs_of(engine, sampling(seed=seed, max_tokens=32), f"m{seed}") for seed in range(32))
            )
        )

    answers = [plain(outputs)[0][0]["ids"] for outputs in rollout.wait(many())]
    assert all(len(ids) == 32 for ids in answers) and len({tuple(ids) for ids in answers}) > 16


def test_a_killed_server_loses_nothing_and_its_successor_has_the_newest_weights(
    rollout: Any, tiny_model: Path, tmp_path: Path
) -> None:
    log, newest = tmp_path / "log.txt", make_tiny_model(tmp_path / "newest", seed=3)
    served = start_vllm(tiny_model, log=log)
    port = int(served.url.rpartition(":")[2])
    params = {"temperature": 0.0, "logprobs": 0, "flat_logprobs": True}

    async def lose(kind: str, engine: ServerEngine, *, kill: bool) -> EngineLost:
        async def read() -> None:
            stream = engine.generate(
                PROMPT, sampling(**params, max_tokens=ENDLESS, kind=kind), request_id=f"lost-{kind}"
            )
            async with aclosing(stream):
                while kill and engine.figures().tokens_held < 2 * len(PROMPT) + 40:
                    await anext(stream)
                if kill:
                    await asyncio.to_thread(served.kill)
                async for _ in stream:
                    pass

        with pytest.raises(EngineLost) as lost:
            await read()
        return lost.value

    async def through() -> None:
        nonlocal served
        engine = engine_for(served.url, tiny_model, timeout_s=START_S)
        await engine.start()
        whole = asyncio.create_task(lose("FINAL_ONLY", engine, kill=False))
        while engine.figures().tokens_held < len(PROMPT) + 10:  # some of it has come
            await asyncio.sleep(0.005)
        streamed = await lose("DELTA", engine, kill=True)
        (found,) = (await whole).sampled
        await asyncio.wait_for(engine.until_dead(), PATIENCE_S)
        assert not engine.is_up and streamed.life == ("e7", 1)
        assert len(found.token_ids) == len(found.logprobs) > 0 and found.versions == [("0", 0)]
        await engine.load_weights(newest, version=2)
        kept = min(len(found.token_ids), 600)  # the engine here has no room for many more
        begun = replace(found, token_ids=found.token_ids[:kept], logprobs=found.logprobs[:kept])
        whole_params = sampling(**params, max_tokens=kept + 300, kind="FINAL_ONLY")
        there = plain(await outputs_of(rollout.engine, whole_params, "undisturbed"))
        rest = await outputs_of(rollout.engine, whole_params, "continued", sampled=[begun])
        assert plain(rest)[0][0]["ids"] == there[0][0]["ids"] and plain(rest)[0][0]["text"] == there[0][0]["text"]
        served = start_vllm(tiny_model, log=log, port=port)
        await engine.restart()
        assert engine.is_up and engine.version == 2 and engine.figures().restarts == 1
        outputs = await outputs_of(engine, sampling(logprobs=0, flat_logprobs=True, kind="FINAL_ONLY"), "again")
        (told,) = plain(outputs)[0].values()
        found_logprobs = [entry[token].logprob for entry, token in zip(told["logprobs"], told["ids"])]
        assert found_logprobs == pytest.approx(logprobs_under(newest, [*PROMPT, *told["ids"]], start=4), abs=1e-4)
        await engine.close()

    try:
        served.wait()
        rollout.wait(through())
    finally:
        served.kill()


def test_an_answer_of_a_server_that_was_lost_says_nothing_of_its_successor(
    rollout: Any, served: Served, tiny_model: Path
) -> None:
    async def through() -> None:
        engine = engine_for(served.url, tiny_model)
        await engine.start()
        stream = engine.generate(PROMPT, sampling(max_tokens=ENDLESS), request_id="late")
        async with aclosing(stream):
            await anext(stream)
            await engine.restart()  # while its reader has not looked yet
            with pytest.raises(EngineLost):
                async for _ in stream:
                    pass
        assert engine.is_up
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.until_dead(), 0.2)
        assert plain(await outputs_of(engine, sampling(), "after"))
        await engine.close()

    rollout.wait(through())


def test_a_server_that_does_not_come_back_and_one_that_cannot_load_end_in_one_line(
    rollout: Any, served: Served, tiny_model: Path, tmp_path: Path
) -> None:
    async def refused(error: type[EngineError], url: str, **more: Any) -> str:
        engine = engine_for(url, tiny_model, **more)
        with pytest.raises(error) as found:
            await engine.start()
        await engine.close()
        return str(found.value)

    nowhere = rollout.wait(refused(EngineDied, "http://127.0.0.1:1"))
    assert nowhere.startswith(
        "rollout.engine must be the URL of a running server, got http://127.0.0.1:1, where nobody answers"
    )
    assert "\n" not in nowhere
