"""Rules of learner/algorithms/importance_weights.py, against numbers computed by hand."""

import pytest
import torch

from configs.schema import LearnerConfig, RejectionConfig
from learner.algorithms.importance_weights import CORRECTIONS, REJECTIONS, Drift, chosen, per_sequence

RHO = torch.tensor([3.0, 0.4, 1.5, 6.0, 0.5])
ALL = torch.ones(5, dtype=torch.bool)
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
    correction = CORRECTIONS[name]
    found = correction.compute(RHO.log(), sequences=ROWS, counted=ALL, bounds=correction.bounds)
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tis", [1.4, 0.4, 1.4, 1.4, 0.5]),
        ("seq_tis", [1.2, 1.2, 1.4, 1.4, 1.4]),
        ("icepop", [0.0, 0.0, 0.0, 0.0, 0.5]),
        ("mis", [0.0, 0.0, 0.0, 0.0, 0.5]),
        ("seq_mis", [1.2, 1.2, 0.0, 0.0, 0.0]),
    ],
)
def test_weights_within_bounds_that_were_set(name: str, expected: list[float]) -> None:
    bounds = chosen(CORRECTIONS[name].bounds, low=0.45, high=1.4)
    found = CORRECTIONS[name].compute(RHO.log(), sequences=ROWS, counted=ALL, bounds=bounds)
    torch.testing.assert_close(found, torch.tensor(expected))
    assert chosen((0.5, 5.0), low=None, high=3.0) == (0.5, 3.0)


def test_a_row_is_weighed_by_the_tokens_that_count() -> None:
    counted = torch.tensor([False, True, True, True, True])
    found = CORRECTIONS["seq_tis"].compute(RHO.log(), sequences=ROWS, counted=counted, bounds=(0.0, 9.0))
    torch.testing.assert_close(found, torch.tensor([0.4, 0.4, 1.5, 3.0, 3.0]))


@pytest.mark.parametrize("name", ["icepop", "mis", "seq_mis"])
@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (0.0, 1.0)])
def test_a_ratio_that_is_a_bound_is_within(name: str, low: float, high: float) -> None:
    found = CORRECTIONS[name].compute(torch.zeros(5), sequences=ROWS, counted=ALL, bounds=(low, high))
    assert found.tolist() == [1.0] * 5


def _kept(name: str, *, low: float = 0.0, high: float, present: float = 0.0, advantage: float = -1.0) -> list[bool]:
    """Rows of a policy that is still the one that sampled them, and log pi - log pi_behave of the present weights."""
    drift = Drift(
        log_rho=torch.zeros(5), log_present=torch.full((5,), present), advantages=torch.full((5,), advantage),
        sequences=ROWS, counted=ALL,
    )  # fmt: skip
    return REJECTIONS[name].keeps(drift, (low, high)).tolist()


def test_a_row_whose_mean_is_a_bound_is_kept() -> None:
    assert _kept("geo_mean", low=1.0, high=2.0) == _kept("geo_mean", low=0.5, high=1.0) == [True] * 5
    assert _kept("geo_mean", low=1.1, high=2.0) == _kept("geo_mean", low=0.5, high=0.9) == [False] * 5
    assert _kept("k3_mean", high=0.0) == [True] * 5
    assert _kept("stale_negatives", high=0.5, present=-0.5) == [True] * 5
    assert _kept("stale_negatives", high=0.5, present=-0.625) == [False] * 5
    assert _kept("stale_negatives", high=0.5, present=-0.625, advantage=0.0) == [True] * 5  # it is not negative


def test_a_weight_carries_no_gradient_and_stays_finite() -> None:
    log_rho = torch.tensor([400.0, -400.0], requires_grad=True)
    for name, correction in CORRECTIONS.items():
        weight = correction.compute(log_rho, sequences=torch.tensor([0, 1]), counted=ALL[:2], bounds=correction.bounds)
        assert not weight.requires_grad, name
        assert bool(weight.isfinite().all()) and bool((weight >= 0).all()), name


def test_sums_and_means_belong_to_the_tokens_row() -> None:
    values = torch.tensor([1.0, 2.0, 10.0, 4.0, 6.0])
    assert per_sequence(values, sequences=ROWS, counted=ALL, mean=False).tolist() == [3.0, 3.0, 10.0, 10.0, 10.0]
    assert per_sequence(values, sequences=ROWS, counted=ALL, mean=True).tolist() == [1.5, 1.5, 10.0, 5.0, 5.0]


def test_config_names_every_correction_and_naive() -> None:
    offered = LearnerConfig.model_fields["correction"].annotation.__args__  # type: ignore[union-attr]
    assert set(offered) == {*CORRECTIONS, "naive"}
    assert set(RejectionConfig.model_fields["kind"].annotation.__args__) == set(REJECTIONS)  # type: ignore[union-attr]
