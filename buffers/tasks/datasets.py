"""A data set with columns of its own -> a task file. Reads parquet files, and folders that `datasets` has written (`save_to_disk`).

Called by `learner.startup.hub`, before a run starts. Invariants: one batch of rows is in memory at a time; the file appears whole
or not at all; only the named columns are read. It needs no package but pyarrow, downloads nothing, and judges no row: the run's
own check of its task files does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from buffers.errors import TaskError
from buffers.row_files import SLICE, write_rows
from buffers.tasks.parquet import TASK_SCHEMA, BadCell, slices, task_row

STATE, SPLITS = "state.json", "dataset_dict.json"
"""What `save_to_disk` writes beside the files of a split, which it lists, and above several splits."""
OURS = ("task_id", "prompt", "ground_truth", "data_source", "agent_name", "extra_info")


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets` has written it, as one split or as several."""
    return (folder / STATE).is_file() or (folder / SPLITS).is_file()


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
    batches = _batches(files, columns=sorted(set(chosen.values())))
    cells = enumerate(row for batch in batches for row in batch)
    write_rows(to, rows=(_row(each, chosen=chosen, source=source, number=n) for n, each in cells), schema=TASK_SCHEMA)


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


def dataset_rows(file: Path, *, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """The rows of a file, with those of these columns that it has. Raises TaskError, also where it has none of them."""
    there = _columns_of(file)
    chosen = [name for name in there if name in columns]
    if not chosen:
        raise TaskError(f"{file} must have one of the columns {', '.join(columns)}, got {', '.join(there)!s:.500}")
    for rows in _batches([file], columns=chosen):
        yield from rows


def _columns_of(file: Path) -> list[str]:
    with _opened(file) as reader:
        schema = reader.schema_arrow if isinstance(reader, pq.ParquetFile) else reader.schema
        return list(schema.names)


def _batches(files: Sequence[Path], *, columns: list[str]) -> Iterator[list[dict[str, Any]]]:
    for file in files:
        with _opened(file) as reader:
            try:
                if isinstance(reader, pq.ParquetFile):
                    batches = reader.iter_batches(batch_size=SLICE, columns=columns)
                else:
                    is_stream = isinstance(reader, pa.ipc.RecordBatchStreamReader)
                    batches = (
                        batch.select(columns).slice(start, SLICE)
                        for batch in (reader if is_stream else map(reader.get_batch, range(reader.num_record_batches)))
                        for start in range(0, batch.num_rows, SLICE)
                    )
                for batch in slices(batches, path=file):
                    yield batch.to_pylist()
            except (pa.ArrowException, OSError, ValueError) as error:
                raise TaskError(f"{file} must be readable to its end: {error}; get it again") from error


def _opened(file: Path) -> Any:
    """A parquet file, a stream of Arrow's, which `datasets` writes, or an Arrow file: by its first bytes."""
    try:
        with file.open("rb") as source:
            magic = source.read(6)
        if magic.startswith(b"PAR1"):
            return pq.ParquetFile(file)
        opened = pa.ipc.open_file if magic == b"ARROW1" else pa.ipc.open_stream
        return opened(pa.memory_map(str(file)))
    except (pa.ArrowException, OSError) as error:
        raise TaskError(
            f"{file} must be a parquet file or an Arrow stream, got something else ({error}); get it again"
        ) from error
