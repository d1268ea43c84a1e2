"""A whole run with `--debug`: loops, scorer and learner stop in the debugger, in one process, and the run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from buffers.records import Task
from buffers.tasks.parquet import write_tasks
from tests.support.patience import PATIENCE_S
from tests.support.run_parts import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.engine]
CONFIG = """\
run: {name: stopped, steps: 2}
data: {tasks: tasks.parquet, scorer: judged.score}
agents: {loops: loops.yaml}
rollout: {max_tokens: 8, max_model_len: 256, kv_cache_gb: 0.25}
buffer: {groups_per_step: 2, group_size: 2}
learner: {advantage: grpo, critic: none}
"""
SCORER = """\
import os, psutil
calls = []
def score(task, answer):
    calls.append(answer)
    if len(calls) == 1:
        raise LookupError("of the scorer")
    if len(calls) == 3:
        breakpoint()
    return float(len(answer) % 2)
"""
STOPPED = "p answer in calls[:3:2]"
"""The two calls run at once, and either may have the debugger first."""
CHILDREN = "p sorted({child.name() for child in psutil.Process().children(True)})"


def test_a_debugged_run_stops_in_the_users_code_with_learner_and_loops_in_its_process_and_goes_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "judged.py").write_text(SCORER)
    (tmp_path / "loops.yaml").write_text("- {name: single_turn_agent}\n")
    tasks = [Task(task_id=str(number), prompt=[{"role": "user", "content": f"say {number}"}]) for number in range(4)]
    write_tasks(tmp_path / "tasks.parquet", tasks)
    ended = subprocess.run(
        [sys.executable, "-m", "learner.run", "--config", "config.yaml", "--debug"],
        cwd=tmp_path,
        input=f"{STOPPED}\nc\n{STOPPED}\n{CHILDREN}\nc\n", env=os.environ | {"PYTHONPATH": f"{ROOT}:."},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    log = (tmp_path / "runs" / "stopped" / "log.txt").read_text()
    assert ended.returncode == 0, ended.stdout + ended.stderr + log[-3000:]
    assert "LookupError: of the scorer" in ended.stdout and ended.stdout.count("(Pdb) True\n") == 2, ended.stdout
    assert "VLLM" in ended.stdout and "learner_rank" not in ended.stdout and "loop_worker" not in ended.stdout
    summary = json.loads((tmp_path / "runs" / "stopped" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["max_logprob_diff"] < 1e-4
