"""TransferQueue's side of `benchmarks.buffer`: its key-value calls on the same rows, in an environment of its own.

Run as a script by that environment's interpreter; it imports nothing of ours. Its controller and storage units are Ray actors
in other processes, in memory: nothing is on disk when a call returns. Written for TransferQueue 0.1.11.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

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


def timed_puts(size: int, *, times: int, tokens: int) -> list[float]:
    """Seconds of each put of `size` rows."""
    batch, seconds = rows(size, tokens=tokens), []
    for number in range(times):
        keys = [f"{size}-{number}-{row}" for row in range(size)]
        began = time.perf_counter()
        tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=batch)
        seconds.append(time.perf_counter() - began)
    return seconds


def timed_gets(size: int, *, times: int) -> list[float]:
    """Seconds of each get of the rows that were put."""
    seconds = []
    for number in range(times):
        keys = [f"{size}-{number}-{row}" for row in range(size)]
        began = time.perf_counter()
        tq.kv_batch_get(keys=keys, partition_id=PARTITION)
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="TransferQueue's side of benchmarks.buffer.")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--times", type=int, default=20)
    options = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init()
    timed_puts(64, times=2, tokens=options.tokens)
    put64 = timed_puts(64, times=options.times, tokens=options.tokens)
    get64 = timed_gets(64, times=options.times)
    put1 = timed_puts(1, times=options.times * 4, tokens=options.tokens)
    figures = {
        "put64_rows_s": 64 / median(put64),
        "get64_rows_s": 64 / median(get64),
        "put1_p50_ms": median(put1) * 1e3,
    }
    print(json.dumps(figures), flush=True)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
