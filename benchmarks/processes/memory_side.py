"""One rank of the learner in a process of its own, and the most memory that it took: one side of `benchmarks.learner_memory`.

`python -m benchmarks.processes.memory_side --model FOLDER --out FILE --address HOST:PORT ...`, once per rank. Invariant: what is
reported is the process's own peak (its resident set), from before the model is read to the end of the last step, less what it
held before: the interpreter and torch, which is reported beside it. On a GPU the peak is that of torch's tensors there; what torch
reserved for them, and what the card has in use beside it (CUDA's context, NCCL), are reported too. It compares nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.processes.learner_side import MIB, most_resident_mb, resident_mb
from benchmarks.processes.rank_side import end, make_trainer, rank_parser
from buffers.records import Row, TrainBatch
from configs.schema import LearnerConfig
from learner.training.trainer import Trainer

METRICS = (("learner", "mfu"), ("learner", "tokens"), ("time", "train_s"), ("time", "prepare_s"))
"""Of the last step."""


def batch(lengths: Sequence[int], *, vocabulary: int, version: int) -> TrainBatch:
    """Rows of these lengths, of each of which the second half was sampled by `version`."""
    rng = np.random.default_rng(version)
    masks = [(np.arange(length) >= length // 2).astype(np.uint8) for length in lengths]
    return TrainBatch(
        rows=[
            Row(
                episode_id=f"{number // 2}-{number}-0",
                group_id=number // 2,
                score=float(number % 2),
                ids=rng.integers(0, vocabulary, len(mask)).astype(np.int32),
                mask=mask,
                logprobs=-5.0 * mask.astype(np.float32),
                versions=np.where(mask, version, -1).astype(np.int32),
                rounds=np.where(mask, 0, -1).astype(np.int32),
            )
            for number, mask in enumerate(masks)
        ]
    )


def on_card() -> dict[str, float]:
    """The most that torch's tensors took, and that torch reserved for them; what is in use beside that."""
    free, whole = torch.cuda.mem_get_info()
    return {
        "peak_mb": torch.cuda.max_memory_allocated() / MIB,
        "reserved_mb": torch.cuda.max_memory_reserved() / MIB,
        "beside_mb": (whole - free - torch.cuda.memory_reserved()) / MIB,
    }


def main(argv: list[str] | None = None) -> int:
    """Two steps; the figures go to `--out`, with the rank's number at its end."""
    parser = rank_parser("benchmarks.processes.memory_side", about=__doc__, files=("model", "out"))
    parser.add_argument("--learner", type=json.loads, default={}, help="keys of the learner, as JSON")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256] * 4, help="tokens of each row")
    parser.add_argument("--first", type=int, nargs="+", default=[256] * 4, help="tokens of each row of the first step")
    for name, default in (("vocabulary", 400), ("lag", 0), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    before = resident_mb()
    figures: dict[str, Any] = {"before_mb": before}
    config = LearnerConfig(ranks=arguments.world_size, **arguments.learner)
    trainer = make_trainer(Trainer, config, arguments=arguments, keep_versions=arguments.lag + 1)
    figures |= {"loaded_mb": resident_mb() - before, "loading_peak_mb": most_resident_mb() - before}
    for version in range(arguments.lag + 2):
        lengths = arguments.lengths if version else arguments.first
        began = time.monotonic()
        metrics = trainer.train_step(batch(lengths, vocabulary=arguments.vocabulary, version=version), version=version)
        figures["step_s"] = time.monotonic() - began
        figures |= {name: metrics[f"{kind}/{name}"] for kind, name in METRICS}
    figures["peak_mb"] = most_resident_mb() - before
    if arguments.device.startswith("cuda"):
        figures |= on_card()
    Path(f"{arguments.out}.{arguments.rank}").write_text(json.dumps(figures), encoding="utf-8")
    trainer.close()
    return 0


if __name__ == "__main__":
    end(main)
