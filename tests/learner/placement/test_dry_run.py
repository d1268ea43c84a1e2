"""`--dry-run`: what it prints for the shipped configurations, and that nothing is started; docs/gpus.md shows the rest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from learner import run
from tests.learner.placement.shapes import MODELS
from tests.support.models.model_folders import with_code
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's, with models that have a config.json and no weights."""
    shutil.copytree(MODELS, tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_shipped_recipes_have_room(folder: Path, capsys) -> None:
    for name, cards in (("gpu_1", "80"), ("gpu_8", "8x80"), ("gpu_2x8", "2x8x80")):
        assert run.main(["--config", name, "--dry-run", "--gpus", cards]) == 0
        assert "tight" not in capsys.readouterr().out, name


def test_a_tight_card_is_told_with_keys_that_help(folder: Path, capsys) -> None:
    asked = ["--config", "gpu_1", "--dry-run", "--gpus", "80", "learner.gradient_checkpointing=false"]
    assert run.main(asked) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("tight: card 0 of node 0") and "learner.gradient_checkpointing=true" in last


def test_an_engine_that_may_not_hold_a_sequence_is_told(folder: Path, capsys) -> None:
    """Beside ranks its share is 32 GiB, of which its weights take 30.5."""
    assert run.main(["--config", "gpu_2x8", "--dry-run", "--gpus", "8x80"]) == 0
    assert "tight: engines 0-3 may not hold one sequence" in capsys.readouterr().out


def test_the_demo_is_on_the_cpu(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    assert run.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "node 0: no GPU" in printed and "CPU: rank 0" in printed and "CPU: engine 0" in printed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpus", "many"], "--gpus must be"),
        (["model.path=nowhere"], "model.path must name a folder with a config.json, got nowhere"),
        (["rollout.tensor_parallel=2"], "rollout.tensor_parallel must be 1 without a GPU, got 2"),
    ],
)
def test_a_refusal_is_one_line(capsys, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str) -> None:
    monkeypatch.setenv("PATH", "")
    assert run.main(["--dry-run", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1 and told in printed.err


def test_cards_are_described_for_a_dry_run_only(capsys) -> None:
    with pytest.raises(SystemExit):
        run.main(["--gpus", "8x80"])
    assert "add --dry-run" in capsys.readouterr().err


def test_a_run_that_has_no_room_is_refused_before_it_starts(
    folder: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for nvidia-smi lists one card of 24 GiB, which torch sees."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(f"#!{sys.executable}\nprint('0, GPU-1, 24576')\n")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("mocked_server.vllm.engine_arguments.has_gpu", lambda: True)
    (folder / "models/Qwen3-8B/model.safetensors").touch()
    (folder / "tasks.parquet").touch()
    monkeypatch.setattr("learner.startup.input_check.check_files", lambda *_, **__: None)
    words = [
        "--config",
        "gpu_8",
        "data.tasks=tasks.parquet",
        "data.validation.tasks=",
        "learner.ranks=1",
        "rollout.engines=1",
    ]
    assert run.main(words) == 2
    assert "engine 0 must have room for its weights (15.3 GiB)" in capsys.readouterr().err
    assert not (folder / "runs").exists()


@pytest.mark.seconds
def test_code_of_a_folder_is_not_asked_about_on_a_terminal(tiny_model: Path, tmp_path: Path) -> None:
    """Nobody answers at this one; transformers would wait."""
    folder = with_code(tiny_model, tmp_path / "code")
    (folder / "own_code.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    keyboard, terminal = os.openpty()
    words = [sys.executable, "-m", "learner.run", "--dry-run", f"model.path={folder}"]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=terminal,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    os.close(keyboard)
    os.close(terminal)
    assert done.returncode == 2 and "[y/N]" not in done.stdout + done.stderr, done.stderr
    assert "trust_remote_code" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "ran").exists()
