"""Rules of learner/session.py: a resume that fails leaves the run's configuration, and one that begins changes it; a run that ends
with a defect leaves what any other leaves."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from buffers.errors import UnderstudyError
from configs.load import load_config
from learner import session
from learner.recovery.at_once import SIGNALS
from learner.reporting.run_metrics import History
from learner.session import run_session
from learner.startup.run_folder import CONFIG, LEDGER, write_config
from tests.support.patience import PATIENCE_S


class FakePipeline:
    """One whose run is a function."""

    run_it: Callable[[FakePipeline], Any] = staticmethod(lambda _: None)

    def __init__(self, config: Any, *, folder: Path, tracker: Any, resume: bool, **_: Any) -> None:
        self.config, self.folder, self.tracker, self.resume = config, folder, tracker, resume
        self.history = History(config, earlier=tracker.earlier)
        self.agreement = None
        self.on_joined = lambda: None

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


def test_a_summary_of_the_process_before_is_gone_while_a_run_is_resumed(
    play: Callable[..., int], tmp_path: Path
) -> None:
    summary = tmp_path / "run" / "summary.json"
    assert play(lambda _: None) == 0 and summary.is_file()
    seen: list[bool] = []
    assert play(lambda _: seen.append(summary.exists())) == 0
    assert seen == [False] and summary.is_file()


async def in_a_loop(error: BaseException) -> None:
    async with asyncio.TaskGroup() as loops:
        async with asyncio.TaskGroup() as inner:
            inner.create_task(raises(error))
        loops.create_task(raises(error))


async def raises(error: BaseException) -> None:
    raise error


@pytest.mark.seconds
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


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The signals that would have ended this process at once."""
    monkeypatch.setattr(session, "signals_end_at_once", lambda *_, **__: nullcontext())
    seen: list[int] = []
    before = {number: signal.signal(number, lambda number, _: seen.append(number)) for number in SIGNALS}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.parametrize("together", [False, True])
def test_the_first_signal_asks_for_a_clean_stop_and_each_later_one_ends_at_once(
    play: Callable[..., int], ended: list[int], first: int, second: int, together: bool
) -> None:
    stops: list[list[int]] = []

    async def run(pipeline: FakePipeline) -> None:
        stopped = asyncio.Event()
        pipeline.stop = lambda: (stops.append([*ended]), stopped.set()) is not None  # type: ignore[method-assign]
        send(first)
        if together:
            send(second)
            assert ended == [second], "also while the loop is busy: with a chat template without end, say"
        await stopped.wait()
        if not together:
            pipeline.on_joined()
            send(second)
        async with asyncio.timeout(PATIENCE_S):
            while not ended:
                await asyncio.sleep(0)

    assert play(run) == 130
    assert stops == [[second] if together else []] and {*ended} <= {first, second} and len(ended) == 1


def test_a_signal_after_the_run_ends_at_once_and_says_how_it_goes_on(
    play: Callable[..., int], ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def conclude(*_: object, **__: object) -> None:
        send(signal.SIGTERM)

    monkeypatch.setattr(session, "conclude", conclude)
    assert play(lambda _: None) == 0 and ended == [signal.SIGTERM]


def test_the_last_words_name_the_resume_as_soon_as_a_figure_is_there_and_may_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    assert "run the same command again" in session._way_on(folder, program="understudy run")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    words = session._way_on(folder, program="understudy run").splitlines()[1]
    assert shlex.split(words) == ["understudy", "resume", str(folder)]
