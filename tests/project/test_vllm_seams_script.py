"""Rules of scripts/vllm_seams.py that need no download."""

from __future__ import annotations

import importlib.util
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("vllm_seams", ROOT / "scripts/vllm_seams.py")
assert _spec is not None and _spec.loader is not None
seams = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(seams)


def test_every_version_that_the_project_allows_is_tested() -> None:
    requirement, *_ = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    assert seams.allowed_minors(requirement) == ["0.32", "0.33"]
    assert seams.allowed_minors("vllm>=0.33,<0.36") == ["0.33", "0.34", "0.35"]
    with pytest.raises(ValueError, match="vllm>=1"):
        seams.allowed_minors("vllm>=1")


def test_what_needs_a_gpu_and_what_is_there_is_not_installed() -> None:
    needed = [
        "no-such-package>=3", "torch==2.14.0", "torchvision", "nvidia-cudnn-frontend>=1", "flashinfer-python==0.7",
        "quack-kernels==0.6", "numpy", "another-one; extra == 'audio'", "third-one==2; platform_system == 'Linux'",
    ]  # fmt: skip
    assert seams.missing(needed) == ["no-such-package>=3", "third-one==2"]


def test_the_tests_that_are_run_exist_and_start_no_engine() -> None:
    for path in seams.TESTS:
        assert "pytest.mark.engine" not in (ROOT / path).read_text()


def test_a_version_that_pip_cannot_install_is_skipped_with_its_reason(tmp_path: Path, capsys, monkeypatch) -> None:
    def fails(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="ERROR: a\nERROR: no such version\n")

    monkeypatch.setattr(seams.subprocess, "run", fails)
    assert seams.main(["--folder", str(tmp_path), "--only", "0.33"]) == 1
    assert "vllm 0.33: skipped: ERROR: no such version" in capsys.readouterr().out


def test_make_seams_runs_it() -> None:
    done = subprocess.run(["make", "-n", "seams"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert any(line.endswith("scripts/vllm_seams.py --folder .venv/seams") for line in done.stdout.splitlines())
