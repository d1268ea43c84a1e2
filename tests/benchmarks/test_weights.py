"""Rules of benchmarks/weights.py: a patch is measured as it travels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import weights as benchmark


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
