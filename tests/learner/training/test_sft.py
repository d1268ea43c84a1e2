"""Rules of learner/training/sft.py, on a one-rank trainer with the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from learner.model import fsdp
from learner.training.sft import SftRow
from learner.training.trainer import Trainer
from tests.support.learner_parts import make_model, make_trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def begun(model: Path) -> Iterator[Trainer]:
    made = make_trainer(model, critic="separate", token_budget=256)
    made.begin_sft()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def trainer(model: Path) -> Iterator[Trainer]:
    with begun(model) as made:
        yield made


def row(*ids: int, trains: int, conversation: int = 0, weight: float = 1.0) -> SftRow:
    """Its last `trains` tokens are learned."""
    mask = np.arange(len(ids)) >= len(ids) - trains
    return SftRow(ids=np.array(ids, np.int32), mask=mask.astype(np.uint8), conversation=conversation, weight=weight)


STEM = tuple(range(30, 50))


def test_the_loss_is_the_weighed_mean_over_trained_tokens(trainer: Trainer) -> None:
    rows = [row(*STEM, 1, 2, 3, trains=3), row(*STEM, 4, trains=1, conversation=1, weight=2.0)]
    alone = [trainer.sft_loss([each]) for each in rows]
    assert [size for _, size in alone] == [3.0, 2.0]
    expected = sum(total for total, _ in alone) / 5.0
    assert trainer.sft_step(rows, lr=1e-3)["sft/loss"] == pytest.approx(expected, abs=1e-5)


def test_a_conversation_in_several_rows_counts_as_if_it_were_one(model: Path) -> None:
    """Rows that share their beginning, and train each answer once."""
    together = SftRow(
        ids=np.array([*STEM, 1, 2, 3, 4], np.int32), mask=np.array([0] * 20 + [1, 1, 0, 1], np.uint8), conversation=0
    )
    apart = [row(*STEM, 1, 2, trains=2), row(*STEM, 1, 2, 3, 4, trains=1)]
    with begun(model) as trainer:
        figures = trainer.sft_step([together], lr=1e-3)
    with begun(model) as trainer:
        same = trainer.sft_step(apart, lr=1e-3)
    assert same["sft/loss"] == pytest.approx(figures["sft/loss"], abs=1e-5)
    assert same["policy/grad_norm"] == pytest.approx(figures["policy/grad_norm"], rel=1e-3)
    assert same["learner/raw_over_unique"] > 1.5 and same["learner/trained_tokens"] == 3.0


def test_the_held_out_loss_changes_nothing(trainer: Trainer) -> None:
    rows = [row(*STEM, 1, 2, 3, trains=3)]
    before = trainer.sft_loss(rows)
    assert trainer.sft_loss(rows) == before
    assert trainer.sft_step(rows, lr=1e-3)["sft/loss"] == pytest.approx(before[0] / before[1], abs=1e-6)
    assert trainer.sft_loss(rows)[0] < before[0]


def test_a_separate_critic_starts_from_what_was_learned(trainer: Trainer) -> None:
    for _ in range(3):
        trainer.sft_step([row(*STEM, 1, 2, 3, trains=3)], lr=3e-3)
    trainer.end_sft()
    policy, critic = (
        {name: fsdp.local(weight) for name, weight in model.lm.named_parameters()}
        for model in (trainer._policy, trainer._critic)
        if model is not None
    )
    assert all(bool((policy[name] == critic[name]).all()) for name in policy)


@pytest.mark.seconds
def test_an_update_goes_on_from_a_checkpoint_bit_for_bit(model: Path, tmp_path: Path) -> None:
    rows = [row(*STEM, 1, 2, 3, trains=3), row(*STEM, 4, trains=1, conversation=1)]
    with begun(model) as trainer:
        trainer.sft_step(rows, lr=1e-3)
        trainer.save(tmp_path / "learner")
        losses = [trainer.sft_step(rows, lr=1e-3)["sft/loss"] for _ in range(2)]
    with begun(model) as trainer:
        trainer.load(tmp_path / "learner")
        assert [trainer.sft_step(rows, lr=1e-3)["sft/loss"] for _ in range(2)] == losses
