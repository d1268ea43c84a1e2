"""Rules of training stored groups, with what a real ledger gives of episodes that a real policy sampled: of several lengths, rounds
and branches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffers.ledger.ledger import Ledger
from buffers.records import Replay, Row, TrainBatch
from learner.training.trainer import Trainer
from tests.support.buffer_parts import make_round, open_running
from tests.support.learner_parts import VOCABULARY, make_model, make_trainer

pytestmark = pytest.mark.seconds
REPLAY = Replay(num_groups=2, min_version=0, only="mixed", times=2)
SETTINGS: dict[str, Any] = {"advantage": "grpo", "critic": "none", "minibatches": 1, "lr": 2e-2, "lr_warmup_steps": 0}


def play(ledger: Ledger, trainer: Trainer, *, task: int, version: int, alike: bool = False) -> int:
    """A group of three episodes of one to three rounds, the last of which begins a branch; `alike`: all score the same."""
    rng = np.random.default_rng(task)
    members = open_running(ledger, task=task, group_size=3, version=version)
    for number, member in enumerate(members):
        context: list[int] = []
        for index in range(number + 1):
            tail = rng.integers(0, VOCABULARY, 3 + int(rng.integers(5))).tolist()
            sampled = rng.integers(0, VOCABULARY, 2 + int(rng.integers(6))).tolist()
            context = [*([] if index == 2 else context), *tail, *sampled]
            round_ = make_round(
                member.episode_id,
                index=index,
                parent=0 if index == 1 else None,
                tail=tail,
                sampled=sampled,
                version=version,
            )
            logprobs = np.array(trainer.logprobs_of(context, last=len(sampled)), dtype=np.float32)
            ledger.put_round(replace(round_, logprobs=logprobs)).result()
        ledger.notify_score(member.episode_id, 0.0 if alike else float(number == 1)).result()
    return members[0].group_id


def trained_twice(
    folder: Path, *, replay: Replay, **options: Any
) -> tuple[TrainBatch, dict[str, float], dict[str, Any]]:
    """The second batch of a run whose first was trained at once, its figures, and the log-probabilities of its rows before it."""
    with Ledger(folder / "ledger.db") as ledger:
        trainer = make_trainer(make_model(folder / "model"), keep_versions=1, **{**SETTINGS, **options})
        try:
            for task in range(3):
                play(ledger, trainer, task=task, version=0, alike=task == 2)
            for version in (0, 1):
                batch = ledger.claim(3, min_version=version, replay=replay).result()
                if batch is None:
                    play(ledger, trainer, task=9, version=version)
                    batch = ledger.claim(3, min_version=version, replay=replay).result()
                assert batch is not None
                before = {id(row): _logprobs(trainer, row) for row in batch.rows}
                metrics = trainer.train_step(batch, version=version)
                ledger.commit_step(batch.lease_id, step=version + 1, version=version + 1).result()
            metrics["bits"] = float(
                torch.cat([p.detach().flatten() for p in trainer._policy.lm.parameters()]).double().sum()
            )
        finally:
            trainer.close()
    return batch, metrics, before


def _logprobs(trainer: Trainer, row: Row) -> np.ndarray:
    """[T] of the trained tokens by the present weights."""
    last = len(row.ids) - int(np.flatnonzero(row.mask)[0])
    found = np.zeros(len(row.ids), dtype=np.float32)
    found[-last:] = trainer.logprobs_of(row.ids.tolist(), last=last)
    return found


def test_stored_rows_are_corrected_by_what_the_present_policy_says_of_them_and_move_it(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    batch, metrics, before = trained_twice(tmp_path, replay=REPLAY, replay_lag=1)
    stored = [row for row in batch.rows if row.times_trained]
    assert batch.num_stored == 2 and len(batch.rows) == 12 and len({len(row.ids) for row in stored}) > 3
    assert all((row.versions[row.mask == 1] == 0).all() for row in stored)
    ratios = np.concatenate([np.exp(before[id(row)] - row.logprobs)[row.mask == 1] for row in stored])
    assert abs(ratios - 1.0).max() > 0.01  # the first step has moved the policy away from what sampled them
    assert metrics["replay/ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-4)
    assert metrics["replay/counted_share"] == 1.0
    assert (
        metrics["policy/lag_max"] == 0.0
        and metrics["policy/checked_share"] == 1.0
        and metrics["policy/too_old_share"] == 0.0
    )
    _, other, _ = trained_twice(tmp_path / "two", replay=replace(REPLAY, times=3), replay_lag=0)
    assert other["replay/counted_share"] == 0.0 and other["replay/ratio_mean"] == 0.0  # all too old: it is said
    assert other["bits"] != metrics["bits"]


@pytest.mark.parametrize(
    ("only", "options", "low", "high"),
    [
        ("all", {}, 0.2, 0.8),  # one of the two scored alike
        ("mixed", {"correction": "mis", "correction_bounds": {"high": 1e-6}}, 0.0, 0.0),
        ("mixed", {"rejection": {"kind": "geo_mean", "low": 2.0, "high": 3.0}}, 0.0, 0.0),
        ("mixed", {"correction": "naive", "clip": {"low": 1e-5, "high": 1e-5}}, 0.0, 0.7),
    ],
)
def test_what_of_stored_groups_changes_nothing_is_said(
    tmp_path: Path, only: Any, options: dict[str, Any], low: float, high: float
) -> None:
    _, metrics, _ = trained_twice(tmp_path, replay=replace(REPLAY, only=only), replay_lag=1, **options)
    assert low <= metrics["replay/counted_share"] <= high
