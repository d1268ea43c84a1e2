"""Task files in verl's columns are read exactly, lazily, or refused with the place named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers.errors import TaskError
from buffers.records import Task
from buffers.tasks.parquet import (
    MAX_CELL_BYTES,
    MAX_COLUMNS,
    SMALL_BYTES,
    TaskFile,
    agent_names,
    read_demonstrations,
    read_tasks,
    tasks_of_rows,
    write_tasks,
    write_traces,
)

MESSAGE = {"role": "user", "content": "2 + 2?"}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_file_in_verls_columns_is_read(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "gsm8k.parquet",
        [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "system", "content": "Be brief."}, MESSAGE],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "72"},
                "extra_info": {"index": 7, "split": "train"},
                "agent_name": "tool_agent",
            }
        ],
    )
    assert list(read_tasks(path)) == [
        Task(
            task_id="gsm8k:0",
            prompt=[{"role": "system", "content": "Be brief."}, MESSAGE],
            data_source="openai/gsm8k",
            ground_truth="72",
            agent_name="tool_agent",
            extra_info={"index": 7, "split": "train"},
        )
    ]


def test_text_is_one_user_message_and_other_columns_are_optional(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "plain.parquet", [{"prompt": "2 + 2?"}, {"prompt": "3 + 3?"}])
    first, second = read_tasks(path)
    assert first == Task(task_id="plain:0", prompt=[MESSAGE])
    assert second.task_id == "plain:1"


def test_json_text_stands_for_a_struct(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "json.parquet",
        [
            {
                "prompt": "x",
                "reward_model": '{"ground_truth": [1, {"a": null}]}',
                "extra_info": '{"k": 1}',
                "task_id": "mine",
            }
        ],
    )
    (task,) = read_tasks(path)
    assert task.ground_truth == [1, {"a": None}] and task.extra_info == {"k": 1} and task.task_id == "mine"


@settings(max_examples=30)
@given(truths=st.lists(JSON, min_size=1, max_size=4), infos=st.dictionaries(st.text(), JSON, max_size=3))
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, truths: list[Any], infos: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("tasks") / "tasks.parquet"
    tasks = [
        Task(task_id=str(number), prompt=[MESSAGE], ground_truth=truth, extra_info=infos)
        for number, truth in enumerate(truths)
    ]
    write_tasks(path, tasks)
    assert list(read_tasks(path)) == tasks


def test_writing_twice_gives_the_same_bytes_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tasks.parquet"
    write_tasks(path, [Task(task_id="a", prompt=[MESSAGE])])
    first = path.read_bytes()
    write_tasks(path, [Task(task_id="a", prompt=[MESSAGE])])
    assert path.read_bytes() == first
    assert [entry.name for entry in path.parent.iterdir()] == ["tasks.parquet"]


def test_traces_are_read_back_in_order(tmp_path: Path) -> None:
    traces = [[MESSAGE, {"role": "assistant", "content": str(number)}] for number in range(3)]
    write_traces(tmp_path / "traces.parquet", traces)
    found = list(read_demonstrations(tmp_path / "traces.parquet"))
    assert [(trace.messages, trace.tools) for trace in found] == [(messages, None) for messages in traces]
    tools = [{"type": "function", "function": {"name": "add"}}]
    write_traces(tmp_path / "traces.parquet", traces, tools=tools)
    assert [trace.tools for trace in read_demonstrations(tmp_path / "traces.parquet")] == [tools] * 3


def test_demonstrations_in_openai_form_are_read_from_lines_and_from_columns(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    answers: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "4", "weight": 0, "reasoning_content": "So."},
    ]
    rows = [
        {"messages": [MESSAGE, answer], "tools": [{"type": "function"}], "score": 0.5, "weight": 2}
        for answer in answers
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    columns = [row | {"messages": json.dumps(row["messages"]), "tools": json.dumps(row["tools"])} for row in rows]
    for path in (
        tmp_path / "d.jsonl",
        write_rows(tmp_path / "text.parquet", columns),
        write_rows(tmp_path / "s.parquet", rows),
    ):
        first, second = read_demonstrations(path)
        assert first.messages == [MESSAGE, {"role": "assistant", "content": "", "tool_calls": [call]}]
        assert second.messages[1] == answers[1], "fields that a struct column fills with null are left out"
        assert (first.tools, first.score, first.weight) == ([{"type": "function"}], 0.5, 2.0)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", r"row 1: a line must be a JSON object"),
        ("{}", r"row 1: column 'messages' must be in the object of each line"),
        ('{"messages": []}', r"row 1: column 'messages' must be text or a list of messages"),
        (
            '{"messages": [{"role": "user", "content": "a", "weight": 2}]}',
            r"a list of messages with a weight of 0 or 1, got 2",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}], "weight": -1}',
            r"column 'weight' must be a number of at least 0",
        ),
        ('{"messages": [{"role": "user", "content": "a"}], "score": "x"}', r"column 'score' must be a finite number"),
    ],
)
def test_a_line_that_is_no_demonstration_is_named(tmp_path: Path, line: str, why: str) -> None:
    good = json.dumps({"messages": [MESSAGE]})
    (tmp_path / "d.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(TaskError, match=why):
        list(read_demonstrations(tmp_path / "d.jsonl"))


def test_rows_are_read_only_as_they_are_asked_for(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "ok"}] * 1500 + [{"prompt": None}]
    tasks = read_tasks(write_rows(tmp_path / "long.parquet", rows))
    assert [next(tasks).task_id for _ in range(1500)][-1] == "long:1499"
    with pytest.raises(TaskError, match=r"long\.parquet, row 1500: column 'prompt' must be text or a list of messages"):
        next(tasks)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": ""}, "column 'prompt' must be text or a list"),
        ({"prompt": []}, "column 'prompt' must be text or a list"),
        ({"prompt": 5}, "column 'prompt' must be text or a list"),
        ({"prompt": [{"role": "user", "content": None}]}, "column 'prompt' must be a list of messages with a content"),
        ({"prompt": [{"content": "x"}]}, "column 'prompt' must be a list of messages with a role"),
        ({"prompt": "x", "extra_info": "{"}, "column 'extra_info' must be JSON"),
        ({"prompt": "x", "extra_info": "[" * 100_000}, "column 'extra_info' must be JSON"),
        ({"prompt": "x", "extra_info": "[1]"}, "column 'extra_info' must be an object"),
        ({"prompt": "x", "extra_info": {"raw": b"\x00"}}, "column 'extra_info' must be JSON: finite"),
        ({"prompt": "x", "reward_model": '{"ground_truth": NaN}'}, "column 'reward_model' must be JSON: finite"),
        ({"prompt": "x", "reward_model": 1.0}, "column 'reward_model' must be an object"),
        ({"prompt": "x", "task_id": 5}, "column 'task_id' must be text"),
        ({"prompt": "x", "task_id": "a\x1b[2J"}, "column 'task_id' must be at most 500 printable characters"),
        ({"prompt": "x", "agent_name": "a" * 501}, "column 'agent_name' must be at most 500 printable characters"),
        ({"prompt": "x" * (MAX_CELL_BYTES + 1)}, f"column 'prompt' must be at most {MAX_CELL_BYTES} bytes"),
        ({"prompt": "x", "extra_info": '{"a": "\\ud800"}'}, "surrogates not allowed"),
        (
            {"prompt": "x", "extra_info": '{"a":' * 101 + "1" + "}" * 101},
            "column 'extra_info' must be nested at most 100",
        ),
        ({"prompt": "x", "extra_info": '{"a":' + "9" * 5000 + "}"}, "column 'extra_info' must be JSON"),
    ],
)
def test_a_cell_that_cannot_be_used_is_named(tmp_path: Path, row: dict[str, Any], complaint: str) -> None:
    path = write_rows(tmp_path / "bad.parquet", [row])
    with pytest.raises(TaskError, match=r"bad\.parquet, row 0: ") as refusal:
        list(read_tasks(path))
    assert complaint in str(refusal.value)
    assert len(str(refusal.value)) < 600


BYTES = pa.Array.from_buffers(  # "fine", and what is no UTF-8
    pa.string(), 2, [None, pa.py_buffer(struct.pack("<3i", 0, 4, 6)), pa.py_buffer(b"fine\xff\xfe")]
)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("prompt", BYTES),
        ("task_id", BYTES),
        ("agent_name", BYTES),
        ("reward_model", pa.StructArray.from_arrays([BYTES], ["ground_truth"])),
        ("extra_info", pa.array([{"t": None}, {"t": 2**60}], pa.struct([("t", pa.timestamp("us"))]))),
        ("extra_info", pa.array([{"t": None}, {"t": 1}], pa.struct([("t", pa.timestamp("ns"))]))),
    ],
)
def test_a_cell_that_python_cannot_hold_is_named_however_it_is_read(tmp_path: Path, name: str, column: Any) -> None:
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.table({"prompt": ["x", "y"], name: column}), path)
    rule = rf"bad\.parquet, row 1: column '{name}' must be UTF-8 text, or numbers"
    for read in (lambda: list(read_tasks(path)), lambda: list(TaskFile(path).tasks([0], places=[0, 1]))):
        with pytest.raises(TaskError, match=rule):
            read()
    with pytest.raises(TaskError, match=f"column '{name}' must be"):
        agent_names(path)


def test_every_row_is_checked_before_the_first_is_used(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}" * 50, "task_id": f"{number}"} for number in range(3000)]
    good = pa.Table.from_pylist(rows)
    path = tmp_path / "tasks.parquet"
    pq.write_table(good, path, row_group_size=1000, compression="none", use_dictionary=False)
    assert agent_names(path) == {None: 0}
    data = bytearray(path.read_bytes())
    at = data.rindex(b"2500")
    data[at - 400 : at] = b"\xff" * 400  # lengths and texts of a page; the footer is fine
    path.write_bytes(data)
    with pytest.raises(TaskError, match=r"tasks\.parquet"):
        agent_names(path)
    write_rows(path, [*rows, {"prompt": "", "task_id": "late"}])
    with pytest.raises(TaskError, match=r"row 3000: column 'prompt' must be text or a list"):
        agent_names(path)


def test_an_id_names_one_task_and_a_column_stands_once(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "tasks.parquet", [{"prompt": text, "task_id": "a"} for text in ("x", "x")])
    assert agent_names(path) == {None: 0}
    write_rows(path, [{"prompt": text, "task_id": name} for text, name in (("x", "a"), ("z", "b"), ("y", "a"))])
    with pytest.raises(TaskError, match=r"row 2: column 'task_id' must name one task, got 'a' as in row 0 with other"):
        agent_names(path)
    pq.write_table(pa.Table.from_arrays([pa.array(["x"])] * 2, names=["prompt", "prompt"]), path)
    with pytest.raises(TaskError, match=r"must have columns of different names, got \['prompt'\] more than once"):
        read_tasks(path)


def test_files_that_cannot_be_used_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"none\.parquet must be a parquet file, got nothing there"):
        read_tasks(tmp_path / "none.parquet")
    with pytest.raises(TaskError, match="got a folder there"):
        read_tasks(tmp_path)
    text = tmp_path / "text.parquet"
    text.write_text("prompt\nhello\n" * 100)
    with pytest.raises(TaskError, match=r"text\.parquet must be a parquet file, got something else"):
        read_tasks(text)
    cut = write_rows(tmp_path / "cut.parquet", [{"prompt": "x"}])
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(TaskError, match=r"cut\.parquet must be a parquet file"):
        read_tasks(cut)
    with pytest.raises(TaskError, match="must have a column 'prompt', got \\['question'\\]"):
        read_tasks(write_rows(tmp_path / "columns.parquet", [{"question": "x"}]))
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    with pytest.raises(TaskError, match="must hold at least one row"):
        read_tasks(empty)


def test_what_the_columns_cannot_hold_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    with pytest.raises(TaskError, match="task 'a' must be JSON"):
        write_tasks(path, [Task(task_id="a", prompt=[MESSAGE], ground_truth={1, 2})])
    with pytest.raises(TaskError, match="messages of task 'a' must have a text role and a text content only"):
        write_tasks(path, [Task(task_id="a", prompt=[{**MESSAGE, "tool_calls": []}])])
    with pytest.raises(TaskError, match="at least one row"):
        write_traces(path, [])
    assert not path.exists()


def test_rows_that_are_not_in_a_file_follow_the_same_rules() -> None:
    tasks = tasks_of_rows(
        [{"prompt": "2 + 2?", "task_id": "mine"}, {"prompt": [MESSAGE], "task_id": "b"}], source="POST /tasks"
    )
    assert [task.prompt for task in tasks] == [[MESSAGE], [MESSAGE]] and tasks[0].task_id == "mine"
    with pytest.raises(TaskError, match=r"POST /tasks, row 1: column 'prompt' must be text or a list of messages"):
        tasks_of_rows([{"prompt": "x", "task_id": "a"}, {"prompt": 5, "task_id": "b"}], source="POST /tasks")
    with pytest.raises(TaskError, match="POST /tasks, row 0: column 'task_id, prompt' must be both there"):
        tasks_of_rows([{"prompt": "x"}], source="POST /tasks")


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"ground_truth": "4"}, "ground_truth"),
        ({"extra-info": {"a": 1}}, "extra-info"),
        ({"answer": 4, "reward_model": {"ground_truth": 4}}, "answer"),
        ({"reward_model": {"style": "rule", "groundtruth": 4}}, "reward_model"),
    ],
)
def test_a_posted_column_that_would_be_left_out_is_refused_by_name(row, column) -> None:
    with pytest.raises(
        TaskError, match=f"POST /tasks, row 0: column {column!r} must be .*reward_model: {{ground_truth"
    ):
        tasks_of_rows([{"prompt": "x", "task_id": "a", **row}], source="POST /tasks")
    (task,) = tasks_of_rows(
        [{"prompt": "x", "task_id": "a", "ability": "math", "reward_model": {"ground_truth": "4"}}],
        source="POST /tasks",
    )
    assert task.ground_truth == "4"


def test_the_agents_that_a_file_names_are_known_with_their_first_rows(tmp_path):
    path = tmp_path / "tasks.parquet"
    rows = [{"prompt": "a", "agent_name": name} for name in (None, "tool_agent", "tool_agent", "other", None)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert agent_names(path) == {None: 0, "tool_agent": 1, "other": 3}
    pq.write_table(pa.Table.from_pylist([{"prompt": "a"}]), path)
    assert agent_names(path) == {None: 0}


def write_one_text(path: Path, *, rows: int, column: str, text: str) -> Path:
    """Rows that all say one text in a column, which the file has once."""
    said = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    table = pa.table({"prompt": pa.array(["2 + 2?"] * rows), **{column: said}})
    pq.write_table(table, path, compression="zstd", store_schema=False)
    return path


@pytest.mark.seconds
@pytest.mark.parametrize("column", ["prompt", "extra_info"])
def test_a_few_bytes_that_stand_for_gigabytes_are_refused_with_little_in_memory(tmp_path: Path, column: str) -> None:
    path = write_one_text(tmp_path / "tasks.parquet", rows=2000, column=column, text='{"x": "' + "y" * (2 << 20) + '"}')
    assert path.stat().st_size < 2000
    before = pa.total_allocated_bytes()
    read, most = 0, 0

    def read_all() -> None:
        nonlocal read, most
        for _ in read_tasks(path):
            read, most = read + 1, max(most, pa.total_allocated_bytes() - before)

    with pytest.raises(
        TaskError, match=r"must stand for at most 1000 times its own bytes, or 256 MiB, got more; write"
    ):
        read_all()
    assert 0 < read * (2 << 20) <= SMALL_BYTES
    assert most < SMALL_BYTES // 2


def test_ids_and_single_rows_of_such_a_file_are_looked_at_with_little_in_memory(tmp_path: Path) -> None:
    path = write_one_text(tmp_path / "tasks.parquet", rows=2000, column="task_id", text="i" * (2 << 20))
    before = pa.total_allocated_bytes()
    with pytest.raises(TaskError, match="row 0: column 'task_id' must be at most 500 printable characters"):
        agent_names(path)
    path = write_one_text(tmp_path / "again.parquet", rows=2000, column="prompt", text="y" * (2 << 20))
    for task in TaskFile(path).tasks([0], places=[1999, 3]):
        assert len(task.prompt[0]["content"]) == 2 << 20 and pa.total_allocated_bytes() - before < SMALL_BYTES


@pytest.mark.parametrize("text", ["{} short", "{} " * 500], ids=["one dictionary", "more than a dictionary holds"])
def test_messages_of_several_row_groups_are_read_together(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tasks.parquet"
    rows = [{"prompt": [{"role": "user", "content": text.format(*[row] * 500)}] * 2} for row in range(3000)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1000)
    places = [2999, 0, 1500]
    found = [task.prompt for task in TaskFile(path).tasks([0, 1, 2], places=places)]
    assert found == [rows[place]["prompt"] for place in places]


def test_a_small_file_of_many_equal_rows_is_read(tmp_path: Path) -> None:
    path = write_one_text(tmp_path / "tasks.parquet", rows=5000, column="prompt", text="Be brief. " * 100)
    assert path.stat().st_size * 1000 < 5000 * 1000
    assert sum(1 for _ in read_tasks(path)) == 5000


@pytest.mark.parametrize("kind", ["columns", "fields", "equal names"])
def test_a_schema_of_too_many_columns_is_refused_in_one_short_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tasks.parquet"
    many = {f"c{number}": "x" for number in range(2 * MAX_COLUMNS)}
    if kind == "columns":
        write_rows(path, [{"prompt": "x", **many}])
    elif kind == "fields":
        write_rows(path, [{"prompt": "x", "extra_info": many}])
    else:
        columns = [pa.array(["x"])] * (2 * MAX_COLUMNS)
        pq.write_table(pa.Table.from_arrays(columns, names=["prompt"] * len(columns)), path)
    with pytest.raises(
        TaskError, match=rf"must have at most {MAX_COLUMNS} columns, fields of structs included, got \d+"
    ) as no:
        read_tasks(path)
    assert len(str(no.value)) < 500


def test_columns_of_a_whole_schema_are_named_in_a_short_line(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "tasks.parquet", [{f"column {number}": "x" for number in range(MAX_COLUMNS)}])
    with pytest.raises(TaskError, match="must have a column 'prompt', got") as no:
        read_tasks(path)
    assert len(str(no.value)) < 900
