"""Rules of learner/training/ranks.py, with real processes: any number of ranks computes the same, and a death is
loud."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from benchmarks.families import make_family
from buffers.records import Int32, TrainBatch, UInt16
from buffers.remote.actor import ChildActor
from configs.schema import LearnerConfig
from learner.training.ranks import LearnerRanks, RankFailed
from tests.support.learner_parts import assert_same_weights, branching_batch, make_model, make_trainer, walks
from tests.support.patience import PATIENCE_S
from tests.support.weights.published_weights import published, published_by

KNOBS: dict[str, Any] = {"lr": 1e-3, "lr_warmup_steps": 0, "token_budget": 100, "kl": {"coef": 0.01}, "epochs": 2}
CLOCKS = {"time/prepare_s", "time/train_s", "learner/mfu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def _ranks(model: Path, *, num: int, **knobs: Any) -> LearnerRanks:
    config = LearnerConfig(ranks=num, **KNOBS, **knobs)
    return LearnerRanks(config, model_path=str(model), dtype="float32", temperature=1.0, seed=0, keep_versions=2)


def _batches() -> list[TrainBatch]:
    """The first shares prefixes. The second holds tokens of both versions, and an odd number of episodes."""
    newer = walks(num_groups=3, group_size=3, seed=2, version=1).rows
    others = [replace(row, episode_id=f"9{row.episode_id}", group_id=row.group_id + 90) for row in newer]
    return [branching_batch(), TrainBatch(rows=[*walks(seed=1, version=0).rows, *others])]


def _with_experts(batches: list[TrainBatch]) -> list[TrainBatch]:
    """Two experts of four for each token by its id and the layer: what rows share has the same."""

    def told(ids: Int32) -> UInt16:
        first = (ids[:, None] + np.arange(2)) % 4
        return np.stack([first, (first + 1 + ids[:, None] % 3) % 4], axis=-1).astype(np.uint16)

    return [TrainBatch(rows=[replace(row, experts=told(row.ids)) for row in batch.rows]) for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "knobs"),
    [
        ("", {}),
        ("", {"lora": {"rank": 4, "alpha": 8.0}, "gradient_checkpointing": True}),
        ("gpt_oss", {"gradient_checkpointing": True}),
        ("falcon_h1", {"gradient_checkpointing": True}),
        ("qwen3_5_moe_vl", {}),
        ("qwen3_moe", {"router_replay": True, "gradient_checkpointing": True}),
        ("qwen3_5_vl", {"lora": {"rank": 4, "alpha": 8.0}}),
        ("apertus", {}),
    ],
    ids=[
        "all",
        "lora",
        "sinks and experts",
        "states, layers computed again",
        "states, experts and a tower",
        "replayed experts, layers computed again",
        "lora beside a tower",
        "scalars",
    ],
)
@pytest.mark.long
async def test_two_ranks_compute_what_one_computes(
    model: Path, tmp_path: Path, family: str, knobs: dict[str, Any]
) -> None:
    model = make_family(family, tmp_path / family) if family else model
    single = make_trainer(model, **KNOBS, **knobs)
    batches = _with_experts(_batches()) if "router_replay" in knobs else _batches()
    alone = [single.train_step(batch, version=version) for version, batch in enumerate(batches)]
    one_weights = published(single)
    single.close()
    ranks = _ranks(model, num=2, **knobs)
    await ranks.start()
    together = [await ranks.train_step(batch, version=version) for version, batch in enumerate(batches)]
    two_weights = await published_by(ranks)
    await ranks.save_pretrained(tmp_path / "folder")
    await ranks.close()
    for one, two in zip(alone, together, strict=True):
        assert one.keys() == two.keys()
        for name in one.keys() - CLOCKS - {"learner/raw_over_unique"}:  # a group may be divided over ranks
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    if family:  # more sums, so more gradients that are zero but for rounding
        assert max(float((weight - two_weights[name]).abs().mean()) for name, weight in one_weights.items()) < 1e-6
        assert one_weights.keys() == two_weights.keys()
    else:
        assert_same_weights(one_weights, two_weights)
    start = load_file(model / "model.safetensors")
    moved = [
        float((weight - start.get(name, 0.0)).abs().mean())  # the matrices B of an adapter start at zero
        for name, weight in one_weights.items()
        if "proj" in name and "lora_A" not in name and "experts" not in name
    ]
    assert min(moved) > 1e-4
    assert (tmp_path / "folder" / "critic" / "value_head.safetensors").exists()


@pytest.mark.slow
@pytest.mark.long
async def test_death_of_a_rank_names_it_and_ends_the_others(model: Path) -> None:
    ranks = _ranks(model, num=2)
    await ranks.start()
    victim = ranks._actors[1]
    assert isinstance(victim, ChildActor)
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"learner rank 1 of 2 died in train_step: .* ended by SIGKILL"):
        await ranks.train_step(walks(), version=0)
    with pytest.raises(RankFailed, match="learner rank 1 of 2 died in train_step"):  # whoever asks next is told as well
        await ranks.publish(Path("unused"))
    await ranks.close()


@pytest.mark.slow
@pytest.mark.long
async def test_error_of_a_rank_reaches_the_caller_with_its_cause(model: Path) -> None:
    ranks = _ranks(model, num=1)
    await ranks.start()
    with pytest.raises(RankFailed, match=r"rank 0 of 1 failed in train_step: ValueError: .*at least one trained token"):
        await asyncio.wait_for(ranks.train_step(TrainBatch(rows=[]), version=0), timeout=PATIENCE_S)
