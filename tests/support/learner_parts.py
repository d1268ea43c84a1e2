"""Small real parts for the learner's tests: a random Qwen3 of 2 layers, rows of made-up walks, a one-rank trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from buffers.records import Row, TrainBatch
from configs.schema import LearnerConfig
from configs.tiny_model import make_tiny_model
from learner.training.trainer import Trainer
from tests.support.ports import held_port

VOCABULARY = 300


def make_model(folder: Path, *, seed: int = 0) -> Path:
    """A folder with tokenizer and weights; embeddings of ordinary size, so that probabilities differ between tokens."""
    make_tiny_model(folder, seed=seed)
    return folder


def random_lm(*, seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def make_trainer(
    model: Path,
    *,
    dtype: str = "float32",
    temperature: float = 1.0,
    keep_versions: int = 2,
    replay_lag: int | None = None,
    **knobs: Any,
) -> Trainer:
    return Trainer(
        LearnerConfig(**knobs),
        model_path=str(model),
        dtype=dtype,
        temperature=temperature,
        seed=0,
        keep_versions=keep_versions,
        replay_lag=replay_lag,
        address=f"127.0.0.1:{held_port()}",
        rank=0,
        world_size=1,
        device="cpu",
    )


def assert_same_weights(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    """Equal up to rounding. Adam turns the sign of a gradient that is zero but for rounding into a whole step: one element
    in ten thousand (or a single one) may differ by more."""
    assert one.keys() == two.keys()
    for name, weight in one.items():
        difference = (weight - two[name]).abs()
        assert float(difference.mean()) < 1e-7, name
        assert int((difference > 1e-5).sum()) <= max(1, weight.numel() // 10_000), name


def make_row(
    ids: Sequence[int],
    *,
    mask: Sequence[int],
    episode: str = "0-0-0",
    group: int = 0,
    score: float = 0.0,
    logprobs: Sequence[float] | None = None,
    version: int | Sequence[int] = 0,
    rounds: int | Sequence[int] = 0,
    loss_weight: float = 1.0,
    **others: Any,
) -> Row:
    trained = np.array(mask, dtype=np.uint8)
    return Row(
        episode_id=episode,
        group_id=group,
        score=score,
        ids=np.array(ids, dtype=np.int32),
        mask=trained,
        logprobs=np.array(logprobs if logprobs is not None else [-1.0] * len(ids), dtype=np.float32) * trained,
        versions=np.where(trained, version, -1).astype(np.int32),
        rounds=np.where(trained, rounds, -1).astype(np.int32),
        loss_weight=loss_weight,
        **others,
    )


def walks(*, num_groups: int = 2, group_size: int = 4, seed: int = 0, version: int = 0) -> TrainBatch:
    """Episodes of 1-4 rounds: a prompt of 10 tokens, then 2 sampled tokens and 5 observed ones per round; 0/1 scores."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(num_groups):
        for sample in range(group_size):
            ids = rng.integers(0, VOCABULARY, 10).tolist()
            mask = [0] * 10
            for _ in range(int(rng.integers(1, 5))):
                ids += rng.integers(0, VOCABULARY, 7).tolist()
                mask += [1, 1, 0, 0, 0, 0, 0]
            rows.append(
                make_row(
                    ids,
                    mask=mask,
                    episode=f"{group}-{sample}-0",
                    group=group,
                    score=float(sample % 2),
                    version=version,
                    logprobs=rng.normal(-4.0, 0.3, len(ids)).tolist(),
                )
            )
    return TrainBatch(rows=rows)


def branching_batch(*, seed: int = 0) -> TrainBatch:
    """Three groups of four episodes: a prompt of 40 tokens, two answers with 20 observed tokens between. In each group two episodes
    say the same at first, and one has a second row: another answer to what it observed."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for group in range(3):
        prompt = rng.integers(0, VOCABULARY, 40)
        for sample in range(4):
            first, seen = rng.integers(0, VOCABULARY, 8), rng.integers(0, VOCABULARY, 20)
            if sample == 1:
                first = rows[-1].ids[40:48]
            named: dict[str, Any] = {
                "episode": f"{group}-{sample}-0",
                "group": group,
                "score": float(sample % 2 and group < 2),
                "hint": "ab",
            }
            for branch in range(2 if sample == 3 else 1):
                ids = np.concatenate([prompt, first, seen, rng.integers(0, VOCABULARY, 6)])
                mask = [0] * 40 + [int(branch == 0)] * 8 + [0] * 20 + [1] * 6
                weight = 0.5 if sample == 3 else 1.0
                recorded = rng.normal(-5.0, 0.1, len(ids)).tolist()
                rows.append(make_row(ids.tolist(), mask=mask, logprobs=recorded, loss_weight=weight, **named))
    return TrainBatch(rows=rows)
