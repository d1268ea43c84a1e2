"""Stands in for `learner.training.trainer.Trainer` where there is no GPU: says which cards its process was given."""

from __future__ import annotations

import os
from typing import Any


class RecordingRank:
    """A rank that trains nothing."""

    def __init__(self, config: Any, *, rank: int, device: str, **_: Any) -> None:
        self._place = {"rank": rank, "device": device}

    def where(self) -> dict[str, Any]:
        """The card that CUDA would see, and the numbers of those that Ray counts as this process's."""
        import ray

        counted = ray.get_gpu_ids() if ray.is_initialized() else []
        threads = os.environ.get("OMP_NUM_THREADS")
        return self._place | {"sees": os.environ.get("CUDA_VISIBLE_DEVICES"), "counted": counted, "threads": threads}

    def close(self) -> None:
        """As a rank does."""
