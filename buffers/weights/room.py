"""Room for weights in a folder: asked for before anything is written, so that a full /dev/shm is one clear error.

Used by what writes weights: `buffers.weights.shard_writer` and `buffers.weights.puller`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from buffers.errors import WeightsError


@contextmanager
def room_for(num_bytes: int, *, folder: Path, what: str) -> Iterator[None]:
    """Write `num_bytes` below `folder` inside. Raises WeightsError where they do not fit, or the system takes no more."""
    there = os.statvfs(folder)
    free = there.f_bavail * there.f_frsize
    if free < num_bytes:
        raise WeightsError(_message(num_bytes, folder=folder, what=what, got=f"{free / 1e6:.1f} MB free"))
    try:
        yield
    except OSError as error:
        raise WeightsError(_message(num_bytes, folder=folder, what=what, got=str(error))) from error


def _message(num_bytes: int, *, folder: Path, what: str, got: str) -> str:
    return (
        f"{what} must have {num_bytes / 1e6:.1f} MB of room in {folder}, got {got}; free memory there, or mount a larger "
        f"/dev/shm (of a container: --shm-size)"
    )
