"""Whole runs that draw tasks by what they scored: a killed one draws as one that was left alone."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from buffers.ledger.schema import read_database
from buffers.tasks.parquet import write_tasks
from tests.matrix.scenarios.settings import PROMPTS
from tests.matrix.scenarios.task_files import task
from tests.support.run_parts import Run, start

pytestmark = [pytest.mark.slow, pytest.mark.engine]

STEPS = 12


def drawing(folder: Path, *more: str, resume: str = "") -> Run:
    """A synchronous run of 24 tasks, whose scores do not depend on what is sampled."""
    folder.mkdir(exist_ok=True)
    write_tasks(folder / "tasks.parquet", [task(number) for number in range(24)])
    (folder / "empty.yaml").write_text("{}")
    settings = {
        **PROMPTS, "data.tasks": f"{folder}/tasks.parquet", "data.scorer": "tests.support.scoring.by_task",
        "buffer.max_policy_lag": 0, "run.steps": STEPS, "run.checkpoints.every": 3, "model.path": "tiny", "run.trackers": "[]",
    }  # fmt: skip
    overrides = (*(f"{key}={value}" for key, value in settings.items()), "data.sampler=thompson", *more)
    return start(folder, *overrides, config=f"{folder}/empty.yaml", resume=resume)


def drawn(run: Run) -> list[str]:
    with closing(read_database(run.folder / "ledger.sqlite")) as db:
        return [task_id for (task_id,) in db.execute("SELECT task_id FROM grp ORDER BY group_id").fetchall()]


def test_a_killed_run_draws_the_tasks_of_one_that_was_left_alone(tmp_path: Path) -> None:
    whole = drawing(tmp_path / "whole")
    code, output = whole.wait()
    assert code == 0, output
    for number, step in enumerate((2, 4, 8)):
        killed = drawing(tmp_path / "killed", resume="auto" if number else "")
        killed.wait_for_step(step)
        killed.kill()
    code, output = (killed := drawing(tmp_path / "killed", resume="auto")).wait()
    assert code == 0, output
    assert drawn(killed) == drawn(whole)
    assert len(set(drawn(whole)[:24])) < 24, "those near 1/2 came again before all had come once"
    lines = [json.loads(line) for line in (whole.folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["sampler/new_share"] == 1.0 and lines[0]["sampler/pass_rate"] == 0.5
    assert lines[-1]["sampler/tasks"] == len(set(drawn(whole)[: 2 * STEPS]))
