"""Real ranks on a CPU, and the memory that each takes: `python -m tests.learner.placement.rank_memory MODEL CASES_JSON`.

Prints JSON for each case (`[lag, configuration]`), in order: bytes of the tensors after loading, between two steps, and at the
most within a step. Each rank is a fork of this process, which has imported everything. Called by test_memory.py.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from collections.abc import Callable

import numpy as np
import torch

from buffers.records import Row, TrainBatch
from configs.child_processes import leave
from configs.schema import LearnerConfig
from learner.training.trainer import Trainer
from tests.support.ports import held_port

ROWS, LENGTH = 4, 512


def batch(version: int, *, share: bool) -> TrainBatch:
    """`share`: the rows have one prompt, the half of each."""
    rng = np.random.default_rng(version)
    prompt = rng.integers(0, 400, LENGTH // 2) if share else None
    mask = np.ones(LENGTH, dtype=np.uint8)
    mask[: LENGTH // 2] = 0
    rows = [
        Row(
            episode_id=f"{number // 2}-{number}-0",
            group_id=number // 2,
            score=float(number % 2),
            ids=_ids(rng, prompt),
            mask=mask,
            logprobs=-5.0 * mask.astype(np.float32),
            versions=np.where(mask, version, -1).astype(np.int32),
            rounds=np.where(mask, 0, -1).astype(np.int32),
        )
        for number in range(ROWS)
    ]
    return TrainBatch(rows=rows)


def _ids(rng: np.random.Generator, prompt: np.ndarray | None) -> np.ndarray:
    ids = rng.integers(0, 400, LENGTH).astype(np.int32)
    if prompt is not None:
        ids[: len(prompt)] = prompt
    return ids


def live_tensors() -> int:
    """Bytes of all storages that a tensor holds."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            local = thing.to_local() if hasattr(thing, "to_local") else thing
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def largest_growth(step: Callable[[], object]) -> int:
    """Bytes that the step's tensors take beyond those before it, at most."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes))


def main(model: str, lag: int, config: LearnerConfig) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(
        config, model_path=model, dtype="float32", temperature=1.0, seed=0, keep_versions=lag + 1,
        address=f"127.0.0.1:{held_port()}", rank=0, world_size=1, device="cpu",
    )  # fmt: skip
    loaded = live_tensors()
    for version in range(lag + 1):
        trainer.train_step(batch(version, share=config.prefix_tree), version=version)
    between = live_tensors()
    grown = largest_growth(lambda: trainer.train_step(batch(lag + 1, share=config.prefix_tree), version=lag + 1))
    print(json.dumps({"loaded": loaded, "between": between, "peak": between + grown}), flush=True)
    trainer.close()


if __name__ == "__main__":
    for lag, keys in json.loads(sys.argv[2]):
        if os.fork() == 0:
            main(sys.argv[1], lag, LearnerConfig(**keys))
            leave(0)
        assert os.wait()[1] == 0
