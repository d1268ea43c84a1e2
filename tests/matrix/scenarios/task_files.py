"""Task files of the matrix's runs: plain prompts, mostly, that any text answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from buffers.records import Task
from buffers.tasks.parquet import write_tasks


def task(number: int, *, name: str = "q", words: int = 0, **columns: Any) -> Task:
    """A short question, with so many words more."""
    prompt = columns.pop("prompt", [{"role": "user", "content": f"Say {number}." + " the" * words}])
    return Task(task_id=f"{name}{number}", prompt=prompt, **columns)


def prompts(folder: Path, *, number: int = 24, name: str = "tasks", **columns: Any) -> None:
    """`<name>.parquet` with so many questions."""
    write_tasks(folder / f"{name}.parquet", [task(each, name=f"{name}-", **columns) for each in range(number)])


def with_columns(number: int = 24, **columns: Any) -> Callable[[Path], None]:
    """Writes `tasks.parquet` whose rows have these columns."""
    return lambda folder: prompts(folder, number=number, **columns)


def of_many_lengths(**columns: Any) -> Callable[[Path], None]:
    """Writes `tasks.parquet` whose prompts have 13 to 20 tokens."""
    return written([task(number, name="tasks-", words=number % 6, **columns) for number in range(24)])


def written(tasks: Iterable[Task]) -> Callable[[Path], None]:
    """Writes `tasks.parquet` with these tasks."""
    some = list(tasks)
    return lambda folder: write_tasks(folder / "tasks.parquet", some)
