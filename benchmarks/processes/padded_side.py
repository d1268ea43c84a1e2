"""What rows beside one another cost over packed ones, where both are right: a part of `benchmarks.models`, in a process of its own.

`python -m benchmarks.processes.padded_side --out FILE [--repeats 5]`. Forward and backward passes of a dense model over an agents'
batch, in turn in one process, in CPU seconds of a single thread: what others do on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.processes.model_side import agents_batch
from configs.tiny_model import make_tiny_model
from learner.model.load import load_policy
from learner.model.policy import Policy
from learner.training.packing import PaddedSequences, Sequences

MODEL: dict[str, Any] = {"hidden": 512, "layers": 12, "ffn": 1536, "heads": 8, "kv_heads": 4}
"""A Qwen3 of 38 million weights."""
BATCH: dict[str, Any] = {"groups": 1, "rows": 8, "stem": 256, "tails": (164, 400)}
TOKEN_BUDGET = 8192


def seconds(policy: Policy, sequences: Sequences) -> float:
    """CPU time of one pass forth and back over all rows."""
    began = time.process_time()
    policy.zero_grad()
    for piles in sequences.plan(range(len(sequences.ids)), num_ranks=1, token_budget=TOKEN_BUDGET):
        policy(sequences.micro_batch(piles[0], device=torch.device("cpu")), temperature=1.0).logprobs.sum().backward()
    return time.process_time() - began


def measure(*, repeats: int, model: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
    """`padded_cost`, and what it is the quotient of."""
    torch.set_num_threads(1)
    rows = agents_batch(np.arange(9, 500), **batch)
    ends = np.cumsum(rows.lengths)[:-1]
    packed = Sequences(np.split(rows.ids, ends), masks=np.split(rows.mask, ends))
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as folder:
        policy = load_policy(make_tiny_model(Path(folder) / "model", **model), device=torch.device("cpu"))
    ways = {"packed_s": packed, "padded_s": PaddedSequences(packed)}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 1):
        for way, sequences in ways.items():
            found = seconds(policy, sequences)
            if turn:  # the first one warms up
                taken[way].append(found)
    weights = sum(each.numel() for each in policy.parameters())
    return {"padded_cost": median(taken["padded_s"]) / median(taken["packed_s"]), "weights": weights, **taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    arguments.out.write_text(json.dumps(measure(repeats=arguments.repeats, model=MODEL, batch=BATCH)))


if __name__ == "__main__":
    main()
