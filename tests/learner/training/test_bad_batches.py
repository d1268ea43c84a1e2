"""What the trainer does with batches that teach nothing, or would break it: refused by name, skipped and counted, never nan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffers.records import Row, TrainBatch
from learner.model import fsdp
from learner.training.trainer import Trainer
from tests.support.learner_parts import make_model, make_trainer, walks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def training(model: Path, **knobs: Any) -> Iterator[Trainer]:
    trainer = make_trainer(model, **knobs)
    try:
        yield trainer
    finally:
        trainer.close()


def weights_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [fsdp.local(parameter).clone() for parameter in module.parameters()]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, two, strict=True))


def scored(batch: TrainBatch, *, score: Callable[[Row], float]) -> TrainBatch:
    return replace(batch, rows=[replace(row, score=score(row)) for row in batch.rows])


def untrained(row: Row) -> Row:
    """The row with every token masked."""
    return replace(row, mask=np.zeros_like(row.mask))


def recorded(rows: list[Row], *, logprob: float) -> list[Row]:
    """One token of the first row with another log-probability."""
    logprobs = rows[0].logprobs.copy()
    logprobs[np.flatnonzero(rows[0].mask)[0]] = logprob
    return [replace(rows[0], logprobs=logprobs), *rows[1:]]


def test_gradient_that_overflows_is_skipped_and_changes_nothing(model: Path) -> None:
    with training(model, minibatches=2) as trainer:
        before = weights_of(trainer._policy)
        metrics = trainer.train_step(scored(walks(), score=lambda row: 1e30), version=0)
        assert (metrics["learner/skipped"], metrics["learner/updates"]) == (2.0, 0.0)
        assert same(weights_of(trainer._policy), before)
        assert trainer.train_step(walks(), version=0)["learner/skipped"] == 0.0


def test_separate_critics_gradient_that_overflows_is_skipped_and_counted_too(model: Path) -> None:
    """Scores whose squares overflow in the value loss only: the policy updates go through."""
    with training(model, minibatches=2, critic="separate") as trainer:
        policy, critic = trainer._policy, trainer._critic
        assert critic is not None
        before = weights_of(critic)
        metrics = trainer.train_step(scored(walks(), score=lambda row: 3e25 * row.score), version=0)
        assert (metrics["learner/skipped"], metrics["learner/updates"]) == (2.0, 2.0)
        assert same(weights_of(critic), before)
        assert all(bool(weight.isfinite().all()) for weight in weights_of(policy))
        assert trainer.train_step(walks(), version=0)["learner/skipped"] == 0.0


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda rows: recorded(rows, logprob=float("nan")), "logprobs of episode 0-0-0 must be finite, got nan"),
        (lambda rows: recorded(rows, logprob=float("-inf")), "logprobs of episode 0-0-0 must be finite, got -inf"),
        (lambda rows: [replace(rows[0], score=float("nan")), *rows[1:]], "score of episode 0-0-0 must be .* got nan"),
        (lambda rows: [replace(rows[0], score=float("inf")), *rows[1:]], "score of episode 0-0-0 must be .* got inf"),
        (lambda rows: [], "must hold at least one trained token .* in 0 rows"),
        (lambda rows: [untrained(row) for row in rows], "must hold at least one trained token .* in 8 rows"),
    ],
)
def test_batch_that_cannot_be_trained_is_refused_before_any_change(
    model: Path, spoil: Callable[[list[Row]], list[Row]], words: str
) -> None:
    with training(model) as trainer:
        before = weights_of(trainer._policy)
        with pytest.raises(ValueError, match=words):
            trainer.train_step(TrainBatch(rows=spoil(walks().rows)), version=0)
        assert same(weights_of(trainer._policy), before)


@pytest.mark.seconds
def test_row_without_a_trained_token_changes_nothing(model: Path) -> None:
    rows = walks().rows
    found = []
    for own in (rows, [*rows, replace(untrained(rows[0]), episode_id="9-9-0")]):
        with training(model, lr=1e-3, lr_warmup_steps=0) as trainer:
            trainer.train_step(TrainBatch(rows=own), version=0)
            found.append(weights_of(trainer._policy))
    assert same(*found)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "advantage", ["grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]
)
def test_batch_of_equal_scores_leaves_the_policy_as_it_is(model: Path, advantage: str) -> None:
    """Nothing in it says that one action was better than another; a critic may learn from it."""
    with training(model, advantage=advantage, lr=1e-3, lr_warmup_steps=0) as trainer:
        before = weights_of(trainer._policy.lm)
        for score in (1.0, 0.0):
            metrics = trainer.train_step(scored(walks(), score=lambda row, score=score: score), version=0)
            assert metrics["learner/skipped"] == 0.0
        assert same(weights_of(trainer._policy.lm), before)


def test_groups_of_equal_scores_teach_nothing_beside_one_that_differs(model: Path) -> None:
    """GRPO's loss of the batch is that of the group that differs, by its share of the tokens."""
    batch = walks(num_groups=2)
    mixed = scored(batch, score=lambda row: row.score if row.group_id == 0 else 1.0)
    alone = replace(batch, rows=[row for row in batch.rows if row.group_id == 0])
    norms = []
    for one in (mixed, alone):
        with training(model, advantage="grpo", minibatches=1) as trainer:
            norms.append(trainer.train_step(one, version=0)["policy/grad_norm"])
    share = alone.num_trained_tokens / batch.num_trained_tokens
    assert norms[0] == pytest.approx(share * norms[1], rel=1e-4)
