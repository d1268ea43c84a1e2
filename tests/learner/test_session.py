"""Rules of learner/session.py: a resume that fails leaves the run's configuration, and one that begins changes it; a run that ends
with a defect leaves what any other leaves."""

from __future__ import annotations

import asyncio
import json
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

    run_it: Callable[[FakePipeline], Any] = staticmethod(lambda _: None)

    def __init__(self, config: Any, *, folder: Path, tracker: Any, resume: bool, **_: Any) -> None:
        self.config, self.folder, self.tracker, self.resume = config, folder, tracker, resume
        self.history = History(config, earlier=tracker.earlier)
        self.agreement = None
        self.on_ray_started = lambda: None

    async def run(self) -> None:
        (self.folder / LEDGER).touch()
        if (running := FakePipeline.run_it(self)) is not None:
            await running

    def stop(self) -> bool:
        return True


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a session whose pipeline is this function."""
    monkeypatch.setattr(session, "Pipeline", FakePipeline)

    def play(run_it: Callable[[FakePipeline], Any], *overrides: str, resume: str = "auto") -> int:
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


async def in_a_loop(error: BaseException) -> None:
    async with asyncio.TaskGroup() as loops:
        async with asyncio.TaskGroup() as inner:
            inner.create_task(raises(error))
        loops.create_task(raises(error))


async def raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [ZeroDivisionError("by nothing"), KeyError("policy/kl_ref")])
@pytest.mark.parametrize("grouped", [True, False])
def test_a_defect_leaves_summary_picture_and_the_way_to_go_on_and_then_its_traceback(
    play: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], error: Exception, grouped: bool
) -> None:
    def fail(pipeline: FakePipeline) -> Any:
        pipeline.history.rewards += [0.25, 0.5]
        return in_a_loop(error) if grouped else raises(error)

    assert play(fail) == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (
        summary["error"] == f"a defect: {type(error).__name__}: {error}" and (tmp_path / "run" / "reward.png").is_file()
    )
    output = capfd.readouterr().out
    assert f"error: {summary['error']}" in output
    way, _, told = output.partition(f"python -m learner.cli resume {tmp_path / 'run'}")
    assert "To resume:" in way and "Traceback" not in way
    assert "in raises" in told and told.strip().endswith(f"{type(error).__name__}: {error}")


def test_a_picture_that_cannot_be_drawn_ends_no_run(
    play: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session, "reward_curve_png", full)
    assert play(lambda pipeline: pipeline.history.rewards.append(0.5)) == 0
    assert (tmp_path / "run" / "summary.json").is_file()


def test_an_order_to_end_is_no_defect(play: Callable[..., int]) -> None:
    with pytest.raises(KeyboardInterrupt):
        play(lambda _: raises(KeyboardInterrupt()))
