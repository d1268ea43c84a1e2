"""benchmarks/buffer.py and benchmarks/faults.py: what they write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import faults
from tests.support.patience import PATIENCE_S
from tests.support.run_parts import ROOT


@pytest.mark.slow
def test_a_small_buffer_benchmark_gives_every_figure(tmp_path: Path) -> None:
    sizes = ["--rows", "256", "--largest", "10000", "--reopen-bytes", "3000000", "--folder", str(tmp_path)]
    command = [
        sys.executable,
        "-m",
        "benchmarks.buffer",
        *sizes,
        "--without-rivals",
        "--json",
        str(tmp_path / "b.json"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "b.json").read_text())
    wanted = {"put64_rows_s", "put1_p50_ms", "put64_vs_sqlite", "claim_ms_1e4", "reopen_s", "memcpy_rows_s"}
    assert wanted <= figures.keys() and all(figures[name] > 0 for name in wanted)
    assert figures["put64_vs_sqlite"] == pytest.approx(figures["put64_here_rows_s"] / figures["sqlite64_rows_s"])


def test_the_faults_benchmark_compares_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def play(folder: Path, *, seed: int, mean_s: float | None, knobs: list[str]) -> faults.Outcome:
        assert knobs == ["run.steps=2"] and folder.is_dir()
        kills = [] if mean_s is None else [(1.0, "engine")] * (seed + 1)
        wall_s = 100.0 if mean_s is None else 110.0 + 10 * seed
        return faults.Outcome(
            seed=seed, reward=1.0, wall_s=wall_s, kills=kills, restarts={}, max_logprob_diff=0.0
        )  # fmt: skip

    monkeypatch.setattr(faults, "play", play)
    kept = tmp_path / "kept"
    monkeypatch.setattr(
        sys, "argv", ["faults", "--json", str(tmp_path / "f.json"), "--folder", str(kept), "run.steps=2"]
    )
    assert faults.main() == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["kills"] == 6 and figures["wall_ratio"] == pytest.approx(1.2)
    assert [one["seed"] for one in figures["with_kills"]] == [0, 1, 2] and figures["reward_with"] == [1.0] * 3
    with pytest.raises(SystemExit):
        faults.main()
    assert "--folder must be a new folder, got " in capsys.readouterr().err
    assert sorted(path.name for path in kept.iterdir())[:2] == ["seed-0-kills", "seed-0-quiet"]
