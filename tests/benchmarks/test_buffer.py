"""benchmarks/buffer.py: what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    wanted = {"put64_rows_s", "put1_p50_ms", "put64_vs_sqlite", "claim_ms_1e4", "reopen_s"}
    assert wanted <= figures.keys() and all(figures[name] > 0 for name in wanted)
    assert figures["put64_vs_sqlite"] == pytest.approx(figures["put64_here_rows_s"] / figures["sqlite64_rows_s"])
