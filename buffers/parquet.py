"""Task and trace files: parquet in verl's columns -> `Task`s, lazily. The only owner of pyarrow.

Called by the task pool, by programs that make data and by the warm start. Invariants: a file is read one slice at a
time; a row that cannot be used stops the reading with file, row, column, rule, value and remedy; files appear whole or
not at all. It reads nothing but the file it is given and runs nothing that a file says.

Columns of a task file: `prompt` (list of {role, content}, or text: one user message) and, optionally, `task_id`,
`data_source`, `agent_name`, `reward_model` (struct with `ground_truth`) and `extra_info` (struct); both may be JSON text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from buffers.errors import TaskError
from buffers.records import Task

Message = dict[str, Any]
T = TypeVar("T")
_SLICE = 1024
_TASK_COLUMNS = ("task_id", "data_source", "prompt", "reward_model", "extra_info", "agent_name")
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_TASK_SCHEMA = pa.schema(
    [
        ("task_id", pa.string()),
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("reward_model", pa.string()),
        ("extra_info", pa.string()),
        ("agent_name", pa.string()),
    ]
)
_TRACE_SCHEMA = pa.schema([("messages", _MESSAGES)])


def read_tasks(path: Path) -> Iterator[Task]:
    """The tasks of a file, in order. The file is checked at once, its rows as they are asked for."""
    file = _open(path, required="prompt")
    columns = [name for name in _TASK_COLUMNS if name in file.schema_arrow.names]
    return _read(file, columns=columns, parse=lambda row, cell: _task(cell, default_id=f"{path.stem}:{row}"), path=path)


def tasks_of_rows(rows: Iterable[dict[str, Any]], *, source: str) -> list[Task]:
    """Tasks from rows that did not come from a file; each needs a `task_id` of its own. Raises TaskError, naming the row."""
    tasks = []
    for number, row in enumerate(rows):
        try:
            if "prompt" not in row or not row.get("task_id"):
                raise _BadCell("task_id, prompt", "both there", sorted(row), "add them")
            tasks.append(_task(row, default_id=""))
        except _BadCell as error:
            raise TaskError(f"{source}, row {number}: {error}") from error
    return tasks


def read_traces(path: Path) -> Iterator[list[Message]]:
    """The conversations of a file (column `messages`), in order."""
    file = _open(path, required="messages")
    return _read(file, columns=["messages"], parse=lambda _, cell: _messages(cell, column="messages"), path=path)


def write_tasks(path: Path, tasks: Iterable[Task]) -> None:
    """Write a task file. `ground_truth` and `extra_info` become JSON text: their shape may differ from row to row."""
    rows = [
        {
            "task_id": task.task_id,
            "data_source": task.data_source,
            "prompt": _plain(task.prompt, name=f"task {task.task_id!r}"),
            "reward_model": _json({"style": "rule", "ground_truth": task.ground_truth}, name=f"task {task.task_id!r}"),
            "extra_info": _json(task.extra_info, name=f"task {task.task_id!r}"),
            "agent_name": task.agent_name,
        }
        for task in tasks
    ]
    _write(path, rows=rows, schema=_TASK_SCHEMA)


def write_traces(path: Path, traces: Iterable[list[Message]]) -> None:
    """Write a file of conversations."""
    rows = [{"messages": _plain(messages, name=f"trace {number}")} for number, messages in enumerate(traces)]
    _write(path, rows=rows, schema=_TRACE_SCHEMA)


class _BadCell(Exception):
    """Raised while a row is parsed; becomes a TaskError that names file and row."""

    def __init__(self, column: str, rule: str, value: object, remedy: str) -> None:
        super().__init__(f"column {column!r} must be {rule}, got {value!r:.120}; {remedy}")


def _open(path: Path, *, required: str) -> Any:
    if not path.is_file():
        raise TaskError(
            f"{path} must be a parquet file, got {'a folder' if path.is_dir() else 'nothing'} there; name a file"
        )
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise TaskError(f"{path} must be a parquet file, got something else ({error}); write it again") from error
    names = file.schema_arrow.names
    if required not in names:
        raise TaskError(f"{path} must have a column {required!r}, got {sorted(names)}; rename or add it")
    if file.metadata.num_rows == 0:
        raise TaskError(f"{path} must hold at least one row, got none; write it again")
    return file


def _read(file: Any, *, columns: list[str], parse: Callable[[int, dict[str, Any]], T], path: Path) -> Iterator[T]:
    number = 0
    with file:
        try:
            for batch in file.iter_batches(batch_size=_SLICE, columns=columns):
                for row in batch.to_pylist():
                    yield parse(number, row)
                    number += 1
        except _BadCell as error:
            raise TaskError(f"{path}, row {number}: {error}") from error
        except (pa.ArrowException, OSError) as error:
            raise TaskError(f"{path} must be readable after row {number}: {error}; write it again") from error


def _task(row: dict[str, Any], *, default_id: str) -> Task:
    reward_model = _object(row, column="reward_model")
    return Task(
        task_id=_text(row, column="task_id") or default_id,
        prompt=_messages(row, column="prompt"),
        data_source=_text(row, column="data_source") or "unknown",
        ground_truth=reward_model.get("ground_truth"),
        agent_name=_text(row, column="agent_name"),
        extra_info=_object(row, column="extra_info"),
    )


def _messages(row: dict[str, Any], *, column: str) -> list[Message]:
    cell = row[column]
    if isinstance(cell, str) and cell:
        return [{"role": "user", "content": cell}]
    if not isinstance(cell, list) or not cell:
        raise _BadCell(
            column, "text or a list of messages, not empty", cell, "write [{'role': 'user', 'content': '...'}]"
        )
    for message in cell:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise _BadCell(column, "a list of messages with a role", message, "give each message a role and a content")
        if not isinstance(message.get("content"), str | list):
            raise _BadCell(column, "a list of messages with a content", message, "use text, or a list of parts")
    # A struct column fills the fields that a message lacks with null.
    messages = [{key: value for key, value in message.items() if value is not None} for message in cell]
    _json_cell(messages, column=column)
    return messages


def _object(row: dict[str, Any], *, column: str) -> dict[str, Any]:
    """A struct cell, or the JSON text of an object; absent and null are empty."""
    cell = row.get(column)
    if cell is None:
        return {}
    remedy = "use a struct column, or the JSON text of an object"
    value = cell
    if isinstance(cell, str):
        try:
            value = json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise _BadCell(column, f"JSON ({error})", cell, remedy) from error
    if not isinstance(value, dict):
        raise _BadCell(column, "an object", cell, remedy)
    _json_cell(value, column=column)
    return value


def _text(row: dict[str, Any], *, column: str) -> str | None:
    cell = row.get(column)
    if cell is not None and not isinstance(cell, str):
        raise _BadCell(column, "text", cell, "write the column as strings")
    return cell


def _json_cell(value: object, *, column: str) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _BadCell(
            column, f"JSON: finite numbers, text, lists, objects ({error})", value, "write it as text"
        ) from error


def _plain(messages: list[Message], *, name: str) -> list[dict[str, str]]:
    for message in messages:
        if set(message) != {"role", "content"} or not all(isinstance(value, str) for value in message.values()):
            raise TaskError(f"messages of {name} must have a text role and a text content only, got {message!r:.120}")
    return messages


def _json(value: object, *, name: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TaskError(f"{name} must be JSON (finite numbers, text, lists, objects): {error}") from error


def _write(path: Path, *, rows: list[dict[str, Any]], schema: Any) -> None:
    if not rows:
        raise TaskError(f"{path} must get at least one row, got none")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), unfinished, row_group_size=_SLICE)
    os.replace(unfinished, path)
