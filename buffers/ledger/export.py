"""A ledger's training rows as a parquet file, for notebooks and other trainers.

Called by `buffers.ledger.cli`. Invariant: the file holds what a batch of the same episodes would hold, one line for each branch,
and appears whole or not at all.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from buffers.disk import replacing
from buffers.errors import UnderstudyError
from buffers.ledger.batches import group_rows

_ROWS_AT_ONCE = 256
_SCHEMA = pa.schema(
    [
        ("episode_id", pa.string()),
        ("group_id", pa.int64()),
        ("task_id", pa.string()),
        ("state", pa.string()),
        ("score", pa.float64()),
        ("branch_score", pa.float64()),
        ("role", pa.string()),
        ("role_score", pa.float64()),
        ("round_scores", pa.list_(pa.struct([("round_index", pa.int32()), ("score", pa.float64())]))),
        ("judges", pa.list_(pa.struct([("judge", pa.string()), ("score", pa.float64())]))),
        ("greedy", pa.bool_()),
        ("hint", pa.string()),
        ("truncated", pa.list_(pa.int32())),
        ("loss_weight", pa.float64()),
        ("ids", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("rounds", pa.list_(pa.int32())),
    ]
)


def export_parquet(db: sqlite3.Connection, *, path: Path) -> int:
    """Write every row of every scored episode; how many."""
    number = 0
    try:
        with replacing(path) as scratch, pq.ParquetWriter(scratch, _SCHEMA, compression="zstd") as writer:
            for rows in _slices(db):
                writer.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA))
                number += len(rows)
    except OSError as error:
        raise UnderstudyError(f"--parquet must be a file that can be written, got {path} ({error})") from error
    return number


def _slices(db: sqlite3.Connection) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    groups = db.execute("SELECT group_id, task_id, state FROM grp WHERE num_scored > 0 ORDER BY group_id").fetchall()
    for group_id, task_id, state in groups:
        for row in group_rows(db, group_id=group_id):
            nested = {
                "round_scores": [{"round_index": index, "score": s} for index, s in row.round_scores.items()],
                "judges": [{"judge": judge, "score": s} for judge, s in (row.judges or {}).items()],
                "truncated": list(row.truncated),
            }
            of_group = {"group_id": group_id, "task_id": task_id, "state": state}
            flat = {name: getattr(row, name) for name in _SCHEMA.names if name not in nested | of_group}
            rows.append(flat | of_group | nested)
        if len(rows) >= _ROWS_AT_ONCE:
            yield rows
            rows = []
    if rows:
        yield rows
