"""Rules of benchmarks/weights.py: its made-up weights follow from their version, and a patch is measured as it travels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import weights as benchmark
from benchmarks.processes.weights_learner import CHANGED, changed
from configs.tiny_model import make_tiny_model


def test_a_versions_weights_follow_from_its_number(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    one, again, next_ = (benchmark.weights_of(model, version) for version in (2, 2, 3))
    for name, weight in one.items():
        assert torch.equal(weight, again[name])
        assert torch.equal(changed(name, weight, version=3), next_[name])
        share = float((weight != next_[name]).float().mean())
        assert weight.numel() < 1000 or 0.5 * CHANGED < share < 1.5 * CHANGED


def test_a_patch_is_measured_with_all_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "SHARE_ELEMENTS", 2**16)
    figures = benchmark.measure_share(tmp_path, num_tensors=2)
    assert figures["weights"] == 2**17
    before, after = benchmark.after_adam(0, 1), benchmark.after_adam(0, 2)
    assert figures["changed_share"] == pytest.approx(float(np.mean(before != after)), abs=0.003)
    assert 1.4 * figures["changed_share"] < figures["patch_share"] < 1.7 * figures["changed_share"]
    assert figures["changed_share_first_step"] > figures["changed_share"], "each weight moves by the whole rate"


def test_the_rate_decides_how_much_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "SHARE_ELEMENTS", 2**16)
    monkeypatch.setattr(benchmark, "RATE", 1e-5)
    assert benchmark.measure_share(tmp_path, num_tensors=1)["patch_share"] > 0.2
