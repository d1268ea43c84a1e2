"""Task and trace files: parquet in verl's columns -> `Task`s, lazily. The owner of pyarrow, with `buffers.tasks.datasets`.

Called by the task pool and the task source, by programs that make data and by the SFT stage. Invariants: a file is read
one slice, or some of its row groups, at a time; a row that cannot be used stops the reading with file, row, column, rule,
value and remedy; files appear whole or not at all. It reads nothing but the file it is given and runs nothing that a file
says.

Columns of a task file: `prompt` (list of {role, content}, or text: one user message) and, optionally, `task_id`,
`data_source`, `agent_name`, `reward_model` (struct with `ground_truth`) and `extra_info` (struct); both may be JSON text.
A cell may have `MAX_CELL_BYTES`, be nested `MAX_DEPTH` deep, and hold no half of a surrogate pair; ids and names are printable.
A file may have `MAX_COLUMNS`, fields of structs included, and stand for `MAX_EXPANSION` times its bytes: a few of them can say one
long text in every row.
"""

from __future__ import annotations

import json
import reprlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from buffers.errors import TaskError
from buffers.records import Task
from buffers.row_files import SLICE, write_rows

Message = dict[str, Any]
T = TypeVar("T")
MAX_CELL_BYTES = 1 << 24
"""Most bytes of a prompt as JSON, which are those of a model call: no longer prompt could be asked."""
MAX_DEPTH = 100
MAX_NAME_CHARS = 500
MAX_COLUMNS = 1000
MAX_EXPANSION = 1000
SMALL_BYTES = 1 << 28
"""Bytes that the rows of any file may have, however small it is."""
_TASK_COLUMNS = ("task_id", "data_source", "prompt", "reward_model", "extra_info", "agent_name")
_TRUTH = "the truth goes into reward_model: {ground_truth: ...}, what else the agent may know into extra_info"
_NO_TASKS = (
    "demonstrations are another model's answers, without log-probabilities of the policy, and never enter a policy gradient: learn "
    "them by SFT, or make tasks of them with `understudy import --as tasks`"
)
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
TASK_SCHEMA = pa.schema(
    [
        ("task_id", pa.string()),
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("reward_model", pa.string()),
        ("extra_info", pa.string()),
        ("agent_name", pa.string()),
    ]
)
_CALL = pa.struct({
    "id": pa.string(), "type": pa.string(), "function": pa.struct({"name": pa.string(), "arguments": pa.string()}),
})  # fmt: skip
_SPOKEN = pa.struct({
    "role": pa.string(), "content": pa.string(), "reasoning_content": pa.string(), "tool_calls": pa.list_(_CALL),
    "tool_call_id": pa.string(), "weight": pa.int8(),
})  # fmt: skip
TRACE_SCHEMA = pa.schema({
    "messages": pa.list_(_SPOKEN), "tools": pa.string(), "score": pa.float64(), "source": pa.string(), "model": pa.string(),
})  # fmt: skip


def read_tasks(path: Path) -> Iterator[Task]:
    """The tasks of a file, in order. The file is checked at once, its rows as they are asked for."""
    file = _open(path, required="prompt")
    columns = [name for name in _TASK_COLUMNS if name in file.schema_arrow.names]
    return _read(file, columns=columns, parse=lambda row, cell: _task(cell, default_id=f"{path.stem}:{row}"), path=path)


def agent_names(path: Path, *, check: Callable[[Task], None] = lambda _: None) -> dict[str | None, int]:
    """Each `agent_name` of a task file (None: rows without one), with the first row that gives it. Every row is read and checked
    on the way, by `check` too, so that none of them stops a run later. Raises TaskError; also for a task id that names two
    different tasks."""
    twice = _ids_given_twice(path)
    first: dict[str, tuple[int, Task]] = {}
    found: dict[str | None, int] = {}
    for row, task in enumerate(read_tasks(path)):
        found.setdefault(task.agent_name, row)
        try:
            check(task)
        except TaskError as error:
            raise TaskError(f"{path}, row {row}: {error}") from None
        if task.task_id in twice:
            other, same = first.setdefault(task.task_id, (row, task))
            if same != task:
                raise TaskError(
                    f"{path}, row {row}: column 'task_id' must name one task, got {task.task_id!r:.120} as in row {other} with "
                    f"other columns; rename one of them"
                )
    return found


def unread_columns(path: Path) -> list[str]:
    """Columns of a task file of which nothing is read; those that verl or pandas writes anyway are not among them. Raises TaskError
    where one of them has the truth."""
    with _open(path, required="prompt") as file:
        names = set(file.schema_arrow.names)
    if "ground_truth" in names and "reward_model" not in names:
        raise TaskError(f"{path} must have the truth in a column 'reward_model', got one 'ground_truth'; {_TRUTH}")
    return sorted(name for name in names - {*_TASK_COLUMNS, "ability"} if not name.startswith("__"))


def _ids_given_twice(path: Path) -> set[str]:
    with _open(path, required="prompt", by_value=True) as file:
        if "task_id" not in file.schema_arrow.names:
            return set()
        try:
            counts = pc.value_counts(file.read(columns=["task_id"]).column(0).unify_dictionaries())
            return set(counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist())
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise TaskError(f"{path}: column 'task_id' must be readable text: {error}; write it again") from error


class TaskFile:
    """A task file by its row groups, for reading its rows in another order. Nothing is kept but the footer's sizes."""

    def __init__(self, path: Path) -> None:
        """Raises TaskError for a file that cannot be used."""
        self.path = path
        with _open(path, required="prompt") as file:
            groups = file.metadata.num_row_groups
            self.group_sizes = [file.metadata.row_group(group).num_rows for group in range(groups)]
            self._columns = [name for name in _TASK_COLUMNS if name in file.schema_arrow.names]
        self.has_ids = "task_id" in self._columns
        self._starts = [0, *accumulate(self.group_sizes)]
        self._kept: tuple[int, Any] = (-1, None)
        """The row group of the last row that was read by its number."""

    def ids(self, groups: Sequence[int]) -> list[str]:
        """The task ids of some row groups' rows, in order; no other column is read."""
        rows = [row for group in groups for row in range(self._starts[group], self._starts[group + 1])]
        if not self.has_ids:
            return [self._default_id(row) for row in rows]
        cells = self._pylist(self._read(groups, columns=["task_id"]), rows)
        given = [self._parsed(row, partial(_text, cell, column="task_id")) for row, cell in zip(rows, cells)]
        return [task_id or self._default_id(row) for row, task_id in zip(rows, given, strict=True)]

    def tasks(self, groups: Sequence[int], *, places: Sequence[int]) -> Iterator[Task]:
        """The tasks at these places among the rows of some row groups, in the order of the places."""
        rows = [row for group in groups for row in range(self._starts[group], self._starts[group + 1])]
        table = self._read(groups, columns=self._columns)
        for start in range(0, len(places), SLICE):
            some = places[start : start + SLICE]
            taken = [rows[place] for place in some]
            for row, cells in zip(taken, self._pylist(table.take(pa.array(some)), taken), strict=True):
                yield self._parsed(row, partial(_task, cells, default_id=self._default_id(row)))

    def task(self, row: int) -> Task:
        """The task of a row; its row group is kept for the next one."""
        group = bisect_right(self._starts, row) - 1
        if self._kept[0] != group:
            self._kept = (group, self._read([group], columns=self._columns))
        (cells,) = self._pylist(self._kept[1].take(pa.array([row - self._starts[group]])), [row])
        return self._parsed(row, partial(_task, cells, default_id=self._default_id(row)))

    def _default_id(self, row: int) -> str:
        return f"{self.path.stem}:{row}"

    def _pylist(self, table: Any, rows: Sequence[int]) -> list[dict[str, Any]]:
        try:
            return _pylist(table)
        except BadCell as error:
            raise TaskError(f"{self.path}, row {rows[error.row]}: {error}") from error

    def _parsed(self, row: int, parse: Callable[[], T]) -> T:
        try:
            return parse()
        except BadCell as error:
            raise TaskError(f"{self.path}, row {row}: {error}") from error

    def _read(self, groups: Sequence[int], *, columns: list[str]) -> Any:
        with _open(self.path, required="prompt", by_value=True) as file:
            found = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
            if found != self.group_sizes:
                raise TaskError(
                    f"{self.path} must not change while a run reads it, got {sum(found)} rows where there were "
                    f"{self._starts[-1]}; write another file"
                )
            try:  # one by one: Arrow reads no lists of texts by value of several groups together
                return pa.concat_tables([file.read_row_group(group, columns=columns) for group in groups])
            except (pa.ArrowException, OSError) as error:
                first = self._starts[min(groups)]
                raise TaskError(f"{self.path} must be readable from row {first}: {error}; write it again") from error


def read_rows(path: Path, *, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of any parquet file that has these columns, in order and as they are."""
    for name in columns:
        file = _open(path, required=name)
    return _read(file, columns=list(columns), parse=lambda _, cells: cells, path=path)


def tasks_of_rows(rows: Iterable[dict[str, Any]], *, source: str) -> list[Task]:
    """Tasks from rows that did not come from a file; each needs a `task_id` of its own. Raises TaskError, naming the row, also for
    a column that would be left out."""
    tasks = []
    for number, row in enumerate(rows):
        try:
            if "prompt" not in row or not row.get("task_id"):
                raise BadCell("task_id, prompt", "both there", sorted(row), "add them")
            for name in sorted(row.keys() - {*_TASK_COLUMNS, "ability"}):  # verl's rows have that one
                raise BadCell(name, f"one of {list(_TASK_COLUMNS)}", row[name], _TRUTH)
            truth = _object(row, column="reward_model")
            if "ground_truth" not in truth and truth.keys() - {"style"}:
                raise BadCell("reward_model", "an object with ground_truth", truth, _TRUTH)
            tasks.append(_task(row, default_id=""))
        except BadCell as error:
            raise TaskError(f"{source}, row {number}: {error}") from error
    return tasks


def task_row(cells: Mapping[str, Any], *, data_source: str) -> dict[str, Any]:
    """A row of a task file from cells by our names, `ground_truth` among them. `data_source`: that of a row without one. Raises
    BadCell for a prompt that is none."""
    messages = _messages(dict(cells), column="prompt")
    extra_info = _object(dict(cells), column="extra_info")
    truth = cells.get("ground_truth")
    _json_cell(truth, column="ground_truth")
    return {
        "task_id": None if cells.get("task_id") is None else str(cells["task_id"]),
        "data_source": _text(dict(cells), column="data_source") or data_source,
        "prompt": [{"role": each["role"], "content": each["content"]} for each in messages],
        "reward_model": _as_json({"style": "rule", "ground_truth": truth}),
        "extra_info": _as_json(extra_info),
        "agent_name": _text(dict(cells), column="agent_name"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A conversation to learn from."""

    messages: list[Message]
    """Messages in OpenAI's form; an assistant's may have `tool_calls`, `reasoning_content`, and `weight` 0, with which it is not
    learned, or 1."""
    tools: list[dict[str, Any]] | None = None
    """What its prompt offers, in OpenAI's form."""
    score: float | None = None
    """How well it did; None: nobody says."""
    weight: float = 1.0
    """Weight of its tokens in the loss."""


def read_demonstrations(path: Path) -> Iterator[Trace]:
    """The conversations of a parquet file, or of a `.jsonl` file with an object a line, in order.

    Columns: `messages`, and where there are some `tools`, `score` and `weight`; messages and tools may be JSON text. Raises
    TaskError."""
    if path.suffix == ".jsonl":
        return _read_lines(path)
    file = _open(path, required="messages")
    columns = [name for name in ("messages", "tools", "score", "weight") if name in file.schema_arrow.names]
    return _read(file, columns=columns, parse=lambda _, cell: _trace(without_nulls(cell)), path=path)


def write_tasks(path: Path, tasks: Iterable[Task], *, structs: bool = False) -> None:
    """Write a task file. `ground_truth` and `extra_info` become JSON text: their shape may differ from row to row.

    `structs`: their shape is the same in all rows, and they become struct columns, as verl's own programs read them.
    """
    rows = []
    for task in tasks:
        name = f"task {task.task_id!r}"
        truth = {"style": "rule", "ground_truth": task.ground_truth}
        reward_model, extra_info = _json(truth, name=name), _json(task.extra_info, name=name)  # checked in either form
        rows.append(
            {
                "task_id": task.task_id,
                "data_source": task.data_source,
                "prompt": _plain(task.prompt, name=name),
                "reward_model": truth if structs else reward_model,
                "extra_info": task.extra_info if structs else extra_info,
                "agent_name": task.agent_name,
            }
        )
    write_rows(path, rows=rows, schema=pa.Table.from_pylist(rows).schema if structs else TASK_SCHEMA)


def write_traces(
    path: Path, traces: Iterable[list[Message]], *, tools: Sequence[Mapping[str, Any]] | None = None
) -> None:
    """Write a file of conversations, which all offer the same tools."""
    offered = list(tools) if tools else None
    rows = (trace_row(_plain(each, name=f"trace {n}"), tools=offered) for n, each in enumerate(traces))
    write_rows(path, rows=rows, schema=TRACE_SCHEMA)


def trace_row(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    score: float | None = None,
    source: str = "",
    model: str = "",
) -> dict[str, Any]:
    """A row of a file of conversations, in OpenAI's form, arguments of calls as JSON text. `source`, `model`: which session it is,
    and who answered, for people. Raises BadCell for what a reader would refuse."""
    _json_cell(messages, column="messages")
    _json_cell(tools, column="tools")
    offered = _as_json(tools) if tools else None
    return {"messages": messages, "tools": offered, "score": score, "source": source or None, "model": model or None}


class BadCell(Exception):
    """Raised while a row is parsed; becomes a TaskError that names file and row."""

    def __init__(self, column: str, rule: str, value: object, remedy: str, *, row: int = 0) -> None:
        """`row`: among those that are parsed together."""
        super().__init__(f"column {column!r} must be {rule}, got {reprlib.repr(value):.120}; {remedy}")
        self.row = row


def slices(batches: Iterable[Any], *, path: Path) -> Iterator[Any]:
    """The batches of a file, until they are too much for one of its size. Raises TaskError."""
    most, size = max(SMALL_BYTES, MAX_EXPANSION * path.stat().st_size), 0
    for batch in batches:
        size += batch.nbytes
        if size > most:
            raise TaskError(
                f"{path} must stand for at most {MAX_EXPANSION} times its own bytes, or {SMALL_BYTES >> 20} MiB, got more; write "
                f"fewer rows, or shorter ones"
            )
        yield batch


def _open(path: Path, *, required: str, by_value: bool = False) -> Any:
    """`by_value`: a text that stands in many rows is in memory once."""
    if not path.is_file():
        raise TaskError(
            f"{path} must be a parquet file, got {'a folder' if path.is_dir() else 'nothing'} there; name a file"
        )
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise TaskError(f"{path} must be a parquet file, got something else ({error}); write it again") from error
    if file.metadata.num_columns > MAX_COLUMNS:
        raise TaskError(
            f"{path} must have at most {MAX_COLUMNS} columns, fields of structs included, got {file.metadata.num_columns}; write "
            f"structs as JSON text"
        )
    names = file.schema_arrow.names
    if twice := sorted(name for name, number in Counter(names).items() if number > 1):
        raise TaskError(
            f"{path} must have columns of different names, got {twice!s:.500} more than once; rename one of them"
        )
    if required not in names:
        remedy = _NO_TASKS if required == "prompt" and "messages" in names else "rename or add it"
        raise TaskError(f"{path} must have a column {required!r}, got {sorted(names)!s:.500}; {remedy}")
    if file.metadata.num_rows == 0:
        raise TaskError(f"{path} must hold at least one row, got none; write it again")
    if not by_value:
        return file
    with file:
        leaves = [file.metadata.schema.column(number).path for number in range(file.metadata.num_columns)]
        return pq.ParquetFile(path, read_dictionary=leaves, metadata=file.metadata)


def _read(file: Any, *, columns: list[str], parse: Callable[[int, dict[str, Any]], T], path: Path) -> Iterator[T]:
    number = 0
    with file:
        try:
            for batch in slices(file.iter_batches(batch_size=SLICE, columns=columns), path=path):
                for row in _pylist(batch):
                    yield parse(number, row)
                    number += 1
        except BadCell as error:
            raise TaskError(f"{path}, row {number + error.row}: {error}") from error
        except (pa.ArrowException, OSError) as error:
            raise TaskError(f"{path} must be readable after row {number}: {error}; write it again") from error


def _pylist(table: Any) -> list[dict[str, Any]]:
    """The rows of a table or batch. Raises BadCell for the first cell that is no Python value: text that is no UTF-8, a time that
    no calendar has."""
    try:
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows
    except (ValueError, OverflowError):
        for row in range(table.num_rows):
            for name in table.schema.names:
                try:
                    table.column(name)[row].as_py()
                except (ValueError, OverflowError) as error:
                    raise BadCell(name, "UTF-8 text, or numbers", str(error), "write it as text", row=row) from error
        raise


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


def _read_lines(path: Path) -> Iterator[Trace]:
    if not path.is_file():
        raise TaskError(
            f"{path} must be a file of JSON lines, got {'a folder' if path.is_dir() else 'nothing'} there; name a file"
        )
    number = 0
    try:
        with path.open("rb") as lines:
            while line := lines.readline(MAX_CELL_BYTES + 1):
                if len(line) > MAX_CELL_BYTES:
                    raise BadCell("messages", f"at most {MAX_CELL_BYTES} bytes a line", "a longer line", "write less")
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict) or "messages" not in row:
                    raise BadCell("messages", "in the object of each line", row, "write {'messages': [...]}")
                yield _trace(row)
                number += 1
    except BadCell as error:
        raise TaskError(f"{path}, row {number}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"{path}, row {number}: a line must be a JSON object ({error}); write one object a line"
        ) from error
    if not number:
        raise TaskError(f"{path} must hold at least one row, got none; write it again")


def without_nulls(value: Any) -> Any:
    """A struct column fills the fields that an object lacks with null, at each depth."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _trace(row: dict[str, Any]) -> Trace:
    messages, tools = _listed(row, column="messages"), _listed(row, column="tools")
    if tools is not None and not all(isinstance(tool, dict) for tool in tools):
        raise BadCell("tools", "a list of objects", tools, "write OpenAI's list of tools")
    for message in messages or ():
        if isinstance(message, dict) and message.get("content") is None and message.get("tool_calls"):
            message["content"] = ""  # as OpenAI writes an answer of calls alone
        if isinstance(message, dict) and message.get("weight") not in (None, 0, 1):
            raise BadCell(
                "messages",
                "a list of messages with a weight of 0 or 1",
                message["weight"],
                "weigh whole rows by `weight`",
            )
    score, weight = (_number(row, column=name) for name in ("score", "weight"))
    if weight is not None and weight < 0.0:
        raise BadCell("weight", "a number of at least 0", weight, "leave out what is not to be learned")
    return Trace(
        messages=_messages({**row, "messages": messages}, column="messages"), tools=tools or None, score=score,
        weight=1.0 if weight is None else weight,
    )  # fmt: skip


def _listed(row: dict[str, Any], *, column: str) -> list[Any] | None:
    """A cell that is a list, or the JSON text of one; None: there is none."""
    cell = row.get(column)
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise BadCell(column, f"a list, or its JSON text ({error})", cell[:200], "write OpenAI's list") from error
    if cell is not None and not isinstance(cell, list):
        raise BadCell(column, "a JSON list of objects", cell, "write OpenAI's list")
    return cell


def _number(row: dict[str, Any], *, column: str) -> float | None:
    cell = row.get(column)
    if cell is None:
        return None
    if isinstance(cell, bool) or not isinstance(cell, int | float) or not isfinite(cell):
        raise BadCell(column, "a finite number", cell, "write a number, or nothing")
    return float(cell)


def _messages(row: dict[str, Any], *, column: str) -> list[Message]:
    cell = row[column]
    if isinstance(cell, str) and cell:
        cell = [{"role": "user", "content": cell}]
    if not isinstance(cell, list) or not cell:
        raise BadCell(
            column, "text or a list of messages, not empty", cell, "write [{'role': 'user', 'content': '...'}]"
        )
    for message in cell:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise BadCell(column, "a list of messages with a role", message, "give each message a role and a content")
        if not isinstance(message.get("content"), str | list):
            raise BadCell(column, "a list of messages with a content", message, "use text, or a list of parts")
    # A struct column fills the fields that a message lacks with null.
    messages = [{key: value for key, value in message.items() if value is not None} for message in cell]
    _json_cell(messages, column=column)
    return messages


def _object(row: dict[str, Any], *, column: str) -> dict[str, Any]:
    """A struct cell, or the JSON text of an object; absent and null are empty."""
    cell = row.get(column)
    if cell is None or cell == {}:
        return {}
    remedy = "use a struct column, or the JSON text of an object"
    value = cell
    if isinstance(cell, str):
        try:
            value = json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise BadCell(column, f"JSON ({error})", cell[:200], remedy) from error
    if not isinstance(value, dict):
        raise BadCell(column, "an object", cell, remedy)
    _json_cell(value, column=column)
    return value


def _text(row: dict[str, Any], *, column: str) -> str | None:
    cell = row.get(column)
    if cell is not None and not isinstance(cell, str):
        raise BadCell(column, "text", cell, "write the column as strings")
    if cell and not (len(cell) <= MAX_NAME_CHARS and cell.isprintable()):
        rule = f"at most {MAX_NAME_CHARS} printable characters"
        raise BadCell(column, rule, cell[:200], "write a short name in one line")
    return cell


def _json_cell(value: object, *, column: str) -> None:
    try:
        text = _as_json(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadCell(
            column, f"JSON: finite numbers, text, lists, objects ({error})", value, "write it as text"
        ) from error
    if len(text) > MAX_CELL_BYTES:
        raise BadCell(column, f"at most {MAX_CELL_BYTES} bytes", f"{len(text)} bytes", "write less")
    if text.count(b"{") + text.count(b"[") > MAX_DEPTH and _is_deep(value, MAX_DEPTH):
        raise BadCell(column, f"nested at most {MAX_DEPTH} deep", text[:200], "write it flatter, or as text")


_as_json = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


def _is_deep(value: object, most: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (most == 0 or any(_is_deep(each, most - 1) for each in inner))


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
