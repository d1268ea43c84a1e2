"""TransferQueue's side of `benchmarks.buffer`: its key-value calls on the same rows, in an environment of its own.

Run as a script by that environment's interpreter; it imports nothing of ours. Its controller and storage units are Ray actors
in other processes, in memory: nothing is on disk when a call returns. Written for TransferQueue 0.1.11.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

PARTITION = "train"


def rows(number: int, *, tokens: int) -> TensorDict:
    """ids, log-probabilities, versions and mask of `number` rows."""
    return TensorDict(
        {
            "ids": torch.zeros(number, tokens, dtype=torch.int32),
            "logprobs": torch.zeros(number, tokens),
            "versions": torch.zeros(number, tokens, dtype=torch.int32),
            "mask": torch.ones(number, tokens, dtype=torch.uint8),
        },
        batch_size=number,
    )


def timed(act: Callable[..., object], size: int, *, times: int, **named: Any) -> list[float]:
    """Seconds of each call with the keys of `size` rows."""
    seconds = []
    for number in range(times):
        keys = [f"{size}-{number}-{row}" for row in range(size)]
        began = time.perf_counter()
        act(keys=keys, partition_id=PARTITION, **named)
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    given, out = (Path(word) for word in sys.argv[1:3])
    tokens, times = (json.loads(given.read_text())[name] for name in ("tokens", "times"))
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init()
    batch = rows(64, tokens=tokens)
    timed(tq.kv_batch_put, 64, times=2, fields=batch)
    put64 = timed(tq.kv_batch_put, 64, times=times, fields=batch)
    get64 = timed(tq.kv_batch_get, 64, times=times)
    put1 = timed(tq.kv_batch_put, 1, times=times * 4, fields=rows(1, tokens=tokens))
    figures = {
        "put64_rows_s": 64 / median(put64),
        "get64_rows_s": 64 / median(get64),
        "put1_p50_ms": median(put1) * 1e3,
    }
    out.write_text(json.dumps(figures))
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
