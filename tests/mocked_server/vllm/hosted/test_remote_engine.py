"""An engine behind the wire answers as the same engine in this process: over the session's one real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from buffers.errors import RequestFailed, RequestRefused
from buffers.wire.address import Way
from configs.tiny_model import make_tiny_model
from mocked_server.fleet.member import EngineLost, Sampled
from mocked_server.vllm.hosted.outputs import VLLMCodec, WireOutput, logprobs_of, pack_logprobs
from mocked_server.vllm.hosted.remote_engine import RemoteEngine
from tests.mocked_server.fleet.hosts_here import SECRET, HostHere, Started
from tests.support.patience import PATIENCE_S
from tests.support.served_models import ENDLESS, LONG

pytestmark = pytest.mark.engine

PROMPT = [40, 41, 42, 43]
LENGTHS = (24, 96, 384, 1536)
"""Tokens of answers that are told apart from their parts: a reader who comes late gets several outputs as one."""


@pytest.fixture(scope="module", params=[Way.LOCAL, Way.ENCRYPTED])
def remote(rollout: Any, request: pytest.FixtureRequest) -> Iterator[RemoteEngine]:
    async def start() -> RemoteEngine:
        host = HostHere(Started(rollout.engine), VLLMCodec(), way=request.param)
        engine = RemoteEngine(host, VLLMCodec(), secret=SECRET, name="e7")
        await engine.start()
        return engine

    engine = rollout.wait(start())
    yield engine
    rollout.wait(engine.close())


@pytest.fixture(autouse=True)
def remote_is_up(request: pytest.FixtureRequest, rollout: Any) -> None:
    """What a failed test left of it is no matter of the next one."""
    remote = request.getfixturevalue("remote") if "remote" in request.fixturenames else None
    if remote is not None and not remote.is_up:
        rollout.wait(remote.restart())


def sampling(**more: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kind = RequestOutputKind[more.pop("kind", "DELTA")]
    return SamplingParams(**{"max_tokens": 24, "seed": 3, "ignore_eos": True, "output_kind": kind, **more})


async def outputs_of(engine: Any, params: Any, name: str, prompt: list[int] = PROMPT, **more: Any) -> list[Any]:
    stream: AsyncGenerator[Any, None] = engine.generate(prompt, params, request_id=name, **more)
    async with aclosing(stream):
        return [output async for output in stream]


async def until_given_up(engine: Any, is_under_way: Callable[[], Awaitable[bool]]) -> None:
    """Returns when a request is no longer under way. Others that share its steps say how long that took: it fails after 480 of
    them, and a request that is sampled to its end is longer."""
    for number in range(20):
        await outputs_of(engine, sampling(), f"beside-{number}")
        if not await is_under_way():
            return
    pytest.fail("the request that was left is still under way")


def leaver_at(engine: Any) -> Callable[[], Awaitable[bool]]:
    """Whether the request `leaver` is under way at this engine in this process."""

    async def is_under_way() -> bool:
        return any("leaver" in name for name in engine._llm.output_processor.request_states)

    return is_under_way


class WatchedCodec(VLLMCodec):
    """Says when each completion of its last request has begun."""

    last: Any = None

    def rebuilt(self, *given: Any, **named: Any) -> Any:
        self.last = super().rebuilt(*given, **named)
        return self.last

    async def until_begun(self, *, n: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.last is None or sum(bool(one.token_ids) for one in self.last.sampled()) < n:
                await asyncio.sleep(0.001)


def table(logprobs: Any) -> Any:
    return (
        None
        if logprobs is None
        else (type(logprobs).__name__, [None if each is None else dict(each) for each in logprobs])
    )


def plain(outputs: list[Any]) -> list[Any]:
    """All that a request's outputs say, deltas of one completion joined: how many tokens come at once is by chance."""
    told: dict[int, dict[str, Any]] = {}
    for output in outputs:
        for part in output.outputs:
            whole = told.setdefault(part.index, {"text": "", "ids": [], "logprobs": [], "kind": None})
            whole["text"] += part.text
            whole["ids"] += part.token_ids
            kind, entries = table(part.logprobs) or (None, [])
            whole["logprobs"] += entries
            whole |= {
                "kind": kind, "finish": part.finish_reason, "stop": part.stop_reason, "cumulative": part.cumulative_logprob,
                "versions": part.weight_versions,
            }  # fmt: skip
    last = outputs[-1]
    prompt = next((table(output.prompt_logprobs) for output in outputs if output.prompt_logprobs is not None), None)
    preemptions = getattr(last.metrics, "num_preemptions", None)
    return [dict(sorted(told.items())), last.finished, last.prompt_token_ids, prompt, preemptions]


CASES = {
    "deltas": {},
    "flat": {"logprobs": 0, "flat_logprobs": True},
    "tables": {"logprobs": 2},
    "whole": {"logprobs": 1, "kind": "FINAL_ONLY"},
    "several": {"n": 3, "logprobs": 0, "temperature": 1.0},
    "several, whole": {"n": 3, "logprobs": 0, "flat_logprobs": True, "kind": "FINAL_ONLY"},
    "without text": {"detokenize": False, "logprobs": 1},
    "prompt too": {"prompt_logprobs": 1, "kind": "FINAL_ONLY"},
    "numbers only": {"logprobs": 0, "extra_args": {"numbers_only": True}},
    "constrained": {"allowed_token_ids": [50, 51, 52], "logit_bias": {50: 2.0}, "bad_words": ["x"]},
    "choice": {"structured": ["north", "south"], "ignore_eos": False},
}


@pytest.mark.parametrize("case", CASES)
def test_an_engine_elsewhere_answers_as_one_here(rollout: Any, remote: RemoteEngine, case: str) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    fields = dict(CASES[case])
    if "structured" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(choice=fields.pop("structured"))
    is_whole = fields.get("kind") == "FINAL_ONLY"
    for length in LENGTHS:
        params = sampling(**{"max_tokens": length, **fields})
        here = rollout.wait(outputs_of(rollout.engine, params, f"here-{case}-{length}"))
        there = rollout.wait(outputs_of(remote, params, f"there-{case}-{length}"))
        assert plain(here) == plain(there)
        assert {output.request_id for output in there} == {f"there-{case}-{length}"}
        if len(there) > 1 or is_whole or case == "choice":
            break
    assert len(there) == 1 if is_whole else len(there) > 1 or case == "choice"


def test_a_stop_string_cuts_the_same_text(rollout: Any, remote: RemoteEngine) -> None:
    (whole,) = rollout.wait(outputs_of(rollout.engine, sampling(kind="FINAL_ONLY"), "all"))
    text = whole.outputs[0].text
    stop = text[len(text) // 2 :][:3]
    for kind in ("DELTA", "FINAL_ONLY"):
        params = {"stop": [stop], "kind": kind}
        here = rollout.wait(outputs_of(rollout.engine, sampling(**params), f"here-{kind}"))
        there = rollout.wait(outputs_of(remote, sampling(**params), f"there-{kind}"))
        assert plain(here) == plain(there)
        assert there[-1].outputs[0].stop_reason == stop and there[-1].outputs[0].finish_reason == "stop"


def test_the_whole_so_far_comes_with_each_output(rollout: Any, remote: RemoteEngine) -> None:
    for length in LENGTHS:
        params = sampling(kind="CUMULATIVE", max_tokens=length)
        outputs = rollout.wait(outputs_of(remote, params, f"so-far-{length}"))
        texts = [output.outputs[0].text for output in outputs]
        if len(texts) > 1:
            break
    assert len(texts) > 1 and all(later.startswith(text) for text, later in pairwise(texts))
    assert len(outputs[-1].outputs[0].token_ids) == length


def test_cached_prompt_tokens_are_told(rollout: Any, remote: RemoteEngine) -> None:
    prompt = list(range(60, 60 + 300))
    rollout.wait(outputs_of(remote, sampling(), "first", prompt))
    again = rollout.wait(outputs_of(remote, sampling(), "again", prompt))
    assert again[-1].num_cached_tokens >= 128


@pytest.mark.parametrize("kind", ["DELTA", "FINAL_ONLY"])
def test_what_another_engine_sampled_is_continued(rollout: Any, remote: RemoteEngine, kind: str) -> None:
    params = {"temperature": 0.0, "logprobs": 0, "flat_logprobs": True, "kind": kind}
    whole = rollout.wait(outputs_of(rollout.engine, sampling(**params), f"whole-{kind}"))
    (told,) = plain(whole)[0].values()
    from vllm.logprobs import FlatLogprobs

    half = FlatLogprobs()
    half.extend(told["logprobs"][:10])
    tokenizer_text = "" if kind == "FINAL_ONLY" else told["text"]
    parts = rollout.wait(
        outputs_of(rollout.engine, sampling(**{**params, "kind": "DELTA", "max_tokens": 10}), f"ten-{kind}")
    )
    sent = "".join(part.outputs[0].text for part in parts) if kind == "DELTA" else ""
    sampled = Sampled(
        index=0,
        token_ids=told["ids"][:10],
        logprobs=half,
        versions=[("0", 0)],
        num_sent_chars=len(sent),
        cumulative=None,
    )
    rest = rollout.wait(outputs_of(remote, sampling(**params), f"rest-{kind}", sampled=[sampled]))
    (found,) = plain(rest)[0].values()
    if kind == "DELTA":
        assert sent + found["text"] == tokenizer_text
        assert told["ids"][:10] + found["ids"] == told["ids"]
    else:
        assert found["text"] == told["text"] and found["ids"] == told["ids"]
        assert [list(each) for each in found["logprobs"]] == [list(each) for each in told["logprobs"]]
    assert [(span.version, span.start, span.end) for span in found["versions"]] == [("0", 0, 24)]


def test_closing_the_iterator_aborts_the_request(rollout: Any, remote: RemoteEngine) -> None:
    async def leave_early() -> None:
        outputs = remote.generate(PROMPT, sampling(max_tokens=ENDLESS), request_id="leaver")
        async for _ in outputs:
            break
        assert await leaver_at(rollout.engine)()
        await outputs.aclose()
        await until_given_up(remote, leaver_at(rollout.engine))
        assert remote._client is not None and not remote._client._pending

    rollout.wait(leave_early())


def test_a_request_that_vllm_refuses_is_refused_with_its_field(rollout: Any, remote: RemoteEngine) -> None:
    for engine in (rollout.engine, remote):
        with pytest.raises(RequestRefused) as refused:
            rollout.wait(outputs_of(engine, sampling(logprobs=100_000), "refused"))
        assert "logprobs" in str(refused.value) and refused.value.field == "logprobs"
    assert remote.is_up


def test_what_cannot_travel_fails_its_request_alone(rollout: Any, remote: RemoteEngine) -> None:
    for more in ({"thing": object()}, {"no_such_argument": 1}):
        with pytest.raises(RequestFailed):
            rollout.wait(outputs_of(remote, sampling(), "cannot", **more))
    assert plain(rollout.wait(outputs_of(remote, sampling(), "can")))[1] is True


def test_weights_are_loaded_under_running_requests_and_tokens_name_their_version(
    rollout: Any, remote: RemoteEngine, tiny_model: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)

    async def swap() -> list[Any]:
        stream = remote.generate(PROMPT, sampling(max_tokens=LONG), request_id="swapped")
        outputs: list[Any] = []
        async with aclosing(stream):
            async for output in stream:
                outputs.append(output)
                if len(outputs) == 1:
                    await remote.load_weights(other, version=5)
                    assert remote.version == 5 and remote.figures().version == 5
        return outputs

    try:
        (told,) = plain(rollout.wait(swap()))[0].values()
        assert [span.version for span in told["versions"]] == ["0", "5"]
        assert told["versions"][-1].end == len(told["ids"]) == LONG
        rollout.wait(remote.sleep())
        rollout.wait(remote.wake_up())
    finally:
        rollout.wait(remote.load_weights(tiny_model, version=0))


def test_its_figures_are_the_engines(rollout: Any, remote: RemoteEngine) -> None:
    async def is_seen(number: int) -> bool:
        stream = remote.generate(PROMPT, sampling(max_tokens=ENDLESS), request_id=f"long-{number}")
        async with aclosing(stream):
            async for _ in stream:
                if remote.figures().running == 1:
                    return True
        return False

    async def look() -> None:
        before = remote.figures()
        async with asyncio.timeout(PATIENCE_S):
            number = 0
            while not await is_seen(number):  # on a quick machine it ends before the next figures come
                number += 1
        assert remote.figures().is_up and before.name == "e7"

    rollout.wait(look())


def test_many_streams_share_batches(rollout: Any, remote: RemoteEngine) -> None:
    async def many() -> list[list[Any]]:
        requests = [outputs_of(remote, sampling(seed=seed, max_tokens=64), f"many-{seed}") for seed in range(16)]
        return list(await asyncio.gather(*requests))

    async def taken() -> int:
        assert remote.host.host is not None  # type: ignore[attr-defined]
        (client,) = remote.host.host._callers.values()  # type: ignore[attr-defined]
        return int(client.sent)

    before = rollout.wait(taken())
    answers = rollout.wait(many())
    batches = rollout.wait(taken()) - before
    assert all(len(plain(answer)[0][0]["ids"]) == 64 for answer in answers)
    assert batches < 16 * 64 / 4, "outputs of a step go together"


def test_a_lost_host_tells_what_was_sampled(rollout: Any, remote: RemoteEngine) -> None:
    async def lose(kind: str, n: int) -> EngineLost:
        host = HostHere(Started(rollout.engine), VLLMCodec())
        codec = WatchedCodec()
        engine = RemoteEngine(host, codec, secret=SECRET, name="e8")
        await engine.start()
        params = sampling(max_tokens=ENDLESS, kind=kind, logprobs=0, n=n)
        stream = engine.generate(PROMPT, params, request_id=f"lost-{kind}-{n}")
        seen: list[Any] = []

        async def read() -> None:
            async for output in stream:
                seen.extend(output.outputs)

        reading = asyncio.create_task(read())
        await codec.until_begun(n=n)
        assert host.host is not None and host.host._listener is not None
        await asyncio.to_thread(host.host._listener.close)
        with pytest.raises(EngineLost, match="the host of engine e8 was lost") as lost:
            await asyncio.wait_for(reading, PATIENCE_S)
        await asyncio.wait_for(engine.until_dead(), PATIENCE_S)
        assert not engine.is_up and not engine.figures().is_up
        with pytest.raises(EngineLost, match="engine e8 is down"):
            await anext(engine.generate(PROMPT, params, request_id="late"))
        await engine.close()
        if kind == "DELTA":
            ids = [token for each in seen if each.index == 0 for token in each.token_ids]
            assert lost.value.sampled[0].token_ids == ids
            assert lost.value.sampled[0].num_sent_chars == sum(len(each.text) for each in seen if each.index == 0)
        else:
            assert not seen
        return lost.value

    for kind, n in (("DELTA", 1), ("FINAL_ONLY", 1), ("FINAL_ONLY", 2)):
        lost = rollout.wait(lose(kind, n))
        assert lost.life == ("e8", 1) and [one.index for one in lost.sampled] == list(range(n))
        for one in lost.sampled:
            assert len(one.logprobs) == len(one.token_ids) > 0
            assert one.versions == [("0", 0)] and one.output is None


def test_log_probabilities_travel_exactly() -> None:
    from vllm.logprobs import FlatLogprobs, Logprob

    tables = [None, {}, {5: Logprob(-0.1, 1, "a"), 7: Logprob(float("-inf"), None, None)}]
    assert logprobs_of(pack_logprobs(tables)) == tables
    flat = FlatLogprobs()
    flat.extend(tables[2:] * 2)
    assert logprobs_of(pack_logprobs(flat)) == flat and logprobs_of(pack_logprobs(None)) is None
    assert logprobs_of(pack_logprobs([])) == []


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("kind", ["DELTA", "FINAL_ONLY"])
def test_experts_travel_exactly_with_the_end_of_a_completion(kind: str, dtype: Any) -> None:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    codec, experts = VLLMCodec(), np.arange(24, dtype=dtype).reshape(3, 4, 2)
    rebuilt = codec.rebuilt([1, 2], SamplingParams(output_kind=RequestOutputKind[kind]), request_id="r", sampled=())
    outputs = []
    for ids, finished in (([7], False), ([8], True)):
        completion = CompletionOutput(0, "a", ids, None, None, finish_reason="stop" if finished else None)
        completion.routed_experts = experts if finished else None
        packed = codec.pack_output(RequestOutput("r", None, [1, 2], None, [completion], finished))
        assert (packed.completions[0].experts is not None) == finished
        wire = msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=WireOutput)
        outputs.append(rebuilt.add(wire))
        without = codec.pack_output(RequestOutput("r", None, [1, 2], None, [completion], finished), experts=False)
        assert without.completions[0].experts is None
    last = outputs[-1].outputs[0].routed_experts
    assert last.dtype == dtype and (last == experts).all()
