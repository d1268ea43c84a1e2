"""SGLang's routes as an engine: over a scripted server that has SGLang's names and samples from a real model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from buffers.errors import EngineError, RequestRefused
from configs.schema import Config
from configs.tiny_model import make_tiny_model
from mocked_server.fleet.member import EngineLost, Sampled
from mocked_server.servers.http_client import Needs
from mocked_server.servers.server_engine import ServerEngine
from mocked_server.servers.sglang_server import SGLangProcess, arguments
from mocked_server.vllm.engine_requests import ServedRequests, Tokens
from tests.mocked_server.servers.same_answers import assert_alike, logprobs_under
from tests.mocked_server.servers.sglang_names import ARGUMENTS
from tests.mocked_server.vllm.hosted.test_remote_engine import PROMPT, outputs_of, plain, sampling, until_given_up
from tests.support.patience import PATIENCE_S
from tests.support.served_models import config_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROGRAM = (sys.executable, "-m", "tests.mocked_server.servers.scripted_sglang")
GREEDY = {"temperature": 0.0, "seed": None}


def engine_for(model: Path, log: Path, *more: str) -> ServerEngine:
    config = Config.model_validate({"rollout": {"engine": "sglang", "max_tokens": 256, "max_model_len": 1024}})
    place = SGLangProcess(config, model=model, devices=[], log=log, program=PROGRAM + more)
    needs = Needs(max_model_len=1024, vocabulary=512, temperature=1.0, dtype="float32", learns=True)
    return ServerEngine(place, ServedRequests(config_of(model)), model=model, needs=needs, name="e3")


@pytest.fixture(scope="module", params=["cumulative", "incremental"])
def engine(
    rollout: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ServerEngine]:
    more = ("--incremental-streaming-output",) if request.param == "incremental" else ()

    async def start() -> ServerEngine:
        engine = engine_for(tiny_model, tmp_path_factory.mktemp("sglang") / "log.txt", *more)
        await engine.start()
        return engine

    engine = rollout.wait(start())
    yield engine
    rollout.wait(engine.close())


CASES: dict[str, dict[str, Any]] = {
    "deltas": {},
    "flat": {"logprobs": 0, "flat_logprobs": True},
    "tables": {"logprobs": 2},
    "whole": {"logprobs": 1, "kind": "FINAL_ONLY"},
    "without text": {"detokenize": False, "logprobs": 1},
    "stop token": {"stop_token_ids": list(range(300)), "logprobs": 0, "ignore_eos": False},
}


@pytest.mark.parametrize("case", CASES)
def test_a_server_answers_as_an_engine_here(rollout: Any, engine: ServerEngine, case: str) -> None:
    fields = GREEDY | CASES[case]
    here = plain(rollout.wait(outputs_of(rollout.engine, sampling(**fields), f"here-{case}")))
    there = plain(rollout.wait(outputs_of(engine, sampling(**fields), f"there-{case}")))
    if fields.get("logprobs") == 0:  # SGLang does not say the rank
        for part in (*here[0].values(), *there[0].values()):
            for entry in part["logprobs"]:
                next(iter(entry.values())).rank = None
    assert_alike(here, there)


def test_several_completions_are_requests_of_their_own(rollout: Any, engine: ServerEngine) -> None:
    (output,) = rollout.wait(outputs_of(engine, sampling(n=3, logprobs=0, kind="FINAL_ONLY"), "three"))
    ids = [tuple(one.token_ids) for one in output.outputs]
    assert (
        [one.index for one in output.outputs] == [0, 1, 2] and len(set(ids)) == 3 and {len(one) for one in ids} == {24}
    )


def test_a_stop_string_is_found_here_and_ends_the_request_at_the_server(rollout: Any, engine: ServerEngine) -> None:
    (whole,) = rollout.wait(outputs_of(rollout.engine, sampling(**GREEDY, kind="FINAL_ONLY"), "all"))
    text = whole.outputs[0].text
    params = {**GREEDY, "stop": [text[len(text) // 2 :][:3]], "max_tokens": 900}
    here = rollout.wait(outputs_of(rollout.engine, sampling(**params), "here-stop"))
    there = rollout.wait(outputs_of(engine, sampling(**params), "there-stop"))
    assert_alike(plain(here), plain(there))
    assert there[-1].outputs[0].stop_reason == params["stop"][0]
    rollout.wait(until_given_up(engine, samples_at(engine)))


def samples_at(engine: ServerEngine) -> Callable[[], Awaitable[bool]]:
    """Whether its server still samples for a request."""

    async def is_sampling() -> bool:
        told = (await asyncio.to_thread(httpx.get, f"{engine._url}/server_info", trust_env=False)).json()
        return bool(told["internal_states"][0]["running"])

    return is_sampling


def test_closing_the_iterator_ends_the_request_at_the_server(rollout: Any, engine: ServerEngine) -> None:
    async def leave_early() -> None:
        outputs = engine.generate(PROMPT, sampling(max_tokens=900), request_id="leaver")
        await anext(outputs)
        assert engine.figures().running == 1
        await outputs.aclose()
        await until_given_up(engine, samples_at(engine))

    rollout.wait(leave_early())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"allowed_token_ids": [3]}, "allowed_token_ids"),
        ({"structured": ["a", "b"]}, "structured_outputs"),
        ({"stop_token_ids": [3]}, "stop_token_ids"),
    ],
)
def test_what_sglang_does_otherwise_is_refused_with_its_field(
    rollout: Any, engine: ServerEngine, fields: dict[str, Any], field: str
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    fields = dict(fields)
    if "structured" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(choice=fields.pop("structured"))
    with pytest.raises(RequestRefused) as refused:
        rollout.wait(outputs_of(engine, sampling(**fields), "refused"))
    assert refused.value.field == field and engine.is_up


@pytest.mark.parametrize("kind", ["DELTA", "FINAL_ONLY"])
def test_what_another_engine_sampled_is_continued(rollout: Any, engine: ServerEngine, kind: str) -> None:
    (whole,) = rollout.wait(outputs_of(rollout.engine, sampling(**GREEDY, kind="FINAL_ONLY"), f"whole-{kind}"))
    ids = list(whole.outputs[0].token_ids)
    sampled = Sampled(index=0, token_ids=ids[:10], logprobs=None, versions=[("0", 0)])
    rest = rollout.wait(outputs_of(engine, sampling(**GREEDY, kind=kind), f"rest-{kind}", sampled=[sampled]))
    (found,) = plain(rest)[0].values()
    assert (ids[:10] if kind == "DELTA" else []) + found["ids"] == ids
    assert [(span.version, span.start, span.end) for span in found["versions"]] == [("0", 0, 24)]


def test_each_token_has_the_version_that_sampled_it_through_a_load(
    rollout: Any, engine: ServerEngine, tiny_model: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)

    async def swap() -> list[Any]:
        outputs: list[Any] = []
        stream = engine.generate(PROMPT, sampling(max_tokens=400, logprobs=0), request_id="swapped")
        async with aclosing(stream):
            async for output in stream:
                outputs.append(output)
                if len(outputs) == 5:
                    assert await engine.load_weights(other, version=5) > 0.0
        return outputs

    try:
        (told,) = plain(rollout.wait(swap()))[0].values()
        first, second = told["versions"]
        assert (first.version, second.version) == ("0", "5") and 0 < first.end == second.start
        assert second.end == len(told["ids"]) == 400 and engine.version == 5
        found = [entry[token].logprob for entry, token in zip(told["logprobs"], told["ids"])]
        before, after = (logprobs_under(model, [*PROMPT, *told["ids"]], start=4) for model in (tiny_model, other))
        assert found[: first.end] == pytest.approx(before[: first.end], abs=1e-4)
        assert found[second.start :] == pytest.approx(after[second.start :], abs=1e-4)
    finally:
        rollout.wait(engine.load_weights(tiny_model, version=0))


def test_a_killed_server_is_started_again_with_the_newest_weights_and_one_that_cannot_load_stays_paused(
    rollout: Any, tiny_model: Path, tmp_path: Path
) -> None:
    newest = make_tiny_model(tmp_path / "newest", seed=3)

    async def through() -> None:
        engine = engine_for(tiny_model, tmp_path / "log.txt")
        await engine.start()
        place: Any = engine._place
        stream = engine.generate(PROMPT, sampling(max_tokens=900), request_id="lost")
        await anext(stream)
        place._process.kill()
        with pytest.raises(EngineLost):
            async for _ in stream:
                pass
        await asyncio.wait_for(engine.until_dead(), PATIENCE_S)
        await engine.load_weights(newest, version=2)
        await engine.restart()
        assert engine.is_up and engine.version == 2 and engine.figures().restarts == 1
        outputs = await outputs_of(engine, sampling(logprobs=0), "again")
        (told,) = plain(outputs)[0].values()
        found = [entry[token].logprob for entry, token in zip(told["logprobs"], told["ids"])]
        assert found == pytest.approx(logprobs_under(newest, [*PROMPT, *told["ids"]], start=4), abs=1e-4)
        with pytest.raises(EngineError, match="must be a server that can load the run's weights"):
            await engine.load_weights(tmp_path / "empty", version=3)
        assert engine.version == 2
        process = place._process
        await engine.close()
        assert process.poll() is not None

    rollout.wait(through())


def test_an_answer_that_a_server_gives_up_is_no_end_of_it(
    rollout: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def through() -> None:
        engine = engine_for(tiny_model, tmp_path / "log.txt")
        await engine.start()
        server: Any = engine._server
        sample = server.sample

        async def given_up(completion: Any) -> AsyncGenerator[Tokens, None]:
            async with aclosing(sample(completion)) as stream:
                async for tokens in stream:
                    yield tokens
                    yield Tokens(token_ids=[], finish_reason="abort")

        monkeypatch.setattr(server, "sample", given_up)
        with pytest.raises(EngineLost, match="gave its requests up") as lost:
            await outputs_of(engine, sampling(max_tokens=900, kind="FINAL_ONLY"), "given-up")
        (sampled,) = lost.value.sampled
        assert len(sampled.token_ids) == 1 and not lost.value.by_itself
        await asyncio.wait_for(engine.until_dead(), PATIENCE_S)
        await engine.restart()
        (told,) = plain(await outputs_of(engine, sampling(max_tokens=8), "again"))[0].values()
        assert len(told["ids"]) == 8
        await engine.close()

    rollout.wait(through())


def test_the_command_line_has_sglangs_arguments(tmp_path: Path) -> None:
    settings = {"engine": "sglang", "max_tokens": 8, "gpu_memory_utilization": 0.5, "tensor_parallel": 2}
    config = Config.model_validate({"rollout": settings, "model": {"dtype": "bfloat16"}})
    words = arguments(config, model=tmp_path, port=5)
    assert words.pop() == "--enable-fp32-lm-head"
    told = dict(zip(words[::2], words[1::2], strict=True))
    assert {"--enable-fp32-lm-head", *told} <= ARGUMENTS
    assert (told["--tp-size"], told["--mem-fraction-static"], told["--dtype"]) == ("2", "0.5", "bfloat16")
    plain = Config.model_validate({"rollout": settings})
    assert "--enable-fp32-lm-head" not in arguments(plain, model=tmp_path, port=5), "in float32 it already is"


def test_a_server_that_ends_while_it_starts_is_told_with_its_last_words(rollout: Any, tmp_path: Path) -> None:
    config = Config.model_validate({"rollout": {"engine": "sglang"}})
    program = (sys.executable, "-c", "raise SystemExit('no cards here')")
    place = SGLangProcess(config, model=tmp_path, devices=[], log=tmp_path / "log.txt", program=program)
    with pytest.raises(EngineError, match=r"SGLang ended with code 1 while it started.*no cards here"):
        rollout.wait(place.start())
    rollout.wait(place.end())
