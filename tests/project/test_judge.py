"""Whole runs whose scores a language model gives: a server of others, scripted, or the policy and frozen models themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from buffers.ledger.schema import read_database
from buffers.tasks.parquet import write_tasks
from configs.tiny_model import make_tiny_model
from tests.matrix.scenarios.settings import PROMPTS
from tests.matrix.scenarios.task_files import task
from tests.support.run_parts import ROOT, Run, start

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@contextmanager
def judging(how: str) -> Iterator[str]:
    """The address of a scripted judge in a process of its own."""
    command = [sys.executable, "-m", "tests.support.scripted_judge", how]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def judged(folder: Path, judge: dict[str, Any], *more: str) -> Run:
    write_tasks(folder / "tasks.parquet", [task(number, ground_truth="m") for number in range(8)])
    settings = {
        **PROMPTS, "data.tasks": f"{folder}/tasks.parquet", "data.scorer": "judge", "data.judge.truth": "contains",
        "model.path": "tiny", "run.trackers": "[]", "rollout.max_model_len": 3072,
        "roles": json.dumps({"player": {}, "judge": judge}),
    }  # fmt: skip
    (folder / "empty.yaml").write_text("{}")
    overrides = (f"{key}={value}" for key, value in settings.items())
    return start(folder, *overrides, *more, config=f"{folder}/empty.yaml")


def figures(run: Run, name: str) -> list[float]:
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def ask(run: Run, query: str) -> list[Any]:
    with closing(read_database(run.folder / "ledger.sqlite")) as db:
        return db.execute(query).fetchall()


def none_of_the_judges_tokens_is_trained(run: Run) -> None:
    judged_rounds = ask(run, "SELECT trained, num_sampled FROM round WHERE role = 'judge'")
    assert judged_rounds and all(flags == bytes(number) for flags, number in judged_rounds)
    (trained,) = figures(run, "batch/trained_tokens")[-1:]
    assert trained <= ask(run, "SELECT sum(num_sampled) FROM round WHERE role = 'player'")[0][0]


@pytest.mark.parametrize("mode", ["absolute", "ranking"])
def test_a_judge_that_is_right_slow_wrong_and_broken_fails_episodes_and_not_the_run(tmp_path: Path, mode: str) -> None:
    with judging("right,slow,right,right,right,right,nonsense,right,broken,broken,broken") as url:
        run = judged(
            tmp_path,
            {"url": url},
            f"data.judge.mode={mode}",
            "data.judge.timeout_s=2",
            "agents.max_attempts=30",
            "run.steps=8",
        )
        code, output = run.wait()
    assert code == 0, output
    scores = {score for (score,) in ask(run, "SELECT DISTINCT score FROM episode WHERE state = 'scored'")}
    assert scores <= ({0.0, 1.0} if mode == "absolute" else {n / 6 for n in range(7)} | {0.5})
    reasons = {reason for (reason,) in ask(run, "SELECT DISTINCT reason FROM episode WHERE reason LIKE 'scorer%'")}
    assert any("no verdict" in reason for reason in reasons) and any("timeout_s=2" in reason for reason in reasons), (
        reasons
    )
    assert sum(figures(run, "judge/failed")) > 0 and set(figures(run, "judge/agreement_truth")) == {1.0}
    none_of_the_judges_tokens_is_trained(run)


def test_a_run_whose_judge_is_dead_ends_with_the_reason(tmp_path: Path) -> None:
    code, output = judged(tmp_path, {"url": "http://127.0.0.1:1/v1"}).wait()
    assert code == 1 and "the judge gave status 502" in output


@pytest.mark.parametrize("mode", ["absolute", "ranking"])
def test_the_policy_and_a_frozen_model_judge(tmp_path: Path, mode: str) -> None:
    model = make_tiny_model(tmp_path / "model")
    for judge in ({"frozen": 0}, {"frozen": str(model)}):
        folder = tmp_path / str(len(str(judge)))
        folder.mkdir()
        run = judged(folder, judge, f"data.judge.mode={mode}")
        code, output = run.wait()
        assert code == 0, output
        none_of_the_judges_tokens_is_trained(run)
