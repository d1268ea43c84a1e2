"""Rules of learner/reporting/run_metrics.py: figures of a step, and of a run that was interrupted."""

from __future__ import annotations

import pytest

from buffers.records import TrainBatch
from configs.load import load_config
from learner.reporting.run_metrics import History
from mocked_server.generation import GenerationStats
from tests.support.learner_parts import walks


def test_groups_with_equal_scores_are_counted() -> None:
    batch = walks(num_groups=2, group_size=2)
    same = [row for row in walks(num_groups=3, group_size=2).rows if row.group_id == 2][:1]
    figures = History(load_config()).add(TrainBatch(rows=[*batch.rows, *same]), {}, version=0, stats=GenerationStats())
    assert figures["batch/equal_groups"] == pytest.approx(1 / 3)
    assert figures["reward/mean"] == pytest.approx(0.4)


def test_a_run_that_goes_on_counts_its_earlier_steps() -> None:
    first = History(load_config())
    for _ in range(3):
        figures = first.add(walks(), {"time/step_s": 1.0, "time/wait_s": 0.5}, version=0, stats=GenerationStats())
    assert first.recent_reward() == 0.5
    earlier = [{"step": 0, "warm_start/seconds": 1.0}, {"step": 1, **figures}, {"step": 1, "val/mean": 1.0}]
    second = History(load_config(), earlier=earlier)
    assert second.rewards == [0.5] and second.summary()["steps"] == 1
    assert second.summary()["episodes"] == 8
    assert History(load_config()).recent_reward() is None
