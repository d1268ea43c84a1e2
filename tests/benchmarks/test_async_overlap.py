"""What the benchmark of asynchrony reads from a run, how it compares, and one whole small benchmark."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import async_overlap, harness
from benchmarks.async_overlap import (
    LONG_TAIL,
    Bench,
    Shape,
    compare,
    epochs_for,
    move_ms_for,
    read_figures,
    shown,
)
from benchmarks.harness import RunFailed, run_to_end
from env_adapters.walk.game import MAX_MOVES
from env_adapters.walk.server import tail_draw


def step_line(step: int, *, wait_s: float, update_s: float, engine_idle_s: float, lag: float) -> dict[str, Any]:
    return {
        "step": step,
        "time/wait_s": wait_s,
        "time/step_s": wait_s + update_s,
        "time/prepare_s": 0.1,
        "time/train_s": 0.5,
        "time/engine_idle_s": engine_idle_s,
        "staleness/mean": lag / 2,
        "staleness/max": lag,
    }


STEPS = [
    step_line(1, wait_s=100.0, update_s=9.0, engine_idle_s=90.0, lag=9.0),
    step_line(2, wait_s=3.0, update_s=1.0, engine_idle_s=1.0, lag=1.0),
    step_line(3, wait_s=1.0, update_s=1.0, engine_idle_s=2.0, lag=2.0),
]


def test_the_first_step_and_the_start_up_are_in_no_time_or_share() -> None:
    figures = read_figures(STEPS)
    assert figures["step_s"] == 3.0  # (4 + 2) / 2
    assert figures["epoch_s"] == pytest.approx(0.4)
    assert figures["learner_idle"] == pytest.approx(4 / 6)
    assert figures["engine_idle"] == pytest.approx(3 / 6)
    assert (figures["mean_lag"], figures["max_lag"]) == (0.75, 2.0)
    with pytest.raises(ValueError, match="at least 2 steps, got 1; set --steps 2"):
        read_figures(STEPS[:1])


def test_an_engine_that_was_idle_for_longer_than_a_step_took_was_idle_throughout() -> None:
    figures = read_figures([*STEPS, step_line(4, wait_s=1.0, update_s=1.0, engine_idle_s=4.0, lag=2.0)])
    assert figures["engine_idle"] == pytest.approx((3 + 4) / (6 + 4))


def test_another_seed_makes_other_episodes_slow() -> None:
    names = [f"{group}-{member}-0" for group in range(100) for member in range(8)]
    first, again, other = ([n for n in names if tail_draw(n, seed=seed) < 0.1] for seed in (1, 1, 2))
    assert first == again and first != other
    assert len(first) == pytest.approx(80, abs=25) and len(other) == pytest.approx(80, abs=25)


def test_a_slow_episode_lasts_eight_steps_and_a_learner_bound_update_two_and_a_half() -> None:
    move_s = move_ms_for(2.0) / 1000
    assert move_s * LONG_TAIL.factor * MAX_MOVES == pytest.approx(16.0)
    assert epochs_for(2.0, epoch_s=0.5) == 10
    assert epochs_for(0.1, epoch_s=9.0) == 1


FIGURES: dict[str, Any] = {
    "step_s": 1.0, "epoch_s": 0.4, "learner_idle": 0.5, "engine_idle": 0.1, "mean_lag": 1.0, "max_lag": 2.0,
}  # fmt: skip


class ScriptedBench(Bench):
    """Says what it was asked, and answers with step times from a list."""

    asked: ClassVar[list[tuple[str, int, int]]] = []
    step_times: ClassVar[list[float]] = []

    def run(self, shape: Shape, *, lag: int, move_ms: float, seed: int, extra: tuple[str, ...] = ()) -> dict[str, Any]:
        self.asked.append((shape.name, lag, seed))
        return FIGURES | {"step_s": self.step_times.pop(0)}


def test_flows_alternate_with_equal_seeds_and_the_speed_up_is_of_medians(tmp_path: Path) -> None:
    bench = ScriptedBench(folder=tmp_path, steps=2, overrides=())
    bench.asked.clear()
    bench.step_times[:] = [6.0, 2.0, 9.0, 3.0, 30.0, 2.0]
    part = compare(bench, shape=LONG_TAIL, move_ms=5.0, seeds=range(1, 4))
    assert bench.asked == [("long_tail", lag, seed) for seed in (1, 2, 3) for lag in (0, async_overlap.ASYNC_LAG)]
    assert part["speedup"] == 9.0 / 2.0
    assert part["speedups"] == [3.0, 3.0, 15.0]
    assert part["async"]["step_s"] == 2.0 and len(part["async"]["runs"]) == 3
    assert "4.50x" in shown({"long_tail": part})


def test_a_run_that_fails_is_shown_with_its_end(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"exit code 0, got 3; try it by hand: .*-c[\s\S]*out of luck"):
        run_to_end([sys.executable, "-c", "print('out of luck'); raise SystemExit(3)"], log=tmp_path / "log")


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("command", "ended_by"),
    [(["sleep", "600"], signal.SIGTERM), (["sh", "-c", "trap '' TERM; sleep 600; true"], signal.SIGKILL)],
)
def test_a_run_is_ended_with_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str], ended_by: signal.Signals
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(harness, "STOP_S", 1.0)
    monkeypatch.setattr(subprocess, "Popen", Noted)
    with pytest.raises(subprocess.TimeoutExpired):
        run_to_end(command, log=tmp_path / "log", limit_s=1.0)
    assert [process.returncode for process in started] == [-ended_by]


def test_the_command_line_writes_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ScriptedBench.asked.clear()
    ScriptedBench.step_times[:] = [2.0, 12.0, 3.0]
    monkeypatch.setattr(async_overlap, "Bench", ScriptedBench)
    path = tmp_path / "figures.json"
    assert async_overlap.main(["--quick", "--steps", "3", "--json", str(path)]) == 0
    assert ScriptedBench.asked == [("none", 12, 1), ("long_tail", 0, 1), ("long_tail", 12, 1)]
    report: dict[str, Any] = json.loads(path.read_text())
    part = report["parts"]["long_tail"]
    assert report["speedup_long_tail"] == part["speedup"] == part["sync"]["step_s"] / part["async"]["step_s"] == 4.0
    assert "long_tail" in (text := capsys.readouterr().out) and "4.00x" in text


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.engine
def test_a_run_of_the_benchmark_is_a_real_one(tmp_path: Path) -> None:
    small = ("buffer.groups_per_step=2", "buffer.group_size=2", "agents.concurrency=8", "sft.steps=2")
    bench = Bench(folder=tmp_path, steps=2, overrides=small)
    figures = bench.run(LONG_TAIL, lag=async_overlap.ASYNC_LAG, move_ms=20.0, seed=1)
    assert figures["max_lag"] <= async_overlap.ASYNC_LAG
    assert (
        0.0 <= figures["learner_idle"] < 1.0 and 0.0 <= figures["engine_idle"] <= 1.0
    )  # on a busy machine neither waits
    assert figures["step_s"] > 0.0
