"""vLLM's parts make outputs of tokens that came from elsewhere; and vLLM's server reads what is asked of it. No engine runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from buffers.errors import RequestRefused
from mocked_server.servers.vllm_server import tokens_of, wire_params
from mocked_server.vllm.engine_requests import ServedRequests, Tokens
from tests.support.served_models import config_of


@pytest.fixture(scope="module")
def requests(tiny_model: Path) -> ServedRequests:
    return ServedRequests(config_of(tiny_model))


def sampling(**more: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(**{"max_tokens": 9, "logprobs": 0, "output_kind": RequestOutputKind.FINAL_ONLY, **more})


def tokens(*ids: int, **more: Any) -> Tokens:
    return Tokens(token_ids=list(ids), logprobs=[[(token, -0.5)] for token in ids], **more)


def test_the_servers_own_labels_decide_at_the_end(requests: ServedRequests) -> None:
    (one,), queue = requests.begin([40, 41], sampling(), request_id="a", extra={})
    assert not requests.feed(one, tokens(50, 51), version=3)
    assert [state.weight_version_starts for state in requests.under_way()] == [[("3", 0)]]
    assert requests.feed(one, tokens(52, finish_reason="length", versions=[("2", 0), ("3", 1)]), version=3)
    output = queue.get_nowait()
    (found,) = output.outputs
    assert output.finished and list(found.token_ids) == [50, 51, 52] and found.finish_reason == "length"
    assert [(span.version, span.start, span.end) for span in found.weight_versions] == [("2", 0, 1), ("3", 1, 3)]
    assert [entry[token].logprob for entry, token in zip(found.logprobs, found.token_ids)] == [-0.5] * 3
    assert not requests.under_way()


def test_a_stop_string_is_found_here_whether_or_not_the_server_has(requests: ServedRequests) -> None:
    text = requests.output_processor.tokenizer.decode([50, 51, 52])
    for told in ({}, {"finish_reason": "stop", "stop_reason": text[1:]}):
        (one,), queue = requests.begin([40, 41], sampling(stop=[text[1:]]), request_id="a", extra={})
        assert requests.feed(one, tokens(50, 51, 52, **told), version=0)
        (found,) = queue.get_nowait().outputs
        assert (found.text, found.finish_reason, found.stop_reason) == (text[:1], "stop", text[1:])


def test_what_was_sampled_until_a_loss_is_kept_for_another_engine(requests: ServedRequests) -> None:
    completions, _ = requests.begin([40, 41], sampling(n=2), request_id="a", extra={})
    assert [one.params.n for one in completions] == [1, 1]
    requests.feed(completions[1], tokens(50, 51), version=4)
    found = requests.lost("a")
    assert [(one.index, one.token_ids, one.versions) for one in found] == [(0, [], []), (1, [50, 51], [("4", 0)])]
    requests.end("a")
    assert not requests.under_way()


def test_what_is_for_other_engines_is_refused(requests: ServedRequests) -> None:
    for more, field in (({"logprobs": 99_999}, "logprobs"), ({}, "lora_request")):
        extra = {} if more else {"lora_request": object()}
        with pytest.raises(RequestRefused) as refused:
            requests.begin([40], sampling(**more), request_id="a", extra=extra)
        assert refused.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5, "seed": 7, "stop": ["a"], "stop_token_ids": [4], "min_tokens": 2, "ignore_eos": True},
        {"logit_bias": {3: 1.5}, "allowed_token_ids": [3, 4], "bad_words": ["b"], "presence_penalty": 0.25},
    ],
)
def test_vllms_server_reads_the_parameters_that_were_meant(fields: dict[str, Any]) -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    meant = sampling(**fields)
    read = GenerateRequest.model_validate({"token_ids": [1], "sampling_params": wire_params(meant)}).sampling_params
    for name in ("max_tokens", "logprobs", *fields):
        assert getattr(read, name) == getattr(meant, name), name
    assert read.detokenize == bool(meant.stop)


def test_the_likeliest_tokens_come_after_the_sampled_one_by_rank() -> None:
    best = [{"token_id": 9, "logprob": -3.0, "rank": 7}, {"token_id": 1, "logprob": -0.1, "rank": 1}]
    best.append({"token_id": 2, "logprob": -0.2, "rank": 2})
    content = [{"token_id": 9, "logprob": -9999.0, "rank": 7, "top_logprobs": best}]
    found = tokens_of({"index": 0, "token_ids": [9], "logprobs": {"content": content}}, wanted=2)
    assert found.logprobs == [[(9, float("-inf")), (1, -0.1), (2, -0.2)]] and found.ranks == [7]
