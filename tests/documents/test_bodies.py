"""What docs/agents.md says of the bodies of leases, scores and tasks is what the routes give and take."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from buffers.errors import TaskError
from buffers.records import LeasedEpisode, Task
from buffers.tasks.parquet import TASK_SCHEMA, tasks_of_rows
from mocked_server.http.routes import ScoreBody, TasksBody
from tests.documents.blocks import ROOT, blocks_of

PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
LEASE, SCORES = [block.text for block in blocks_of("docs/agents.md") if block.kind == "json"]


def first_column(start: str) -> list[str]:
    """Of the table after this text."""
    table = PAGE[PAGE.index(start) :].split("\n|---|---|---|\n", 1)[1].split("\n\n", 1)[0]
    return re.findall(r"^\| `(\w+)` \|", table, flags=re.M)


def test_a_lease_has_the_fields_of_the_page() -> None:
    lease = json.loads(LEASE)
    assert lease.keys() == {field.name for field in dataclasses.fields(LeasedEpisode)}
    assert lease["task"].keys() == Task(task_id="a", prompt=[{"role": "user", "content": "x"}]).public().keys()


def test_the_scores_of_the_page_are_taken_and_every_field_is_named() -> None:
    for line in SCORES.splitlines():
        ScoreBody.model_validate_json(line)
    assert set(first_column("All fields of `POST /scores`")) == set(ScoreBody.model_fields)


def test_the_columns_of_the_page_are_those_of_a_task() -> None:
    columns = first_column("`POST /tasks` takes 1 to 10,000 rows")
    assert set(columns) == set(TASK_SCHEMA.names)
    row = {name: "{}" if name in ("reward_model", "extra_info") else "x" for name in columns}
    assert len(tasks_of_rows(TasksBody.model_validate({"tasks": [row]}).tasks, source="tasks")) == 1


@pytest.mark.parametrize("column", ["ground_truth", "extra_infos", "seed"])
def test_a_column_that_would_be_left_out_is_refused_by_name(column: str) -> None:
    with pytest.raises(TaskError, match=f"row 1: column '{column}' must be one of .*the truth goes into reward_model"):
        tasks_of_rows([{"prompt": "x", "task_id": "a"}, {"prompt": "x", "task_id": "b", column: "4"}], source="tasks")
