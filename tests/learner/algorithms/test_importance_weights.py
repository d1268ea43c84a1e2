"""Rules of learner/algorithms/importance_weights.py, against numbers computed by hand."""

import pytest
import torch

from configs.schema import LearnerConfig
from learner.algorithms.importance_weights import CORRECTIONS, per_sequence

RHO = torch.tensor([3.0, 0.4, 1.5, 6.0, 0.5])
ROWS = torch.tensor([2, 2, 9, 0, 0])
"""Products of the rows: 1.2, 1.5 and 3."""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("tis", [2.0, 0.4, 1.5, 2.0, 0.5]),
        ("seq_tis", [1.2, 1.2, 1.5, 2.0, 2.0]),
        ("icepop", [3.0, 0.0, 1.5, 0.0, 0.5]),
        ("mis", [0.0, 0.4, 1.5, 0.0, 0.5]),
        ("seq_mis", [1.2, 1.2, 1.5, 0.0, 0.0]),
    ],
)
def test_weights_by_hand(name: str, expected: list[float]) -> None:
    torch.testing.assert_close(CORRECTIONS[name](RHO.log(), sequences=ROWS), torch.tensor(expected))


def test_a_weight_carries_no_gradient_and_stays_finite() -> None:
    log_rho = torch.tensor([400.0, -400.0], requires_grad=True)
    for name, correction in CORRECTIONS.items():
        weight = correction(log_rho, sequences=torch.tensor([0, 1]))
        assert not weight.requires_grad, name
        assert bool(weight.isfinite().all()) and bool((weight >= 0).all()), name


def test_sums_and_means_belong_to_the_tokens_row() -> None:
    values = torch.tensor([1.0, 2.0, 10.0, 4.0, 6.0])
    assert per_sequence(values, sequences=ROWS, mean=False).tolist() == [3.0, 3.0, 10.0, 10.0, 10.0]
    assert per_sequence(values, sequences=ROWS, mean=True).tolist() == [1.5, 1.5, 10.0, 5.0, 5.0]


def test_config_names_every_correction_and_naive() -> None:
    offered = LearnerConfig.model_fields["correction"].annotation.__args__  # type: ignore[union-attr]
    assert set(offered) == {*CORRECTIONS, "naive"}
