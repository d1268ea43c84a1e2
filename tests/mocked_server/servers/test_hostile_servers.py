"""What a server elsewhere says that no sampler of the run's model can have said fails that request, and nothing else: it is neither
trained, nor waited for, nor does it end the run. No engine runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from buffers.errors import EngineError, RequestFailed
from mocked_server.fleet.member import EngineLost
from mocked_server.servers.http_client import Needs, ServerFacts
from mocked_server.servers.server_engine import RunningServer, ServerEngine
from mocked_server.servers.sglang_server import SGLangServer
from mocked_server.servers.vllm_server import VLLMServer
from mocked_server.vllm.engine_requests import ServedRequests
from tests.support.patience import PATIENCE_S
from tests.support.served_models import config_of

URL = "http://127.0.0.1:1"
Events = Iterable[Mapping[str, Any]]


class Says:
    """A client whose server answers every request with these events."""

    url = URL

    def __init__(self, events: Events) -> None:
        self._events = events

    async def events(self, _path: str, _body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        for event in self._events:
            await asyncio.sleep(0)
            yield event

    async def close(self) -> None: ...


@pytest.fixture(scope="module")
def requests(tiny_model: Path) -> ServedRequests:
    return ServedRequests(config_of(tiny_model))


async def answer(requests: ServedRequests, events: Events, *, kind: type[VLLMServer] | type[SGLangServer]) -> list[int]:
    """The tokens that come of it, at most 24."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    needs = Needs(max_model_len=1024, vocabulary=512, temperature=1.0, dtype="float32", learns=True)
    engine = ServerEngine(RunningServer(URL, timeout_s=1.0), requests, model=Path("model"), needs=needs)
    client: Any = Says(events)
    engine._client, engine._server, engine._is_up = client, kind(client), True
    engine._facts = ServerFacts(software="vLLM", max_model_len=None, kv_capacity=0)
    params = SamplingParams(max_tokens=24, logprobs=0, output_kind=RequestOutputKind.DELTA)
    async with asyncio.timeout(PATIENCE_S), aclosing(engine.generate([1, 2, 3], params, request_id="one")) as outputs:
        return [token async for output in outputs for one in output.outputs for token in one.token_ids]


def of_vllm(*ids: object, entry: Mapping[str, Any] | None = None, **more: object) -> dict[str, Any]:
    entries = [{"token_id": each, "logprob": -1.0, "rank": 1, "top_logprobs": [], **(entry or {})} for each in ids]
    return {
        "choices": [{"token_ids": [*ids], "logprobs": {"content": entries}, "finish_reason": "length", **more}],
    }


def of_sglang(*ids: object, value: object = -1.0, **meta: object) -> dict[str, Any]:
    told = {"completion_tokens": len(ids), "output_token_logprobs": [[value, each, None] for each in ids]}
    return {"output_ids": [*ids], "meta_info": {**told, "finish_reason": {"type": "length"}, **meta}}


def endless() -> Iterator[dict[str, Any]]:
    while True:
        yield of_vllm(5, finish_reason=None)


def usage(told: object) -> list[dict[str, Any]]:
    return [of_vllm(5), {"choices": [], "usage": told}]


def versions(version: object, start: object) -> dict[str, Any]:
    return of_vllm(5, weight_versions=[{"version": version, "start": start}])


VLLM: dict[str, Events] = {
    "an id below": [of_vllm(-1)],
    "an id beyond the vocabulary": [of_vllm(512)],
    "an id that no integer holds": [of_vllm(2**70)],
    "a text as id": [of_vllm("5")],
    "a truth as id": [of_vllm(True)],
    "no number": [of_vllm(5, entry={"logprob": math.nan})],
    "a probability above one": [of_vllm(5, entry={"logprob": 3.0})],
    "a text as log-probability": [of_vllm(5, entry={"logprob": "x"})],
    "none": [of_vllm(5, entry={"logprob": None})],
    "a rank below": [of_vllm(5, entry={"rank": -5})],
    "a list as rank": [of_vllm(5, entry={"rank": [1]})],
    "more than was asked for": [of_vllm(*[5] * 25)],
    "no end": endless(),
    "another reason": [of_vllm(5, finish_reason="banana")],
    "a number as reason": [of_vllm(5, finish_reason=5)],
    "a list as stop": [of_vllm(5, finish_reason="stop", stop_reason=[1])],
    "a word as version": [versions("zzz", 0)],
    "a version that is to come": [versions("1", 0)],
    "a version of many digits": [versions("9" * 5000, 0)],
    "a version before the start": [versions("0", -5)],
    "a version after the end": [versions("0", 10**9)],
    "versions as an object": [of_vllm(5, weight_versions={"a": 1})],
    "cached tokens as text": usage({"prompt_tokens_details": {"cached_tokens": "x"}}),
    "fewer than no cached tokens": usage({"prompt_tokens_details": {"cached_tokens": -(10**30)}}),
    "usage as text": usage("x"),
    "choices as text": [{"choices": "abc"}],
    "choices of text": [{"choices": ["abc"]}],
}
SGLANG: dict[str, Events] = {
    "an id below": [of_sglang(-1)],
    "an id beyond the vocabulary": [of_sglang(512)],
    "no number": [of_sglang(5, value=math.nan)],
    "a probability above one": [of_sglang(5, value=2.0)],
    "a text as reason": [of_sglang(5, finish_reason="length")],
    "a list as stop of a text that ended": [of_sglang(5, finish_reason={"type": "banana"})],
    "a word as status": [of_sglang(5, finish_reason={"type": "abort", "status_code": "zz"})],
    "a version that is none": [of_sglang(5, weight_versions=[{"version": None, "start": "x"}])],
    "a list as answer": [{"output_ids": [5], "meta_info": []}],
    "nothing": [{}],
}


@pytest.mark.parametrize("case", VLLM)
async def test_what_no_vllm_says_fails_its_request(requests: ServedRequests, case: str) -> None:
    with pytest.raises(RequestFailed, match=r"the server at .* answered what cannot be read"):
        await answer(requests, VLLM[case], kind=VLLMServer)
    assert await answer(requests, [of_vllm(7, finish_reason=None), of_vllm(8)], kind=VLLMServer) == [7, 8]


@pytest.mark.parametrize("case", SGLANG)
async def test_what_no_sglang_says_fails_its_request(requests: ServedRequests, case: str) -> None:
    with pytest.raises(RequestFailed, match=r"the server at .* answered what cannot be read"):
        await answer(requests, SGLANG[case], kind=SGLangServer)
    assert await answer(requests, [of_sglang(7), of_sglang(7, 8)][1:], kind=SGLangServer) == [7, 8]


@pytest.mark.parametrize("events", [[], [of_vllm(5, finish_reason=None)], [{"choices": []}]])
async def test_an_answer_that_ends_in_the_middle_is_continued_elsewhere(
    requests: ServedRequests, events: Events
) -> None:
    with pytest.raises(EngineLost):
        await answer(requests, events, kind=VLLMServer)


@pytest.mark.parametrize("entries", [[], [{"token_id": 6, "logprob": -1.0}]])
async def test_tokens_without_their_log_probabilities_are_no_answer(
    requests: ServedRequests, entries: list[dict[str, Any]]
) -> None:
    with pytest.raises(EngineError, match="must give a log-probability for each token"):
        await answer(requests, [of_vllm(5, logprobs={"content": entries})], kind=VLLMServer)
