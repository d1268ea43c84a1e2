"""`Traces`: some whole episodes of each batch, as text and as tokens, in `traces.jsonl`.

Called by the learn loop with each batch that is trained: the episode with the highest score and the one with the lowest
are written, one line each. Invariant: a line shows what was trained, id for id; lines of steps that are made again are
dropped first. It never touches the batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from buffers.disk import append
from buffers.records import Row, TrainBatch
from learner.reporting.tracker import cut_lines

FILE = "traces.jsonl"
PER_STEP = 2
"""Episodes of each batch."""


class Traces:
    """`decode`: token ids -> text, control tokens included. `start`: the step after which the run is resumed."""

    def __init__(self, folder: Path, *, decode: Callable[[Sequence[int]], str], start: int = 0) -> None:
        self._decode = decode
        self._path = folder / FILE
        cut_lines(self._path, after=start)

    def add(self, batch: TrainBatch, *, step: int) -> None:
        """Write the episodes of this step's batch."""
        lines = ""
        for rows in _chosen(batch):
            line = {"step": step, "episode_id": rows[0].episode_id, "score": rows[0].score}
            lines += json.dumps({**line, "rows": [self._row(row) for row in rows]}) + "\n"
        append(self._path, lines)

    def _row(self, row: Row) -> dict[str, Any]:
        borders = [0, *(np.flatnonzero(np.diff(row.mask)) + 1).tolist(), len(row.ids)]
        turns = [
            {"trained": bool(row.mask[start]), "text": self._decode(row.ids[start:end].tolist())}
            for start, end in pairwise(borders)
        ]
        return {
            **({"role": row.role} if row.role else {}),
            "turns": turns,
            "ids": row.ids.tolist(),
            "mask": row.mask.tolist(),
            "logprobs": [round(float(value), 5) for value in row.logprobs],
            "versions": row.versions.tolist(),
        }


def _chosen(batch: TrainBatch) -> list[list[Row]]:
    """The rows of the best episode and of the worst, at most PER_STEP."""
    episodes: dict[str, list[Row]] = {}
    for row in batch.rows:
        episodes.setdefault(row.episode_id, []).append(row)
    ranked = sorted(episodes.values(), key=lambda rows: -rows[0].score)
    return [ranked[0], *ranked[1:][-(PER_STEP - 1) :]] if ranked else []
