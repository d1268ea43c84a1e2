"""Rows -> a parquet file, as they come.

Called by what writes task files, demonstrations and a ledger's rows. Invariant: one row group is in memory at a time, and the file
appears whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from buffers.disk import replacing
from buffers.errors import TaskError

SLICE = 16
"""Rows in memory at once, of which each may be as long as a cell may be."""
MOST_ROWS, MOST_BYTES = 1024, 1 << 26
"""The largest row group."""


def write_rows(path: Path, *, rows: Iterable[dict[str, Any]], schema: Any) -> int:
    """Write them; how many. Raises TaskError where there is no row, and OSError."""
    number, group, rest = 0, schema.empty_table(), iter(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished, pq.ParquetWriter(unfinished, schema, compression="zstd") as writer:
        while some := list(islice(rest, SLICE)):
            group = pa.concat_tables([group, pa.Table.from_pylist(some, schema=schema)])
            number += len(some)
            if group.num_rows >= MOST_ROWS or group.nbytes >= MOST_BYTES:
                writer.write_table(group)
                group = schema.empty_table()
        if not number:
            raise TaskError(f"{path} must get at least one row, got none")
        if group.num_rows:
            writer.write_table(group)
    return number
