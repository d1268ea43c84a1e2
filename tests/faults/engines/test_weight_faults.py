"""The made-up weights that are published under kills follow from their version."""

from __future__ import annotations

from pathlib import Path

import torch

from configs.tiny_model import make_tiny_model
from tests.faults.engines.weight_faults import weights_of
from tests.faults.engines.weights_learner import CHANGED, changed


def test_a_versions_weights_follow_from_its_number(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    one, again, next_ = (weights_of(model, version) for version in (2, 2, 3))
    for name, weight in one.items():
        assert torch.equal(weight, again[name])
        assert torch.equal(changed(name, weight, version=3), next_[name])
        share = float((weight != next_[name]).float().mean())
        assert weight.numel() < 1000 or 0.5 * CHANGED < share < 1.5 * CHANGED
