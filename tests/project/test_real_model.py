"""A real pretrained model as a stranger meets it: made from PyPI, trained at default rates, resumed, evaluated, loaded again; two
roles of it in a game, each an adapter; and hostile requests. Its vocabulary, its text and its template, which knows no tools, are
not ours. Agents are tried out on it by `tests.outside.test_clients`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from env_adapters.smollm2 import MODEL
from tests.fuzz.test_fuzz import check_attack
from tests.outside.test_clients import MAX_DRIFT
from tests.project.test_recovery import kill
from tests.project.test_run_weights import figures, relay_files
from tests.support.patience import PATIENCE_S
from tests.support.run_parts import assert_nothing_left, start

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.long(minutes=10), pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
SMALL = (
    "run.steps=1",
    "run.checkpoints.every=1",
    "buffer.groups_per_step=4",
    "buffer.group_size=4",
    "rollout.max_tokens=32",
)


def understudy(*words: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "learner.cli", *words], cwd=cwd, env=environment, capture_output=True, text=True,
        timeout=2 * PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_smollm2_trains_is_resumed_evaluated_and_loaded_again(smollm2: Path) -> None:
    folder = smollm2.parent
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
        folder / "data" / "smollm2", gguf_file=MODEL, dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    assert model.config.rope_parameters == source.config.rope_parameters
    moved = {
        name: float((value - source.get_parameter(name)).detach().abs().max())
        for name, value in model.named_parameters()
    }
    rates = sum(step["learner/lr"] for step in steps)
    assert 0.0 < max(moved.values()) < 2 * rates, max(moved, key=moved.__getitem__)
    conversation = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
    ]
    tokens = tokenizer.apply_chat_template(conversation, return_tensors="pt", return_dict=True)["input_ids"]
    with torch.no_grad():
        now, before = (each(tokens).logits.log_softmax(-1)[0] for each in (model, source))
    assert (before.exp() * (before - now)).sum(-1).mean() < 0.2, "another model: two layers mixed up are 1.0"


def test_two_roles_of_it_are_exact_after_sft_on_two_engines_of_which_one_dies_and_after_a_resume(
    smollm2: Path, tmp_path: Path
) -> None:
    settings = (
        *relay_files(tmp_path), f"model.path={smollm2}", "sft.steps=2", "learner.lr=1e-4", "learner.lora.rank=8",
        "learner.lora.per_role=true", "learner.entropy_coef=0.05", "rollout.engines=2", "rollout.kv_cache_gb=0.25",
        "agents.concurrency=16", "buffer.groups_per_step=2", "buffer.group_size=4", "run.checkpoints.every=1",
    )  # fmt: skip
    run = start(tmp_path, "run.steps=2", *settings, config="configs/relay.yaml")
    run.wait_for_step(1)
    kill(run, "engine")
    code, output = run.wait()
    assert code == 0, output
    again = start(tmp_path, "run.steps=3", *settings, config="configs/relay.yaml", resume="auto")
    code, output = again.wait()
    assert code == 0, output
    for role in ("scout", "runner"):
        assert figures(again, f"adapter/{role}/version") == [1, 2, 3]
        checked, too_old = (figures(again, f"adapter/{role}/policy/{name}_share") for name in ("checked", "too_old"))
        assert [round(one + other, 5) for one, other in zip(checked, too_old, strict=True)] == [1.0] * 3
        assert 0.0 < max(figures(again, f"adapter/{role}/policy/max_logprob_diff")) < MAX_DRIFT
    assert_nothing_left(again)


def test_no_request_harms_an_engine_that_serves_it_or_who_else_is_answered(smollm2: Path, tmp_path: Path) -> None:
    check_attack(tmp_path, num_drawn=200, model=smollm2, max_difference=MAX_DRIFT)
