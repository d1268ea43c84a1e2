"""TRL's side of `benchmarks.learner`: its GRPO trainer on the same rows, in an environment that has nothing but TRL.

Run as a script by that environment's interpreter on a JSON file; imports nothing of ours. TRL's own training loop does everything
(micro-batches, loss, backward pass, clipping, AdamW) but generation, which is replaced by the given rows. Invariant: the batch
is what `GRPOTrainer._generate_and_score_completions` would return for these rows: prompts padded on the left,
completions on the right, tokens that the environment wrote masked by `tool_mask`. Written for trl 1.16.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MIB = 2**20


def advantages(scores: np.ndarray, groups: np.ndarray) -> torch.Tensor:
    """(score - mean) / std of the group; the std is the sample's."""
    found = np.zeros(len(scores), dtype=np.float32)
    for group in np.unique(groups):
        own = groups == group
        if scores[own].max() > scores[own].min():
            found[own] = (scores[own] - scores[own].mean()) / scores[own].std(ddof=1)
    return torch.from_numpy(found)


def padded_batch(rows: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    ends = np.cumsum(rows["lengths"])[:-1]
    ids = [torch.from_numpy(part.astype(np.int64)) for part in np.split(rows["ids"], ends)]
    masks = [torch.from_numpy(part.astype(np.int64)) for part in np.split(rows["mask"], ends)]
    prompts = [int(count) for count in rows["prompts"]]
    heads = [row[:count] for row, count in zip(ids, prompts, strict=True)]
    tails = [row[count:] for row, count in zip(ids, prompts, strict=True)]
    trained = [mask[count:] for mask, count in zip(masks, prompts, strict=True)]
    return {
        "prompt_ids": pad_sequence(heads, batch_first=True, padding_side="left"),
        "prompt_mask": pad_sequence([torch.ones_like(row) for row in heads], batch_first=True, padding_side="left"),
        "completion_ids": pad_sequence(tails, batch_first=True),
        "completion_mask": pad_sequence([torch.ones_like(row) for row in tails], batch_first=True),
        "tool_mask": pad_sequence(trained, batch_first=True),
        "advantages": advantages(rows["scores"], rows["groups"]),
        "num_items_in_batch": torch.tensor(int(rows["mask"].sum())),
    }


class GivenRows(GRPOTrainer):
    """GRPO on rows that are there already."""

    given: dict[str, torch.Tensor]
    old_logprobs_s: list[float]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        """TRL with vLLM computes the log-probabilities before the update here; that pass is timed, its result not used."""
        started = time.perf_counter()
        batch = {name: value.to(self.accelerator.device) for name, value in self.given.items()}
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        with torch.no_grad():
            size = self.args.per_device_train_batch_size
            self._get_per_token_logps_and_entropies(self.model, ids, mask, batch["completion_ids"].size(1), size)
        self._wait()
        self.old_logprobs_s.append(time.perf_counter() - started)
        return batch

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Clock(TrainerCallback):
    """Seconds of each optimizer step, from the first micro-batch to the new weights."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = self._now()
        self.seconds.append(now - self._began)
        self._began = now


def settings(arguments: SimpleNamespace, *, num_rows: int, micro_batch: int, folder: str) -> GRPOConfig:
    """The same update as ours: token-mean loss, clip-higher, AdamW, one mini-batch, no KL, no checkpointing."""
    return GRPOConfig(
        output_dir=folder,
        max_steps=arguments.steps + 1,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_rows // micro_batch,
        num_generations=8,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        mask_truncated_completions=False,
        gradient_checkpointing=arguments.gradient_checkpointing,
        bf16=arguments.dtype == "bfloat16",
        use_cpu=arguments.device == "cpu",
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )


def main() -> None:
    given, out = (Path(word) for word in sys.argv[1:3])
    arguments = SimpleNamespace(**json.loads(given.read_text()))
    with np.load(arguments.rows) as stored:
        batch = padded_batch(dict(stored))
    num_rows, width = len(batch["advantages"]), batch["prompt_ids"].size(1) + batch["completion_ids"].size(1)
    fitting = max(1, arguments.token_budget // width)
    micro_batch = max(size for size in range(1, fitting + 1) if num_rows % size == 0)
    clock = Clock()
    trainer = GivenRows(
        model=str(arguments.model),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings(arguments, num_rows=num_rows, micro_batch=micro_batch, folder=str(out.parent / "trl")),
        train_dataset=Dataset.from_dict({"prompt": ["?"] * num_rows}),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        callbacks=[clock],
    )
    trainer.given, trainer.old_logprobs_s = batch, []
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    timed = zip(clock.seconds, trainer.old_logprobs_s, norms, strict=True)
    warm, *steps = [{"step_s": whole, "update_s": whole - old, "grad_norm": float(norm)} for whole, old, norm in timed]
    on_gpu = arguments.device != "cpu"
    # getrusage's peak begins with that of the process that started this one
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024 - before
    figures = {
        "warm_up": warm,
        "steps": steps,
        "peak_memory_mb": torch.cuda.max_memory_allocated() / MIB if on_gpu else peak,
    }
    out.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
