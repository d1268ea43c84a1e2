"""Rules of mocked_server/vllm/engine_requests.py, with vLLM's own state of a request and no engine."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from mocked_server.fleet.member import Sampled
from mocked_server.vllm import engine_requests
from mocked_server.vllm.engine_requests import continuing

PROMPT = [40, 41, 42]


@pytest.fixture(scope="module")
def tokenizer(tiny_model) -> Any:
    engine_requests.install()
    return AutoTokenizer.from_pretrained(tiny_model)


def sampling(**more: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(max_tokens=100, output_kind=RequestOutputKind.DELTA, **more)


def state_of(tokenizer: Any, params: Any, ids: list[int], *, name: str) -> Any:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestState

    request = EngineCoreRequest(
        request_id=f"{name}-inner", prompt_token_ids=ids, mm_features=None, sampling_params=params,
        pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
        external_req_id=name,
    )  # fmt: skip
    return RequestState.from_new_request(tokenizer, request, None, None, 0, None, False, 1)


def sample(state: Any, ids: list[int], *, version: str) -> tuple[list[str], str | None]:
    """Feed ids one at a time, as the output handler does: (texts that are sent, stop string)."""
    texts = []
    for token in ids:
        state.track_weight_version(version)
        stop = state.detokenizer.update([token], False)
        texts.append(state.detokenizer.get_next_output_text(stop is not None, True))
        if stop is not None:
            return texts, stop
    return texts, None


TEXTS = {
    "plain": ("The exit is north.", {}),
    "characters of several tokens": ("ab \N{SNOWMAN}\N{GRINNING FACE} cd \u00e9\u4e2d", {}),
    "stop string": ("one two <end> three", {"stop": ["<end>"]}),
    "stop string kept": ("one two <end> three", {"stop": ["<end>"], "include_stop_str_in_output": True}),
    "stop string that comes too early": ("a <end> bcdefg <end> h", {"stop": ["<end>"], "min_tokens": 12}),
}


@pytest.mark.parametrize("what", TEXTS)
def test_text_and_end_are_the_same_wherever_the_first_engine_died(tokenizer, what):
    text, options = TEXTS[what]
    ids = [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]
    whole, stop = sample(state_of(tokenizer, sampling(**options), PROMPT, name="whole"), ids, version="1")
    assert (stop is not None) == ("stop" in options)
    for cut in range(len(whole)):
        first = state_of(tokenizer, sampling(**options), PROMPT, name="first")
        sent = "".join(sample(first, ids[:cut], version="1")[0])
        sampled = Sampled(
            index=2, token_ids=ids[:cut], logprobs=None, versions=[("1", 0)] if cut else [], num_sent_chars=len(sent)
        )
        rest = continuing("second", sampling(**options, n=3), prompt_len=len(PROMPT), sampled=sampled)
        assert rest.n == 1 and rest.max_tokens == 100 - cut
        second = state_of(tokenizer, rest, [*PROMPT, *ids[:cut]], name="second")
        texts, stopped = sample(second, ids[cut : len(whole)], version="2")
        assert sent + "".join(texts) == "".join(whole), f"cut after {cut} tokens"
        assert stopped == stop and second.request_index == 2 and second.prompt_token_ids == PROMPT
        assert second.detokenizer.output_token_ids == ids[: len(whole)]
        spans = [(span.version, span.start, span.end) for span in second._weight_version_spans()]
        assert spans == [span for span in (("1", 0, cut), ("2", cut, len(whole))) if span[1] < span[2]]
