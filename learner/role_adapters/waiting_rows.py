"""The rows of one role that wait until they are a batch.

Owned by `learner.role_adapters.role_trainer`, on every rank alike. Rows come with the groups of each step; a group in which the
role said nothing adds none. Invariants: the rows of a group stay together; each is taken once; what `write` stored, `read` gives
back bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from buffers.records import Row

FILE = "waiting.npz"
_ARRAYS = ("ids", "mask", "logprobs", "versions", "rounds")
_EXPERTS = ("experts", "expert_versions")
"""Not of every row."""
_NUMBERS = (
    "episode_id", "group_id", "score", "loss_weight", "branch_score", "role", "role_score", "greedy", "hint", "judges",
)  # fmt: skip
_LINES = "lines"


class WaitingRows:
    """Begins empty."""

    def __init__(self) -> None:
        self._groups: dict[int, list[Row]] = {}

    @property
    def num_groups(self) -> int:
        """Groups in which the role has something to learn."""
        return len(self._groups)

    def add(self, rows: Iterable[Row], *, min_version: int) -> int:
        """Rows of this role. Returns how many groups are left out: all that the role sampled there is older than `min_version`."""
        found: dict[int, list[Row]] = {}
        for row in rows:
            found.setdefault(row.group_id, []).append(row)
        num_stale = 0
        for group_id, own in found.items():
            trained = [row for row in own if not row.greedy and row.num_trained]
            if any(bool((row.versions >= min_version).any()) for row in trained):
                self._groups[group_id] = own
            else:
                num_stale += bool(trained)
        return num_stale

    def take(self) -> list[Row]:
        """All of them, in the order of their groups; none waits afterwards."""
        rows = [row for own in self._groups.values() for row in own]
        self._groups = {}
        return rows


def write(folder: Path, waiting: Mapping[str, WaitingRows]) -> None:
    """Writes the rows of all roles into `folder`."""
    rows = [row for own in waiting.values() for group in own._groups.values() for row in group]
    lines = [
        {name: getattr(row, name) for name in _NUMBERS}
        | {"round_scores": list(row.round_scores.items()), "truncated": list(row.truncated)}
        for row in rows
    ]
    arrays: dict[str, Any] = {
        f"{number}.{name}": array
        for number, row in enumerate(rows)
        for name in (*_ARRAYS, *_EXPERTS)
        if (array := getattr(row, name)) is not None
    }
    arrays[_LINES] = np.frombuffer(json.dumps(lines).encode(), dtype=np.uint8)
    np.savez(folder / FILE, **arrays)


def read(folder: Path, *, roles: Iterable[str]) -> dict[str, WaitingRows]:
    """What `write` stored, by role."""
    found = {role: WaitingRows() for role in roles}
    with np.load(folder / FILE, allow_pickle=False) as stored:
        lines: list[dict[str, Any]] = json.loads(stored[_LINES].tobytes())
        for number, line in enumerate(lines):
            scores, truncated = dict(map(tuple, line.pop("round_scores"))), tuple(line.pop("truncated"))
            arrays = {name: stored[f"{number}.{name}"] for name in _ARRAYS}
            experts = {name: stored.get(f"{number}.{name}") for name in _EXPERTS}
            row = Row(**line, **arrays, **experts, round_scores=scores, truncated=truncated)
            found[row.role]._groups.setdefault(row.group_id, []).append(row)
    return found
