"""The learner's part of `benchmarks.models`, called in processes of its own: steps on a family's model, with all weights and with
LoRA, in float32; and what rows beside one another cost over packed ones, where both are right.

A part that is refused has the sentence; one that fails otherwise ends the process. Compares nothing.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from benchmarks.learner_sides import make_trainer, stem_rows
from benchmarks.rivals.read_folder import read
from configs.tiny_model import make_tiny_model
from learner.model.load import load_policy
from learner.model.policy import Policy
from learner.training.layout import plain_tokens
from learner.training.packing import PaddedSequences, Sequences
from learner.training.trainer import Trainer

LORA = {"rank": 4, "alpha": 8.0}
MODEL: dict[str, Any] = {"hidden": 512, "layers": 12, "ffn": 1536, "heads": 8, "kv_heads": 4}
"""A Qwen3 of 38 million weights, for the cost of padding."""
BATCH: dict[str, Any] = {"groups": 1, "rows": 8, "stem": 256, "tails": (164, 400)}
TOKEN_BUDGET = 8192


def steps(
    *, model: str, saved: str, lora: dict[str, Any] | None, address: str, rank: int, world_size: int
) -> dict[str, Any]:
    """Two steps from a folder to another one: `saved` or `merged`. `start`, `end`: log-probabilities of the row of `ids`, and what
    transformers makes of the folder and of the one that was saved."""
    try:
        return _steps(model, saved=saved, lora=lora, address=address)
    except ValueError as error:  # how the learner refuses a model
        return {"refused": " ".join(str(error).split())}


def _steps(model: str, *, saved: str, lora: dict[str, Any] | None, address: str) -> dict[str, Any]:
    keys = {"advantage": "grpo", "critic": "none", "lr": 1e-3, "lr_warmup_steps": 0, "correction": "none"}
    keys |= {"check_logprobs": False, "lora": lora or {}}
    trainer = make_trainer(Trainer, keys, model=model, address=address, keep_versions=2)
    try:
        ids = trainer.probe_prompt()
        tokens = plain_tokens(AutoConfig.from_pretrained(model))
        batch = stem_rows(groups=2, rows=4, stem=40, tails=(10, 40), tokens=tokens).batch()
        start = trainer.logprobs_of(ids, last=len(ids) - 1)
        for _ in range(2):
            trainer.train_step(batch, version=0)
        trainer.save_pretrained(Path(saved))
        end = trainer.logprobs_of(ids, last=len(ids) - 1)
        layout = trainer.layout_line()
    finally:
        trainer.close()
    return {
        "layout": layout, "ids": ids, "start": start, "end": end,
        "start_of_transformers": read(model, ids), "end_of_transformers": read(saved, ids),
        "adapter": sorted(path.name for path in (Path(saved) / "adapter").glob("*")),
    }  # fmt: skip


def pass_s(policy: Policy, sequences: Sequences) -> float:
    """CPU time of one pass forth and back over all rows."""
    began = time.process_time()
    policy.zero_grad()
    for piles in sequences.plan(range(len(sequences.ids)), num_ranks=1, token_budget=TOKEN_BUDGET):
        policy(sequences.micro_batch(piles[0], device=torch.device("cpu")), temperature=1.0).logprobs.sum().backward()
    return time.process_time() - began


def padded_cost(*, repeats: int, model: dict[str, Any], batch: dict[str, Any], **_: Any) -> dict[str, Any]:
    """`padded_cost`, and what it is the quotient of: passes in turn, in CPU seconds of a single thread, so that what others do on
    the machine counts little."""
    torch.set_num_threads(1)
    packed = stem_rows(tokens=np.arange(9, 500), **batch).sequences()
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as folder:
        policy = load_policy(make_tiny_model(Path(folder) / "model", **model), device=torch.device("cpu"))
    ways = {"packed_s": packed, "padded_s": PaddedSequences(packed)}
    turns = [{way: pass_s(policy, sequences) for way, sequences in ways.items()} for _ in range(repeats + 1)]
    taken = {way: [turn[way] for turn in turns[1:]] for way in ways}  # the first one warms up
    weights = sum(each.numel() for each in policy.parameters())
    return {"padded_cost": median(taken["padded_s"]) / median(taken["packed_s"]), "weights": weights, **taken}
