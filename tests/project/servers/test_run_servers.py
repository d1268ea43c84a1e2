"""Whole runs whose engine is a server that runs already: it is trained through, dies, and comes back; one that takes no weights is
refused for training and used for an evaluation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from configs.tiny_model import make_tiny_model
from tests.support.patience import PATIENCE_S
from tests.support.ports import held_port
from tests.support.run_parts import ROOT, Run, assert_nothing_left, start
from tests.support.served_models import Served, start_vllm, vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.engine]

SMALL = ("sft.steps=20", "buffer.groups_per_step=4", "buffer.group_size=4", "agents.concurrency=32")


def metrics(run: Run, name: str) -> list[float]:
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def test_a_vllm_server_is_trained_through_its_death(tmp_path: Path) -> None:
    other, log = make_tiny_model(tmp_path / "other", seed=7), tmp_path / "server.txt"
    served = start_vllm(other, log=log)
    port = int(served.url.rpartition(":")[2])
    try:
        served.wait()
        run = start(tmp_path, f"rollout.engine={served.url}", "rollout.engine_timeout_s=300", "run.steps=4", *SMALL)
        run.wait_for_step(2)
        served.kill()
        served = start_vllm(other, log=log, port=port)
        code, output = run.wait(500)
        assert code == 0, output
        told = httpx.get(f"{served.url}/weight_info", trust_env=False).json()
    finally:
        served.kill()
    assert told == {"weight_version": "4"}
    assert run.summary()["max_logprob_diff"] < 1e-4
    assert metrics(run, "engine/e0/version") == [1.0, 2.0, 3.0, 4.0]
    assert max(metrics(run, "restarts/engine")) == 1
    assert_nothing_left(run)


def test_a_server_with_sglangs_routes_is_trained(tmp_path: Path) -> None:
    model, port = make_tiny_model(tmp_path / "other", seed=7), held_port()
    words = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--context-length", "1024"]
    program = [sys.executable, "-m", "tests.mocked_server.servers.scripted_sglang", *words]
    log = tmp_path / "server.txt"
    with log.open("wb") as sink:
        process = subprocess.Popen(program, cwd=ROOT, stdout=sink, stderr=sink, start_new_session=True)
    served = Served(f"http://127.0.0.1:{port}", process, log)
    try:
        served.wait()
        run = start(tmp_path, f"rollout.engine={served.url}", "run.steps=2", *SMALL)
        code, output = run.wait(500)
        assert code == 0, output
        told = httpx.get(f"{served.url}/model_info", trust_env=False).json()
    finally:
        served.kill()
    assert told["weight_version"] == "2"
    assert run.summary()["max_logprob_diff"] < 1e-4
    assert metrics(run, "engine/e0/version") == [1.0, 2.0]
    assert_nothing_left(run)


@pytest.mark.long
def test_a_server_that_takes_no_weights_plays_an_evaluation_and_is_refused_for_training(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=0)
    with vllm_server(model, log=tmp_path / "server.txt", dev=False) as served:
        run = start(tmp_path, f"rollout.engine={served.url}", "run.steps=2", *SMALL)
        code, output = run.wait()
        assert code == 2 and not run.folder.exists()
        (line,) = output.strip().splitlines()
        assert line.startswith(
            f"error: rollout.engine must be a server that takes new weights, got {served.url} (vLLM "
        )
        assert "VLLM_SERVER_DEV_MODE=1" in line and "understudy eval" in line
        words = ["-m", "learner.cli", "eval", "--limit", "4", "--samples", "1", f"model.path={model}"]
        words += [f"run.dir={tmp_path}", "run.name=play", f"rollout.engine={served.url}"]
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE_S
        )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "play-eval" / "evaluation.json").read_text())
    assert len(told["scores"]) == 4 and all(len(one["scores"]) == 1 for one in told["scores"])
