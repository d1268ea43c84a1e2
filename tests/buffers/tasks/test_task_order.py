"""Rules of buffers/tasks/task_order.py: every row once an epoch, in an order of its own, and exactly on after an
interruption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from buffers.errors import TaskError
from buffers.records import Task
from buffers.tasks import parquet, task_order
from buffers.tasks.parquet import TaskFile, write_tasks
from buffers.tasks.task_order import endless_tasks, task_list
from tests.support.buffer_parts import make_task


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_tasks(tmp_path / "tasks.parquet", [make_task(number) for number in range(5)])
    return tmp_path / "tasks.parquet"


def large(path: Path, *, rows: int, group: int, ids: bool = True, marked: str = "") -> Path:
    """A file of many row groups: row n has the id `r<n>` (or none) and asks `n`."""
    columns: dict[str, list[Any]] = {"prompt": [f"{marked}{number}" for number in range(rows)]}
    if ids:
        columns["task_id"] = [f"r{number}" for number in range(rows)]
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def ids_of(tasks: Iterator[Task], number: int) -> list[str]:
    return [task.task_id for task in islice(tasks, number)]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(path: Path) -> None:
    ids = ids_of(endless_tasks({path: 1.0}, seed=0, opened={}), 15)
    epochs = [ids[:5], ids[5:10], ids[10:]]
    assert all(sorted(epoch) == [f"t:{n}" for n in range(5)] for epoch in epochs)
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
    assert ids != ids_of(endless_tasks({path: 1.0}, seed=1, opened={}), 15)


@pytest.mark.parametrize("taken", [0, 1, 5, 8, 12])
def test_an_interrupted_run_goes_on_where_it_was(path: Path, taken: int) -> None:
    ids = ids_of(endless_tasks({path: 1.0}, seed=3, opened={}), 20)
    assert ids_of(endless_tasks({path: 1.0}, seed=3, opened=Counter(ids[:taken])), 20 - taken) == ids[taken:]


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("taken", [0, 1, 37, 99, 100, 101, 250])
def test_it_goes_on_at_the_row_in_a_file_of_many_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int, ids: bool
) -> None:
    monkeypatch.setattr(task_order, "WINDOW_ROWS", 16)
    path = large(tmp_path / "many.parquet", rows=100, group=7, ids=ids)
    whole = list(islice(endless_tasks({path: 1.0}, seed=3, opened={}), 300))
    assert sorted(Counter(task.task_id for task in whole).values()) == [3] * 100
    opened = Counter(task.task_id for task in whole[:taken]) + Counter({"of another source": 4})
    rest = list(islice(endless_tasks({path: 1.0}, seed=3, opened=opened), 300 - taken))
    assert rest == whole[taken:]


def test_rows_keep_their_ids_and_texts_whatever_the_order(tmp_path: Path) -> None:
    path = large(tmp_path / "many.parquet", rows=60, group=7, ids=False)
    for task in islice(endless_tasks({path: 1.0}, seed=0, opened={}), 60):
        assert task.task_id == f"many:{task.prompt[0]['content']}"
    in_order = [task.task_id for task in task_list(path)]
    assert in_order == [f"many:{number}" for number in range(60)]


def test_a_window_is_all_that_is_read_ahead_and_taken_windows_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_order, "WINDOW_ROWS", 20)
    path = large(tmp_path / "many.parquet", rows=100, group=10)
    read: list[tuple[str, int]] = []
    plain = TaskFile._read

    def counted(self: TaskFile, groups: list[int], *, columns: list[str]) -> Any:
        read.append((",".join(columns), len(groups)))
        return plain(self, groups, columns=columns)

    monkeypatch.setattr(parquet.TaskFile, "_read", counted)
    tasks = endless_tasks({path: 1.0}, seed=0, opened={})
    ids = ids_of(tasks, 20)
    assert read == [("task_id,prompt", 2)], "one window for the first twenty rows"
    read.clear()
    ids += ids_of(tasks, 81)
    assert read == [("task_id,prompt", 2)] * 5
    read.clear()
    rest = endless_tasks({path: 1.0}, seed=0, opened=Counter(ids[:90]))
    assert ids_of(rest, 10) == ids[90:100]
    assert Counter(read) == {("task_id", 1): 10, ("task_id", 2): 5, ("task_id,prompt", 2): 1}
    read.clear()
    later = endless_tasks({path: 1.0}, seed=0, opened={f"r{number}": 7 for number in range(100)})
    assert len(ids_of(later, 20)) == 20
    assert Counter(read) == {("task_id", 1): 10, ("task_id,prompt", 2): 1}, "whole epochs are not gone through again"


def test_whole_files_are_shuffled_not_only_their_row_groups(tmp_path: Path) -> None:
    path = large(tmp_path / "many.parquet", rows=100, group=10)
    first = [int(name[1:]) for name in ids_of(endless_tasks({path: 1.0}, seed=0, opened={}), 10)]
    assert len({number // 10 for number in first}) > 3


def test_the_row_groups_of_a_window_are_drawn_from_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_order, "WINDOW_ROWS", 20)
    path = large(tmp_path / "many.parquet", rows=100, group=10)
    ids = ids_of(endless_tasks({path: 1.0}, seed=0, opened={}), 200)
    windows = [{int(name[1:]) // 10 for name in ids[start : start + 20]} for start in range(0, 200, 20)]
    assert all(len(window) == 2 for window in windows) and len({max(w) - min(w) for w in windows}) > 2
    assert windows[:5] != windows[5:], "another order in the next epoch"


# Several files


def test_files_give_their_share_by_weight_and_each_row_once_an_epoch(tmp_path: Path) -> None:
    files = {
        large(tmp_path / "a.parquet", rows=30, group=8, ids=False): 3.0,
        large(tmp_path / "b.parquet", rows=7, group=4): 1.0,
    }
    ids = ids_of(endless_tasks(files, seed=0, opened={}), 400)
    for number in range(4, 400, 4):
        assert sum(name.startswith("a:") for name in ids[:number]) == number * 3 // 4
    assert Counter(name for name in ids if name[0] == "a") == {f"a:{n}": 10 for n in range(30)}
    b = [name for name in ids if name[0] == "b"]
    assert len(b) == 100 and sorted(b[:7]) == sorted(f"b::r{n}" for n in range(7))


@pytest.mark.parametrize("taken", [1, 5, 40, 123])
def test_several_files_go_on_at_the_row_too(tmp_path: Path, taken: int) -> None:
    files = {
        large(tmp_path / "a.parquet", rows=30, group=8): 0.7,
        large(tmp_path / "b.parquet", rows=7, group=4): 0.2,
        large(tmp_path / "c.parquet", rows=11, group=4, ids=False): 0.15,
    }
    ids = ids_of(endless_tasks(files, seed=5, opened={}), 200)
    assert ids_of(endless_tasks(files, seed=5, opened=Counter(ids[:taken])), 200 - taken) == ids[taken:]


def test_the_same_id_in_two_files_is_two_tasks(tmp_path: Path) -> None:
    files = {large(tmp_path / f"{name}.parquet", rows=3, group=3, marked=name): 1.0 for name in ("a", "b")}
    tasks = list(islice(endless_tasks(files, seed=0, opened={}), 6))
    assert {(task.task_id, task.prompt[0]["content"]) for task in tasks} == {
        (f"{name}::r{number}", f"{name}{number}") for name in ("a", "b") for number in range(3)
    }


# What cannot be used


def test_a_bad_row_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    prompts = [f"{number}" if number != 17 else None for number in range(30)]
    pq.write_table(pa.table({"prompt": prompts}), path, row_group_size=4)
    with pytest.raises(TaskError, match=r"bad\.parquet, row 17: column 'prompt' must be text or a list of messages"):
        list(islice(endless_tasks({path: 1.0}, seed=0, opened={}), 30))
    pq.write_table(pa.table({"prompt": ["x"] * 9, "task_id": [1] * 9}), path, row_group_size=4)
    with pytest.raises(TaskError, match=r"bad\.parquet, row 0: column 'task_id' must be text, got 1"):
        next(endless_tasks({path: 1.0}, seed=0, opened={"x": 1}))


def test_a_file_that_changes_under_the_run_is_not_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_order, "WINDOW_ROWS", 4)
    path = large(tmp_path / "many.parquet", rows=12, group=4)
    tasks = endless_tasks({path: 1.0}, seed=0, opened={})
    ids_of(tasks, 4)
    large(path, rows=13, group=4)
    with pytest.raises(TaskError, match="must not change while a run reads it, got 13 rows where there were 12"):
        next(tasks)


def test_rows_without_an_agent_get_the_given_one(tmp_path: Path, path: Path) -> None:
    assert {task.agent_name for task in task_list(path)} == {None}
    assert {task.agent_name for task in task_list(path, agent_name="single_turn_agent")} == {"single_turn_agent"}
    tasks = islice(endless_tasks({path: 1.0}, seed=0, opened={}, agent_name="tool_agent"), 5)
    assert {task.agent_name for task in tasks} == {"tool_agent"}


@pytest.mark.parametrize("alone", [True, False])
def test_another_file_of_the_same_name_begins_at_its_start_and_continues(tmp_path: Path, alone: bool) -> None:
    (tmp_path / "v2").mkdir()
    old, new = large(tmp_path / "0000.parquet", rows=4, group=4, ids=False), tmp_path / "v2" / "0000.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": f"new {n}"} for n in range(12)]), new)
    beside = {} if alone else {large(tmp_path / "more.parquet", rows=9, group=9, ids=False): 1e-9}
    known, told, opened = tmp_path / "task_files.json", list[str](), Counter[str]()

    def taken(path: Path, number: int) -> list[str]:
        tasks = endless_tasks({path: 1.0, **beside}, seed=0, opened=opened, known=known, warn=told.append)
        some = list(islice(tasks, number))
        opened.update(task.task_id for task in some)
        return [str(task.prompt[0]["content"]) for task in some if "more" not in task.task_id]

    assert len(set(taken(old, 3))) == 3 and told == []
    first = taken(new, 5)
    assert len(told) == 1 and str(new) in told[0] and "begins at its start" in told[0]
    assert sorted(first + taken(new, 7)) == sorted(f"new {n}" for n in range(12)), "it continues where it was"
    taken(old, 1)
    assert len(told) == 2 and set(opened.values()) == {1}, "and so does the first one"


def test_a_file_with_ids_may_grow(tmp_path: Path) -> None:
    known, told = tmp_path / "task_files.json", list[str]()
    path = large(tmp_path / "t.parquet", rows=4, group=4, ids=True)
    before = ids_of(endless_tasks({path: 1.0}, seed=0, opened={}, known=known, warn=told.append), 4)
    large(path, rows=6, group=6, ids=True)
    after = ids_of(endless_tasks({path: 1.0}, seed=0, opened=Counter(before), known=known, warn=told.append), 2)
    assert not told and not set(before) & set(after)
