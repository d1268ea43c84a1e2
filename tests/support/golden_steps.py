"""Two real steps of a tiny trainer under many settings, and a warm start: what they report, and the size of the weights after them.

`tests.learner.training.test_golden_steps` compares them with those of an earlier commit; `python -m tests.support.golden_steps`
writes them anew."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from buffers.records import TrainBatch
from configs.recipes import RECIPES
from tests.support.learner_parts import branching_batch, make_model, make_trainer, walks

FILE = Path(__file__).with_name("golden_steps.json")
KEPT = ("policy/loss", "policy/kl_ref", "policy/grad_norm", "policy/entropy", "policy/is_weight_mean", "policy/clipfrac",
        "critic/vf_loss", "learner/trained_tokens")  # fmt: skip
GRPO = {"advantage": "grpo", "critic": "none"}
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"recipe {name}": {"recipe": name} for name in RECIPES},
    "shared critic": {"advantage": "gae", "critic": "shared", "gamma": 0.9, "epochs": 2, "lr": 8e-4},
    **{f"correction {name}": {**GRPO, "correction": name} for name in ("none", "seq_tis", "icepop", "mis", "seq_mis", "naive")},
    "rejection": {**GRPO, "rejection": {"kind": "geo_mean", "low": 0.5, "high": 2.0}},
    **{f"kl {kind}": {**GRPO, "kl": {"coef": 0.1, "kind": kind}} for kind in ("k1", "abs", "k2", "k3")},
    "kl adaptive": {**GRPO, "kl": {"coef": 0.1, "target": 0.01}, "epochs": 2},
    "kl in reward": {**GRPO, "kl": {"coef": 0.1, "in_reward": True}},
    "entropy": {**GRPO, "entropy_coef": 0.05, "adaptive_entropy": {"target": 10.0}},
    "otb": {"advantage": "otb", "critic": "none", "loss_agg": "token-sum"},
    "passk": {"advantage": "grpo_passk", "critic": "none", "loss_agg": "seq-mean-token-sum"},
    "lora": {**GRPO, "lora": {"rank": 4}, "mask_truncated": True},
    "teacher": {**GRPO, "teacher": {"path": "{teacher}", "coef": 0.5}},
    "all the same score": GRPO,
}  # fmt: skip


def batches(name: str) -> list[TrainBatch]:
    """Three groups with branches; three of episodes of several rounds, where one answer was cut, one group has a greedy member and
    rounds have scores."""
    second = walks(num_groups=3, group_size=3, seed=4)
    rows = [
        replace(
            row,
            rounds=np.where(row.mask, np.cumsum(np.diff(row.mask, prepend=0) == 1) - 1, -1).astype(np.int32),
            truncated=(0,) if number == 2 else (),
            round_scores={0: 0.25} if number % 2 else {},
            judges={"form": float(number % 3), "truth": row.score},
            greedy=number % 3 == 0,
            score=0.0 if name == "all the same score" else row.score,
        )
        for number, row in enumerate(second.rows)
    ]
    first = branching_batch()
    if name == "recipe remax":
        greedy = [replace(row, greedy=True, episode_id=f"{row.episode_id}g") for row in first.rows[::5]]
        first = replace(first, rows=[*first.rows, *greedy])
    return [first, TrainBatch(rows=rows)]


def figures(label: str, *, model: Path, folder: Path) -> dict[str, float]:
    """Those of the settings of this name."""
    teacher = make_model(folder / "teacher", seed=5) if "teacher" in SETTINGS[label] else ""
    settings = json.loads(json.dumps(SETTINGS[label]).replace("{teacher}", str(teacher)))
    common = {"lr": 1e-3, "lr_warmup_steps": 1, "token_budget": 300, "minibatches": 2}
    trainer = make_trainer(model, **{**common, **settings})
    found: dict[str, float] = {}
    if label == "kl abs":  # where policy and reference are alike, its gradient is the sign of a rounding
        trainer._own.reference = [1.1 * shard for shard in trainer._kept_weights()]
    try:
        for version, batch in enumerate(batches(label)):
            metrics = trainer.train_step(batch, version=version)
            found |= {f"{version} {key}": metrics[key] for key in KEPT if key in metrics}
        trainer.save_pretrained(folder / "trained")
    finally:
        trainer.close()
    return found | _of_weights(folder / "trained")


def _of_weights(folder: Path) -> dict[str, float]:
    weights = load_file(folder / "model.safetensors")
    return {"size": float(torch.cat([each.double().flatten() for each in weights.values()]).norm())}


def all_figures() -> dict[str, dict[str, float]]:
    """Settings -> figures."""
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name) / "model")
        return {label: figures(label, model=model, folder=Path(name)) for label in SETTINGS}


if __name__ == "__main__":
    FILE.write_text(json.dumps(all_figures(), indent=1) + "\n", encoding="utf-8")
