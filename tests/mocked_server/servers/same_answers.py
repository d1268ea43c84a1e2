"""What is compared of two engines' answers, and the policy's own log-probabilities of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def assert_alike(here: list[Any], there: list[Any]) -> None:
    """Both as `plain` of tests/mocked_server/vllm/hosted/test_remote_engine.py: log-probabilities up to rounding, for batches of
    other sizes, and all else exactly."""
    for index, one in here[0].items():
        other = there[0][index]
        assert one["ids"] == other["ids"]
        assert one["text"] == other["text"]
        assert (one["finish"], one["stop"], one["kind"]) == (other["finish"], other["stop"], other["kind"])
        assert [(span.version, span.start, span.end) for span in one["versions"]] == [
            (span.version, span.start, span.end) for span in other["versions"]
        ]
        assert len(one["logprobs"]) == len(other["logprobs"])
        for mine, its in zip(one["logprobs"], other["logprobs"]):
            assert mine.keys() == its.keys()
            for token in mine:
                assert its[token].logprob == pytest.approx(mine[token].logprob, abs=2e-5)
                assert (its[token].decoded_token, its[token].rank) == (mine[token].decoded_token, mine[token].rank)
    assert here[0].keys() == there[0].keys() and here[1:3] == there[1:3]


def logprobs_under(model: Path, ids: list[int], *, start: int) -> list[float]:
    """Log-probability of each of `ids` from `start` on, after those before, in the model of a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = policy(torch.tensor([ids])).logits[0]
    table = torch.log_softmax(logits, dim=-1)
    return [float(table[place - 1, ids[place]]) for place in range(start, len(ids))]
