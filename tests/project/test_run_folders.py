"""Whole runs of models as the hub has them, with no keys but the folder: two steps each."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.families import make_family
from buffers.ledger.encode import decode
from buffers.records import Task
from buffers.tasks.parquet import write_tasks
from tests.support.models.model_folders import copied, in_bins, in_fp8, with_code, with_others
from tests.support.run_parts import Run, assert_nothing_left, start

pytestmark = [pytest.mark.slow, pytest.mark.engine]
CONFIG = """\
data: {tasks: tasks.parquet, scorer: contains}
rollout: {max_tokens: 8, max_model_len: 256, kv_cache_gb: 0.25}
buffer: {groups_per_step: 2, group_size: 2}
learner: {advantage: grpo, critic: none}
run: {steps: 2}
"""
FOLDERS: dict[str, tuple[Callable[[Path, Path], object], str, str]] = {
    "bins": (lambda tiny, to: in_bins(with_others(copied(tiny, to)), shards=2), "", "adapter_model.safetensors"),
    "code": (with_code, "model.trust_remote_code=true", "rows of OwnForCausalLM"),
    "fp8": (lambda tiny, to: in_fp8(tiny, to, block=(128, 128)), "", "FP8 weights"),
    "falcon_h1": (lambda _, to: make_family("falcon_h1", to), "", "enable_prefix_caching=false"),
    "mamba2": (lambda _, to: make_family("mamba2", to), "", "enable_prefix_caching=false"),
    "qwen3_next": (lambda _, to: make_family("qwen3_next", to), "", "model.dtype=bfloat16"),
}
"""How a folder is made of the tiny model's, the key that it needs, and what a line at the start says of it."""


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_the_hub_learns(tiny_model: Path, tmp_path: Path, name: str) -> None:
    make, key, line = FOLDERS[name]
    make(tiny_model, tmp_path / "source")
    run, output = _learned(tmp_path, *filter(None, [key]))
    assert line in output, output
    assert run.summary()["steps"] == 2 and (name == "qwen3_next" or run.summary()["max_logprob_diff"] < 1e-3)
    saved = {file.name for file in (run.folder / "last").iterdir() if file.suffix in (".safetensors", ".bin", ".pt")}
    assert saved == {"model.safetensors"}


def test_a_mixture_of_experts_is_trained_with_the_experts_that_its_engine_used(tmp_path: Path) -> None:
    """Experts go from the engine through the ledger to the passes of the learner. The second step's tokens are of the
    version before, whose routers chose others here and there."""
    make_family("qwen3_moe", tmp_path / "source")
    run, _ = _learned(tmp_path, "learner.router_replay=true", "learner.router_aux_coef=0.01")
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "policy/router_agreement" in line]
    first, second = (line["policy/router_agreement"] for line in steps)
    assert first > 0.999 and 0.5 < second < 0.999 and steps[1]["policy/lag_mean"] == 1.0
    assert all(1.9 < line["policy/router_aux_loss"] < 4.0 for line in steps)
    assert run.summary()["max_logprob_diff"] < 1e-4
    with sqlite3.connect(run.folder / "ledger.sqlite") as db:
        rounds = [decode(body) for (body,) in db.execute("SELECT body FROM round")]
    assert all(each.experts is not None and each.experts.shape[1:] == (2, 2) for each in rounds)
    assert all(len(each.experts) == len(each.tail_ids) + len(each.sampled_ids) - 1 for each in rounds)


def _learned(tmp_path: Path, *keys: str) -> tuple[Run, str]:
    """A run of two steps of the model in `source`, and what it printed."""
    tasks = [
        Task(task_id=str(n), prompt=[{"role": "user", "content": f"Say {n}"}], data_source="", ground_truth=str(n))
        for n in range(4)
    ]
    write_tasks(tmp_path / "tasks.parquet", tasks)
    (tmp_path / "my.yaml").write_text(CONFIG.replace("tasks.parquet", str(tmp_path / "tasks.parquet")))
    run = start(tmp_path, f"model.path={tmp_path / 'source'}", *keys, config=str(tmp_path / "my.yaml"))
    code, output = run.wait()
    assert code == 0, output
    assert_nothing_left(run)
    return run, output
