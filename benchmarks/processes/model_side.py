"""The learner's side of `benchmarks.models`, in a process of its own: steps on a family's model, with all weights and with LoRA.

`python -m benchmarks.processes.model_side --folder MODEL --work FOLDER --out FILE`. Everything in float32. Writes the row's ids,
what the learner computes of them before and after two steps, and what transformers does of the folder and of the one that was
saved: `saved` or `merged`, in `--work`. A part that is refused has the sentence; one that fails otherwise ends the process, and the
file has what was found before. Compares nothing.
"""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from benchmarks.processes.learner_side import Rows
from benchmarks.processes.read_folder import read
from configs.schema import LearnerConfig, LoraConfig
from learner.training.layout import plain_tokens
from learner.training.trainer import Trainer

LORA = LoraConfig(rank=4, alpha=8.0)


def agents_batch(
    tokens: np.ndarray, *, groups: int, rows: int, stem: int, tails: tuple[int, int], seed: int = 0
) -> Rows:
    """Groups whose rows part from a common stem; half of each tail is trained."""
    rng = np.random.default_rng(seed)
    ids, masks = [], []
    for _ in range(groups):
        start = rng.choice(tokens, stem)
        for tail in rng.integers(*tails, size=rows, endpoint=True):
            ids.append(np.concatenate([start, rng.choice(tokens, tail)]))
            masks.append((np.arange(stem + tail) >= stem + tail // 2).astype(np.uint8))
    lengths = np.array([len(row) for row in ids])
    return Rows(
        ids=np.concatenate(ids).astype(np.int32),
        mask=np.concatenate(masks),
        lengths=lengths,
        prompts=np.full(len(ids), stem),
        scores=np.tile([0.0, 1.0], len(ids))[: len(ids)].astype(np.float32),
        groups=np.repeat(np.arange(groups), rows),
    )


def steps(folder: Path, *, saved: Path, lora: LoraConfig | None = None) -> dict[str, Any]:
    """Two steps from a folder to another one. `start`, `end`: log-probabilities of the row of `ids`."""
    config = LearnerConfig(
        advantage="grpo", critic="none", lr=1e-3, lr_warmup_steps=0, correction="none", check_logprobs=False,
        lora=lora or LoraConfig(),
    )  # fmt: skip
    trainer = Trainer(
        config, model_path=str(folder), dtype="float32", temperature=1.0, seed=0, keep_versions=2,
        address=_free_address(), rank=0, world_size=1, device="cpu",
    )  # fmt: skip
    try:
        ids = trainer.probe_prompt()
        tokens = plain_tokens(AutoConfig.from_pretrained(folder))
        batch = agents_batch(tokens, groups=2, rows=4, stem=40, tails=(10, 40)).batch()
        start = trainer.logprobs_of(ids, last=len(ids) - 1)
        for _ in range(2):
            trainer.train_step(batch, version=0)
        trainer.save_pretrained(saved)
        end = trainer.logprobs_of(ids, last=len(ids) - 1)
        layout = trainer.layout_line()
    finally:
        trainer.close()
    return {
        "layout": layout, "ids": ids, "start": start, "end": end,
        "start_of_transformers": read(str(folder), ids), "end_of_transformers": read(str(saved), ids),
        "adapter": sorted(path.name for path in (saved / "adapter").glob("*")),
    }  # fmt: skip


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in ("folder", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for part, saved, lora in (("learner", "saved", None), ("lora", "merged", LORA)):
        try:
            found[part] = steps(arguments.folder, saved=arguments.work / saved, lora=lora)
        except ValueError as error:  # how the learner refuses a model
            found[part] = {"refused": " ".join(str(error).split())}
        arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
