"""Memory that others take: a rank that Ray's memory monitor ends has died, with a real Ray."""

from __future__ import annotations

import re
from typing import Any

import pytest

from configs.schema import LearnerConfig
from learner.training.ranks import LearnerRanks, RankDied
from tests.support.remote.own_ray import own_ray


class Idle:
    """A rank that does nothing."""

    def __init__(self, config: LearnerConfig, **_: Any) -> None:
        self.config = config


@pytest.mark.slow
async def test_a_rank_that_the_memory_monitor_ended_has_died_which_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The monitor of this Ray ends whatever runs, as other processes hold more than a thousandth of the memory."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    with own_ray(num_cpus=2):
        ranks = LearnerRanks(
            LearnerConfig(), model_path="", dtype="float32", temperature=1.0, seed=0, keep_versions=1,
            trainer=Idle,  # type: ignore[arg-type]
        )  # fmt: skip
        with pytest.raises(RankDied) as death:  # noqa: PT012
            await ranks.start()
            await ranks.until_dead()
    told = str(death.value)
    assert told.startswith("learner rank 0 of 1 died in start: Ray's memory monitor ended it, as ")
    assert re.search(r"as [\d.]+ of the machine's [\d.]+ GB were taken: .*most by [\d.]+ GB .* \(\d+\)", told)
    assert "\n" not in told and len(told) < 500
