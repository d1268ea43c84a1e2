"""A data set with columns of its own -> a task file. Reads parquet files, and folders that `datasets` has written (`save_to_disk`).

Called by `learner.startup.hub`, before a run starts. Invariants: one batch of rows is in memory at a time; the file appears whole
or not at all; only the named columns are read. It needs no package but pyarrow, downloads nothing, and judges no row: the run's
own check of its task files does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from buffers.errors import TaskError
from buffers.tasks.parquet import SLICE, TASK_SCHEMA, BadCell, slices, task_row

STATE = "state.json"
"""What `save_to_disk` writes beside the files of a split; it lists them."""
OURS = ("task_id", "prompt", "ground_truth", "data_source", "agent_name", "extra_info")
MOST_ROWS, MOST_BYTES = 1024, 1 << 26
"""The largest row group."""


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets` has written it, as one split or as several."""
    return (folder / STATE).is_file() or (folder / "dataset_dict.json").is_file()


def saved_files(folder: Path) -> list[Path]:
    """The files of a split, in order. Raises TaskError for a folder of several splits, and for one that lacks a file."""
    if not (folder / STATE).is_file():
        splits = sorted(path.parent.name for path in folder.glob(f"*/{STATE}"))
        raise TaskError(
            f"{folder} must be one split of a data set, got the splits {splits}; name {folder / (splits or ['SPLIT'])[0]}"
        )
    told = json.loads((folder / STATE).read_text(encoding="utf-8"))["_data_files"]
    files = [folder / one["filename"] for one in told]
    if missing := [file.name for file in files if not file.is_file()]:
        raise TaskError(f"{folder} must have all files that its {STATE} names, got none of {missing}; copy it again")
    return files


def write_task_file(files: Sequence[Path], *, columns: Mapping[str, str], source: str, to: Path) -> None:
    """Writes the rows of the data set's files, in order, as tasks. `columns`: ours -> the data set's; those that it does not name
    have our names, or are left out. Raises TaskError."""
    chosen = _chosen(_columns_of(files[0]), columns=columns, source=source)
    to.parent.mkdir(parents=True, exist_ok=True)
    unfinished = to.with_name(f".{to.name}.{os.getpid()}")
    number = 0
    group = TASK_SCHEMA.empty_table()
    try:
        with pq.ParquetWriter(unfinished, TASK_SCHEMA) as writer:
            for batch in _batches(files, columns=sorted(set(chosen.values()))):
                rows = [_row(cells, chosen=chosen, source=source, number=number + i) for i, cells in enumerate(batch)]
                number += len(rows)
                group = pa.concat_tables([group, pa.Table.from_pylist(rows, schema=TASK_SCHEMA)])
                if group.num_rows >= MOST_ROWS or group.nbytes >= MOST_BYTES:
                    writer.write_table(group)
                    group = TASK_SCHEMA.empty_table()
            if group.num_rows:
                writer.write_table(group)
        os.replace(unfinished, to)
    finally:
        unfinished.unlink(missing_ok=True)


def _chosen(there: Sequence[str], *, columns: Mapping[str, str], source: str) -> dict[str, str]:
    """Ours -> the data set's column."""
    for ours, theirs in columns.items():
        if theirs not in there:
            raise TaskError(
                f"data.columns.{ours} must be a column of {source}, got {theirs!r}; it has {', '.join(there)}"
            )
    chosen = {name: name for name in OURS if name in there} | dict(columns)
    if "prompt" not in chosen:
        raise TaskError(
            f"data.columns must say which column of {source} is the prompt, got {dict(columns)}; it has {', '.join(there)}: set "
            f"data.columns={{prompt: {there[0]}}}"
        )
    return chosen


def _row(cells: Mapping[str, Any], *, chosen: Mapping[str, str], source: str, number: int) -> dict[str, Any]:
    try:
        return task_row({ours: cells[theirs] for ours, theirs in chosen.items()}, data_source=source)
    except BadCell as error:
        raise TaskError(f"{source}, row {number}: {error}") from error


def _columns_of(file: Path) -> list[str]:
    with _opened(file) as reader:
        schema = reader.schema if file.suffix == ".arrow" else reader.schema_arrow
        return list(schema.names)


def _batches(files: Sequence[Path], *, columns: list[str]) -> Iterator[list[dict[str, Any]]]:
    for file in files:
        with _opened(file) as reader:
            try:
                if file.suffix != ".arrow":
                    batches = reader.iter_batches(batch_size=SLICE, columns=columns)
                else:
                    batches = (
                        batch.select(columns).slice(start, SLICE)
                        for batch in reader
                        for start in range(0, batch.num_rows, SLICE)
                    )
                for batch in slices(batches, path=file):
                    yield batch.to_pylist()
            except (pa.ArrowException, OSError, ValueError) as error:
                raise TaskError(f"{file} must be readable to its end: {error}; get it again") from error


def _opened(file: Path) -> Any:
    """A parquet file, or a stream of Arrow's, which `datasets` writes."""
    try:
        return pa.ipc.open_stream(pa.memory_map(str(file))) if file.suffix == ".arrow" else pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise TaskError(
            f"{file} must be a parquet file or an Arrow stream, got something else ({error}); get it again"
        ) from error
