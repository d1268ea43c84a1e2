"""Rules of mocked_server/vllm/sampling_rules.py over every field of vLLM's SamplingParams, those of later versions too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from buffers.errors import RequestRefused
from configs.schema import RolloutConfig
from mocked_server.vllm.sampling_rules import FORCING, LEFT_TO_THE_POLICY, NEUTRAL, UNFORCED
from tests.mocked_server.conversation.test_continuation import episode

pytestmark = pytest.mark.seconds  # imports vLLM

REFUSED = {"repetition_detection", "trace_decode_token_ids"}
OTHER: dict[str, Any] = {
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "logit_bias": {1: 1.0},
    "min_tokens": 3,
    "thinking_token_budget": 5,
    "trace_decode_token_ids": [1],
    "watermarking": True,
}


@pytest.fixture
def rules() -> Any:
    from mocked_server.vllm.sampling_rules import SamplingRules

    processor = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: 9), _validate_params=lambda params, tasks: params.verify
    )
    return SamplingRules(processor, rollout=RolloutConfig(max_model_len=64, max_tokens=32))


def apply(rules: Any, params: Any, **options: Any) -> Any:
    return rules.apply(params, prompt=np.array([1, 2], np.int32), live=episode(), **options)


def test_every_field_of_vllms_is_the_runs_own_marked_left_to_the_policy_or_refused() -> None:
    from vllm.sampling_params import SamplingParams

    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert fields == UNFORCED | set(NEUTRAL) | set(FORCING) | set(LEFT_TO_THE_POLICY) | REFUSED


@pytest.mark.parametrize("field", [*FORCING, *NEUTRAL])
def test_what_takes_the_choice_is_not_trained(rules: Any, field: str) -> None:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    values = {**OTHER, **dict.fromkeys(NEUTRAL, 0.5), "structured_outputs": StructuredOutputsParams(regex="a")}
    assert apply(rules, SamplingParams(**{field: values[field]})) == (3 if field == "min_tokens" else None)


@pytest.mark.parametrize("field", LEFT_TO_THE_POLICY)
def test_a_budget_of_thoughts_is_left_to_the_policy(rules: Any, field: str) -> None:
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(**{field: OTHER[field]})
    assert apply(rules, params) == 0 and getattr(params, field) is None


def test_what_asks_for_nothing_is_trained(rules: Any) -> None:
    from vllm.sampling_params import SamplingParams

    for asked in ({}, {"stop": ["x"], "seed": 1, "n": 2}, {"logit_bias": {}, "bad_words": [], "ignore_eos": True}):
        assert apply(rules, SamplingParams(**asked)) == 0


def test_a_field_that_is_not_known_is_refused_by_name(rules: Any) -> None:
    from vllm.sampling_params import RepetitionDetectionParams, SamplingParams

    fields = [("steering", list[float] | None, None), ("nudge", float, 1.0)]
    Later = msgspec.defstruct("Later", fields, bases=(SamplingParams,), kw_only=True)
    assert apply(rules_for(rules, Later()), Later()) == 0
    for params, field in (
        (Later(steering=[0.5]), "steering"),
        (Later(nudge=0.9), "nudge"),
        (Later(trace_decode_token_ids=[1]), "trace_decode_token_ids"),
        (
            Later(repetition_detection=RepetitionDetectionParams(max_pattern_size=2, min_count=2)),
            "repetition_detection",
        ),
    ):
        with pytest.raises(RequestRefused, match=f"{field} is not served"):
            apply(rules_for(rules, Later()), params)


def rules_for(rules: Any, neutral: Any) -> Any:
    rules._neutral = neutral
    return rules


def test_several_answers_are_judged_by_the_runs_temperature(rules: Any) -> None:
    from vllm.sampling_params import SamplingParams

    from mocked_server.vllm.sampling_rules import leave_limits_to_the_run

    leave_limits_to_the_run()
    params = SamplingParams(temperature=0.0, n=2)
    assert apply(rules, params) == 0 and params.temperature == 1.0
    greedy = episode()
    greedy.episode = SimpleNamespace(greedy=True, episode_id="g")  # type: ignore[assignment]
    with pytest.raises(RequestRefused, match="n must be 1 in an episode that is played greedily, got 2"):
        rules.apply(SamplingParams(temperature=1.0, n=2), prompt=np.array([1], np.int32), live=greedy)
