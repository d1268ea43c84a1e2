"""Rules of buffers/task_source.py: a run that goes on takes the rows that it had not taken."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from buffer_parts import make_task

from buffers.parquet import write_tasks
from buffers.task_source import endless_tasks, task_list


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_tasks(tmp_path / "tasks.parquet", [make_task(number) for number in range(5)])
    return tmp_path / "tasks.parquet"


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(path: Path) -> None:
    ids = [task.task_id for task in islice(endless_tasks(path, seed=0, opened={}), 15)]
    epochs = [ids[:5], ids[5:10], ids[10:]]
    assert all(sorted(epoch) == [f"t:{n}" for n in range(5)] for epoch in epochs)
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
    assert ids != [task.task_id for task in islice(endless_tasks(path, seed=1, opened={}), 15)]


@pytest.mark.parametrize("taken", [0, 1, 5, 8, 12])
def test_an_interrupted_run_goes_on_where_it_was(path: Path, taken: int) -> None:
    ids = [task.task_id for task in islice(endless_tasks(path, seed=3, opened={}), 20)]
    rest = islice(endless_tasks(path, seed=3, opened=Counter(ids[:taken])), 20 - taken)
    assert [task.task_id for task in rest] == ids[taken:]


def test_rows_without_an_agent_get_the_given_one(tmp_path: Path, path: Path) -> None:
    assert {task.agent_name for task in task_list(path)} == {None}
    assert {task.agent_name for task in task_list(path, agent_name="single_turn_agent")} == {"single_turn_agent"}
