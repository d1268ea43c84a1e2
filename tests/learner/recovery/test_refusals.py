"""Why ranks do not start, with real processes: a refusal is no death."""

from __future__ import annotations

from typing import Any

import pytest

from buffers.errors import TaskError
from configs.schema import LearnerConfig
from learner.recovery import restarts
from learner.recovery.restarts import RestartLimit
from learner.training.ranks import LearnerProcesses, LearnerRanks, RankDied, RankFailed

REFUSED = "model.path must name a model of a known kind: got one of another;\n  name another one"


class Refusing:
    """A rank whose constructor refuses."""

    def __init__(self, config: LearnerConfig, *, model_path: str, **_: Any) -> None:
        if model_path == "ours":
            raise TaskError(REFUSED)
        if model_path == "library's":
            try:
                raise OSError("no such file")
            except OSError as error:
                raise ValueError("Unrecognized configuration class") from error
        if model_path == "chance":
            raise RuntimeError("the address is in use")


def ranks_of(model_path: str, *, number: int = 1) -> LearnerRanks:
    return LearnerRanks(
        LearnerConfig(ranks=number), model_path=model_path, dtype="float32", temperature=1.0, seed=0, keep_versions=1,
        trainer=Refusing,  # type: ignore[arg-type]
    )  # fmt: skip


def processes(ranks: LearnerRanks, limit: RestartLimit) -> LearnerProcesses:
    return LearnerProcesses(ranks, restart_limit=limit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_path", "number", "told"),
    [
        ("ours", 1, REFUSED),
        ("ours", 2, REFUSED),
        ("library's", 1, "ValueError: Unrecognized configuration class"),
    ],
)
async def test_a_refusal_comes_through_once_and_nothing_is_started_again(model_path, number, told) -> None:
    limit = RestartLimit()
    with pytest.raises(RankFailed) as failed:
        await processes(ranks_of(model_path, number=number), limit).start(None)
    assert not isinstance(failed.value, RankDied) and str(failed.value) == told
    assert limit.figures() == {}


@pytest.mark.slow
async def test_what_another_start_may_mend_is_started_again(monkeypatch) -> None:
    monkeypatch.setattr(restarts, "MAX_IN_A_ROW", 1)
    limit = RestartLimit()
    with pytest.raises(RankDied, match="died in start: RuntimeError: the address is in use; the learner"):
        await processes(ranks_of("chance"), limit).start(None)
    assert limit.figures() == {"restarts/learner": 1.0}
