"""What is advised when engine and learner disagree."""

from __future__ import annotations

import pytest

from configs.load import load_config
from learner.reporting.run_metrics import OF_A_GPU, OTHER_CLASS, drift_remedy


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ((), True),
        (("model.dtype=bfloat16",), False),
        (("rollout.engine=http://127.0.0.1:8000",), False),
        (("rollout.engine=sglang",), False),
    ],
)
def test_vllms_attention_in_float32_on_a_gpu_is_named_where_it_may_be_the_cause(
    settings: tuple[str, ...], told: bool
) -> None:
    assert (OF_A_GPU in drift_remedy(load_config(overrides=list(settings)))) == told


@pytest.mark.parametrize(
    ("settings", "told"), [((), True), (("model.dtype=bfloat16",), True), (("rollout.engine=sglang",), False)]
)
def test_vllms_other_class_of_a_model_is_named_for_a_runs_own_engine(settings: tuple[str, ...], told: bool) -> None:
    assert (OTHER_CLASS in drift_remedy(load_config(overrides=list(settings)))) == told
