"""Rules of benchmarks/learner.py and benchmarks/gpu: all sides do the same work, and the figures are what they say."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import gpu
from benchmarks.harness import ROOT, RunFailed, free_port
from benchmarks.learner import compare, long_tailed_rows, measure_sides, shown
from benchmarks.learner_sides import WAYS, Rows, equal_piles, make_trainer, side_keys, timed_steps
from configs.tiny_model import make_tiny_model
from learner.model.layers import Work, matmul_rate


def test_rows_have_a_long_tail_and_train_what_was_sampled(tmp_path: Path) -> None:
    rows = long_tailed_rows(num=64, longest=2048, seed=0)
    assert rows.lengths.max() == 2048
    assert np.median(rows.lengths) < 300 < np.quantile(rows.lengths, 0.85)
    for row, prompt in zip(rows.batch().rows, rows.prompts, strict=True):
        assert not row.mask[:prompt].any() and row.mask[prompt]
    rows.write(tmp_path / "rows.npz")
    again = Rows.read(tmp_path / "rows.npz")
    assert all((getattr(again, name) == getattr(rows, name)).all() for name in Rows.__annotations__)


def test_padded_piles_stay_within_the_budget() -> None:
    lengths = np.array([100, 10, 90, 20, 30, 95])
    assert equal_piles(lengths, rows=range(6), token_budget=200) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.seconds
@pytest.mark.parametrize("again", [False, True])
def test_all_ways_make_the_same_update(tmp_path: Path, again: bool) -> None:
    rows = long_tailed_rows(num=16, longest=200, seed=3)
    model = make_tiny_model(tmp_path / "model", hidden=32, layers=1)
    norms = {}
    for way in WAYS:
        keys = side_keys(way, token_budget=512, gradient_checkpointing=again)
        trainer = make_trainer(WAYS[way], keys, model=model, address=f"127.0.0.1:{free_port()}")
        passes: list[bool] = []
        trainer._policy.layers[0].mlp.register_forward_pre_hook(
            lambda *_, passes=passes: passes.append(torch.is_grad_enabled())
        )
        norms[way] = [step["grad_norm"] for step in timed_steps(trainer, batch=rows.batch(), steps=1)]
        trainer.close()
        # two steps of one mini-batch, whose own pass tells the policy before it; with checkpointing each layer once more
        assert passes and all(passes) and len(passes) % (2 * (2 if again else 1)) == 0
    assert norms["packed"][0] > 0.0
    assert norms["padded"] == pytest.approx(norms["packed"], rel=1e-4)
    assert norms["sorted_padded"] == pytest.approx(norms["packed"], rel=1e-4)


def test_operations_are_counted_by_hand() -> None:
    # q, o: 4 x 8 x 4; k, v: 4 x 4 x 4; three of 8 x 6: per token 8 (8 + 2 x 2 + ...) weights
    weights = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 6
    attention = 2 * 8 * (5**2 + 3**2)  # two products of 2 x 8 operations over half a square
    forward = 2 * weights * 8 + attention + 2 * 8 * 10 * 4
    config = Qwen3Config(
        vocab_size=10, hidden_size=8, num_hidden_layers=1, intermediate_size=6, num_attention_heads=4, num_key_value_heads=2,
        head_dim=2,
    )  # fmt: skip
    lm = Qwen3ForCausalLM(config)
    rows = {"tokens": 8, "squares": 5**2 + 3**2, "trained": 4}
    assert Work.of(lm).update_flops(**rows) == 3 * forward
    lm.requires_grad_(False)  # as with LoRA: no gradients of the layers' weights
    assert Work.of(lm).update_flops(**rows) == 3 * forward - 2 * weights * 8
    assert 1e8 < matmul_rate(device="cpu", dtype="float32") < 1e13


def scripted_side(side: str) -> dict[str, Any]:
    """Answers with times from a table; a side that is not in it fails."""
    update_s = {"packed": [2.0, 1.0, 3.0], "padded": [5.0, 6.0, 4.0], "two_ranks": [1.25] * 3}.get(side)
    if update_s is None:
        raise RunFailed("out of luck")
    steps = [{"update_s": s, "step_s": 2 * s, "grad_norm": 1.0} for s in update_s]
    return {"steps": steps, "warm_up": steps[0], "peak_memory_mb": 10.0}


def test_speed_ups_are_of_medians_and_a_rival_that_fails_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    rows = long_tailed_rows(num=8, longest=64, seed=0)
    found = measure_sides(scripted_side, sides=["packed", "padded", "trl", "two_ranks"], repeats=2, rows=rows)
    assert found["speedup_vs_padded"] == 2.5
    assert found["speedup_2_ranks"] == 1.6
    assert found["trained_tokens_per_s"] == rows.mask.sum() / 2.0
    assert "speedup_vs_trl" not in found and found["failed"] == {"trl": "out of luck"}
    assert "out of luck" in capsys.readouterr().err
    assert "2.50x" in shown(found["parts"])
    assert compare({"packed": found["parts"]["packed"]}).keys() == {"trained_tokens_per_s", "peak_memory_mb"}


def test_without_a_gpu_the_gpu_benchmark_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # on a machine with one it would run for an hour
    assert gpu.main([]) == gpu.NO_GPU
    assert "benchmarks.gpu needs an NVIDIA GPU, got torch" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
def test_small_benchmarks_run_for_real(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    small = ["--quick", "--rows", "8", "--longest", "128", "--hidden", "32", "--json", str(path)]
    command = [sys.executable, "-m", "benchmarks.learner", *small, "--sides", "packed", "padded", "two_ranks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    packed, padded = report["parts"]["packed"], report["parts"]["padded"]
    assert report["speedup_vs_padded"] == padded["update_s"] / packed["update_s"]
    assert max(report[name] for name in report if name.startswith("grad_norm_difference")) < 1e-4
    assert 0.0 < report["share_of_matmul_rate"] < 1.0 and report["peak_memory_mb"] > 0.0
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["failed"] == {} and report["fsdp"]["largest_difference"] == 0.0 and report["logprobs"]["max"] < 1e-4
