"""Rules of learner/session.py: a resume that fails leaves the run's configuration, and one that begins changes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffers.errors import UnderstudyError
from configs.load import load_config
from learner import session
from learner.reporting.run_metrics import History
from learner.session import run_session
from learner.startup.run_folder import CONFIG, LEDGER, write_config


class FakePipeline:
    """One whose run is a function."""

    run_it: Callable[[FakePipeline], None] = staticmethod(lambda _: None)

    def __init__(self, config: Any, *, folder: Path, tracker: Any, resume: bool, **_: Any) -> None:
        self.config, self.folder, self.tracker, self.resume = config, folder, tracker, resume
        self.history = History(config, earlier=tracker.earlier)
        self.agreement = None
        self.on_ray_started = lambda: None

    async def run(self) -> None:
        (self.folder / LEDGER).touch()
        FakePipeline.run_it(self)

    def stop(self) -> bool:
        return True


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a session whose pipeline is this function."""
    monkeypatch.setattr(session, "Pipeline", FakePipeline)

    def play(run_it: Callable[[FakePipeline], None], *overrides: str, resume: str = "auto") -> int:
        monkeypatch.setattr(FakePipeline, "run_it", staticmethod(run_it))
        config = load_config(overrides=[f"run.dir={tmp_path}", "run.name=run", "run.trackers=[]", *overrides])
        return run_session(config, resume=resume)

    return play


def fail(_: FakePipeline) -> None:
    raise UnderstudyError("engines do not start")


@pytest.mark.parametrize("override", ["rollout.engine_args={block_size: 8}", "learner.kl.coef=0.7"])
def test_a_resume_that_fails_leaves_the_configuration_and_one_that_begins_changes_it(
    play: Callable[..., int], tmp_path: Path, override: str
) -> None:
    assert play(lambda _: None) == 0
    before = (tmp_path / "run" / CONFIG).read_text()
    assert play(fail, override) == 1
    assert (tmp_path / "run" / CONFIG).read_text() == before
    assert play(lambda pipeline: write_config(pipeline.folder, pipeline.config), override) == 0
    assert (tmp_path / "run" / CONFIG).read_text() != before
