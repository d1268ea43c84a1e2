"""One answer out of the engine's outputs: what is recorded of it, and what leaves for the connection."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from buffers.errors import EngineError, RequestRefused
from mocked_server.request_context import AnswerRecorder, PendingReply


def completion(index: int, ids: list[int], text: str, **fields: Any) -> Any:
    logprobs = [{token: SimpleNamespace(logprob=fields.pop("logprob", -0.5))} for token in ids]
    given = {"finish_reason": None, "stop_reason": None, "weight_versions": None, **fields}
    return SimpleNamespace(index=index, token_ids=ids, text=text, logprobs=logprobs, **given)


def output(*completions: Any) -> Any:
    return SimpleNamespace(outputs=completions)


def test_completions_are_told_apart_by_their_index_not_by_who_came_first() -> None:
    recorder = AnswerRecorder("r")
    recorder.add(output(completion(1, [5], "b")))
    recorder.add(output(completion(0, [7], "a")))
    spans = [SimpleNamespace(version="3", start=0, end=1), SimpleNamespace(version="4", start=1, end=2)]
    recorder.add(output(completion(1, [6], "b", finish_reason="stop", stop_reason="</b>", weight_versions=spans)))
    first, second = recorder.responses(version=9)
    assert (first.text, first.sampled_ids.tolist(), first.finish_reason, first.versions.tolist()) == (
        "a",
        [7],
        "abort",
        [9],
    )
    assert (second.text, second.sampled_ids.tolist(), second.stop) == ("bb", [5, 6], "</b>")
    assert second.versions.tolist() == [3, 4] and second.logprobs.tolist() == [-0.5, -0.5]


def test_experts_come_with_the_last_output_of_a_completion() -> None:
    recorder, experts = AnswerRecorder("r"), np.zeros((3, 2, 2), np.uint8)
    recorder.add(output(completion(0, [7], "a", routed_experts=None), completion(1, [5], "b")))
    recorder.add(output(completion(0, [8], "a", finish_reason="stop", routed_experts=experts)))
    recorder.add(output(completion(1, [6], "b", finish_reason="stop")))
    assert [response.experts is experts for response in recorder.responses(version=0)] == [True, False]


def test_an_answer_without_a_token_to_sample_is_refused() -> None:
    with pytest.raises(RequestRefused, match="must leave a token to sample at every position, got none after 0 tokens"):
        AnswerRecorder("r").add(output(completion(0, [7], "a", logprob=float("-inf"))))


async def test_a_reply_ends_with_its_responses_and_is_not_abandoned_after_them() -> None:
    recorder, reply, stopped = AnswerRecorder("r"), PendingReply(), list[str]()
    recorder.add(output(completion(0, [7], "a", finish_reason="stop")))
    reply.on_abandon(lambda: stopped.append("generation"))
    await asyncio.to_thread(reply.push, "first")
    await asyncio.to_thread(reply.finish, *recorder.responses(version=0), last="last")
    reply.fail(EngineError("too late"))
    parts = [part async for part in reply.parts()]
    assert [part.output for part in parts] == ["first", "last"] and parts[0].responses is None
    assert [response.text for response in parts[1].responses or ()] == ["a"]
    reply.abandon()
    assert not reply.abandoned and stopped == []
