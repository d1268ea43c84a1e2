"""What a run shows and leaves behind: metrics files, reward curves, the summary, the display."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import subprocess
import sys
import threading
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from buffers.disk import append, check_takes, replacing
from learner.reporting import tracker as tracker_module
from learner.reporting.display import Display, moving_average, reward_curve_png, summary_table, write_summary
from learner.reporting.tracker import Tracker, TrackerError, check_trackers
from tests.support.faults.disks import FAULTS, NEEDS_ROOT, small_disk


def test_a_step_is_one_line_on_disk_before_log_returns(tmp_path: Path) -> None:
    with Tracker(tmp_path / "run") as tracker:
        tracker.log(1, {"reward/mean": 0.25, "policy/loss": 1})
        assert (tmp_path / "run/metrics.jsonl").read_text() == '{"step": 1, "reward/mean": 0.25, "policy/loss": 1.0}\n'
        tracker.log(2, {"reward/mean": 0.5})
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {"step": 2, "reward/mean": 0.5}
    tracker.close()  # a second time is fine


def test_values_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        assert tracker.log(1, {"a": math.nan, "b": math.inf, "c": 3.0}) == {"c": 3.0, "tracker/refused": 2.0}
        tracker.log(2, {"c": -math.inf})
        assert tracker.num_refused == 3
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [
        '{"step": 1, "c": 3.0, "tracker/refused": 2.0}',
        '{"step": 2, "tracker/refused": 1.0}',
    ]


def test_tensorboard_reads_the_same_figures(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"reward/mean": step / 4})
    (path,) = (tmp_path / "tensorboard").iterdir()
    seen = [
        (event.step, value.tag, round(value.tensor.float_val[0], 6))
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]
    assert seen == [(1, "reward/mean", 0.25), (2, "reward/mean", 0.5), (3, "reward/mean", 0.75)]


def test_moving_average_uses_what_is_there() -> None:
    assert moving_average([1.0, 2.0, 3.0, 4.0], window=2) == [1.0, 1.5, 2.5, 3.5]
    assert moving_average([1.0, 2.0, 6.0], window=10) == [1.0, 1.5, 3.0]


def test_the_picture_is_a_whole_png_and_replaces_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "reward.png"
    for rewards in ([0.5], [step / 60 for step in range(60)]):
        reward_curve_png(path, rewards, optimum=1.0, title="demo")
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
        assert struct.unpack(">II", data[16:24]) == (1200, 675)
    assert [file.name for file in tmp_path.iterdir()] == ["reward.png"]


@pytest.mark.parametrize("rewards", [[], [0.5, math.nan]])
def test_a_curve_of_nothing_or_of_nan_is_refused(tmp_path: Path, rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="needs >= 1 step, got 0" if not rewards else "must be finite, got nan"):
        reward_curve_png(tmp_path / "x.png", rewards, optimum=1.0, title="demo")
    assert list(tmp_path.iterdir()) == []


def test_a_summary_is_whole_or_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, {"steps": 60, "reward": {"last": 0.98}})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_summary(path, {"reward": math.nan})
    assert json.loads(path.read_text()) == {"steps": 60, "reward": {"last": 0.98}}
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_the_summary_table_shows_every_figure() -> None:
    console = Console(file=io.StringIO(), width=60)
    console.print(
        summary_table({"steps": 60, "reward": {"last": 0.98123}, "tokens": 1234567, "ok": True}, title="demo")
    )
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for name, shown in (("steps", "60"), ("reward.last", "0.9812"), ("tokens", "1,234,567"), ("ok", "True")):
        assert any(name in line and shown in line for line in text.splitlines()), name


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(display: Display, number: int, *, reward: float) -> None:
    display.update(number, reward=reward, mean_lag=0.5, max_lag=1, tokens_per_s=5432.1, step_s=1.5)


def test_without_a_terminal_every_step_is_one_plain_line() -> None:
    out, clock = io.StringIO(), Clock()
    with Display(80, console=Console(file=out, width=60), clock=clock) as display:
        with display.phase("starting engine"):
            clock.now += 12.34
        display.queues(prompts_waiting=4, episodes_running=64, groups_ready=2)
        step(display, 1, reward=0.25)
        display.validated(0, mean=0.125, best=0.5)
        step(display, 2, reward=0.5)
    assert out.getvalue().splitlines() == [
        "starting engine ...",
        "starting engine ... 12.3 s",
        "step 1/80  reward 0.250  lag 0.50/1  5,432 tokens/s  1.50 s  waiting 4  running 64  ready 2",
        "validation of step 0  mean 0.125  best 0.500",
        "step 2/80  reward 0.500  lag 0.50/1  5,432 tokens/s  1.50 s  waiting 4  running 64  ready 2",
    ]


def test_a_phase_that_fails_says_so_and_raises() -> None:
    out, clock = io.StringIO(), Clock()

    def start_engine() -> None:
        with Display(80, console=Console(file=out, width=60), clock=clock) as display, display.phase("starting engine"):
            clock.now += 3
            raise RuntimeError("no engine")

    with pytest.raises(RuntimeError, match="no engine"):
        start_engine()
    assert out.getvalue().splitlines()[-1] == "starting engine ... failed after 3.0 s"


def test_the_panel_shows_progress_reward_staleness_speed_and_queues() -> None:
    clock = Clock()
    display = Display(80, optimum=1.0, console=Console(file=io.StringIO(), width=100), clock=clock)
    for number in range(1, 21):
        step(display, number, reward=number / 20)
    display.queues(prompts_waiting=4, episodes_running=64, groups_ready=2)
    console = Console(file=io.StringIO(), width=100)
    console.print(display.render())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "20/80   1:30 left" in text
    assert "last 1.000   mean of 10 0.775   best 1.000   optimum 1" in text
    assert "mean 0.50   max 1 versions" in text
    assert "5,432 tokens/s   1.50 s/step" in text
    assert "4 prompts waiting   64 episodes running   2 groups ready" in text
    assert "▁▂▂▂" in text and "█" in text


def test_the_panel_has_a_line_for_each_engine() -> None:
    display = Display(80, console=Console(file=io.StringIO(), width=100), clock=Clock())
    display.engines(["e0   12 running  KV 45%", "e1  down"])
    console = Console(file=io.StringIO(), width=100)
    console.print(display.render())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    (first,) = [number for number, line in enumerate(lines) if "engines" in line]
    assert "e0   12 running  KV 45%" in lines[first] and "e1  down" in lines[first + 1]


def test_on_a_terminal_the_panel_is_live_and_finished_phases_stay_above_it() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=20)
    with Display(3, title="demo run", console=console, clock=Clock()) as display:
        with display.phase("loading weights"):
            pass
        for number in (1, 2, 3):
            step(display, number, reward=0.5)
    text = out.getvalue()
    assert "loading weights ... 0.0 s" in text and "demo run" in text
    assert "3/3" in text and "step 1/3" not in text  # the panel at the end, no plain lines
    assert text.endswith("\x1b[?25h")  # the cursor is back


def test_a_tracker_that_goes_on_drops_the_lines_that_are_made_again(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"reward/mean": step / 4})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # killed in the middle of a line
    with Tracker(tmp_path, start=2) as tracker:
        assert tracker.earlier == [{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.5}]
        tracker.log(3, {"reward/mean": 0.875})
    assert [json.loads(line)["reward/mean"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        0.25,
        0.5,
        0.875,
    ]
    events = [event for path in (tmp_path / "tensorboard").iterdir() for event in EventFileLoader(str(path)).Load()]
    assert 3 in [event.step for event in events if event.HasField("session_log")]


class FakeService(ModuleType):
    """wandb, mlflow and swanlab, as far as they are asked: notes calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.calls: list[tuple[object, ...]] = []
        self.ids: list[object] = []

    def init(self, **options: object) -> FakeService:
        self.calls.append(("init", options.get("name") or options.get("experiment_name"), options["config"]))
        assert options["resume"] == "allow"
        self.ids.append(options["id"])
        return self

    def log(self, figures: dict[str, float], *, step: int) -> None:
        self.calls.append(("log", figures, step))

    log_metrics = log

    def finish(self) -> None:
        self.calls.append(("finish",))

    end_run = finish

    def set_experiment(self, name: str) -> None: ...

    def start_run(self, *, run_id: str | None, run_name: str) -> SimpleNamespace:
        self.calls.append(("init", run_name))
        self.ids.append(run_id or f"made{len(self.ids)}")
        return SimpleNamespace(info=SimpleNamespace(run_id=self.ids[-1]))

    def log_dict(self, config: dict[str, object], name: str) -> None:
        self.calls[-1] += (config,)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_other_trackers_get_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    service = FakeService(name)
    monkeypatch.setitem(sys.modules, name, service)
    check_trackers([name])
    with Tracker(tmp_path, trackers=[name], name="mine", config={"a": 1}) as tracker:
        tracker.log(1, {"reward/mean": 0.5, "bad": math.nan})
    figures = {"reward/mean": 0.5, "tracker/refused": 1.0}
    assert service.calls == [("init", "mine", {"a": 1}), ("log", figures, 1), ("finish",)]
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_a_resumed_run_goes_on_in_the_trackers_run_and_another_run_in_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    service = FakeService(name)
    monkeypatch.setitem(sys.modules, name, service)
    for folder, start in (("run", 0), ("run", 1), ("run", 2), ("other", 0)):
        with Tracker(tmp_path / folder, trackers=["tensorboard", name], start=start) as tracker:
            tracker.log(start + 1, {"reward/mean": 0.5})
    first, second, third, other = service.ids
    assert first == second == third != other and first


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
@pytest.mark.parametrize("call", ["init", "log", "end"])
def test_a_tracker_that_raises_is_told_of_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: str
) -> None:
    def away(*_: object, **__: object) -> None:
        raise ConnectionError("the server\nis away")

    service = FakeService(name)
    for part in {"init": ("init", "start_run"), "log": ("log", "log_metrics"), "end": ("finish", "end_run")}[call]:
        monkeypatch.setattr(service, part, away)
    monkeypatch.setitem(sys.modules, name, service)
    told: list[str] = []
    with Tracker(tmp_path, trackers=[name, "tensorboard"], warn=told.append) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"reward/mean": 0.5})
    line, *last = told
    assert last == [f"note: left out, as it could not be written: {name} ({3 if call == 'log' else 1} times)"]
    assert line.startswith(
        f"note: {name} could not be written (ConnectionError: the server is away); the run continues"
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert list((tmp_path / "tensorboard").iterdir()), "the others get theirs"


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
@pytest.mark.parametrize("call", ["init", "log", "end"])
def test_a_tracker_that_does_not_answer_holds_up_neither_the_run_nor_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: str
) -> None:
    answers = threading.Event()
    service = FakeService(name)
    for part in {"init": ("init", "start_run"), "log": ("log", "log_metrics"), "end": ("finish", "end_run")}[call]:
        monkeypatch.setattr(service, part, lambda *_, **__: answers.wait())
    monkeypatch.setitem(sys.modules, name, service)
    monkeypatch.setattr(tracker_module, "CLOSE_S", 0.5)
    monkeypatch.setattr(tracker_module, "SOON_S", 0.1)
    monkeypatch.setattr(tracker_module, "MOST_WAITING", 20)
    told: list[str] = []
    with Tracker(tmp_path, trackers=[name, "tensorboard"], warn=told.append) as tracker:
        for step in range(1, 31):
            tracker.log(step, {"reward/mean": 0.5})
            for takes_steps in ("tensorboard", *([name] if call == "end" else [])):
                tracker.threads[takes_steps].steps.join()
    late = [0] if call == "end" else [9, 10]  # 20 wait; one may have been taken
    assert any(told[-1].endswith(f"{name} ({1 + number} times)") for number in late), told
    assert any(line.startswith(f"{name} has not taken all figures yet") for line in told)
    assert any("within 0 s after the last step" in line or "the last 20 steps" in line for line in told)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 30
    assert tensorboard_steps(tmp_path / "tensorboard") == set(range(1, 31))
    answers.set()


@NEEDS_ROOT
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread
@pytest.mark.parametrize("fault", FAULTS)
def test_steps_wait_for_a_disk_in_their_order_and_trackers_begin_again_when_it_is_back(
    tmp_path: Path, fault: str
) -> None:
    told: list[str] = []
    with small_disk(tmp_path / "disk") as disk, Tracker(disk.folder / "run", warn=told.append) as tracker:
        for step in range(1, 31):
            if step == 2:
                disk.refuse(fault)
            if step == 20:
                disk.take()
            tracker.log(step, {f"a/{number}": 0.5 for number in range(100)})
            tracker.threads["tensorboard"].steps.join()
            tracker.attempt("tokens", partial((disk.folder / f"{step}").write_bytes, b"x"))
        tracker.close()
        lines = (disk.folder / "run" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, 31))
        shown = tensorboard_steps(disk.folder / "run" / "tensorboard")
        assert {1, *range(20, 31)} <= shown, "at most the steps of the full disk are not in TensorBoard"
    assert told[-1].startswith("note: left out, as it could not be written: ") and "tokens (18 times)" in told[-1]
    names = [line.split()[1] for line in told[:-1]]
    assert len(set(names)) == len(names), "each is told of once"


def tensorboard_steps(folder: Path) -> set[int]:
    """The steps of all event files."""
    return {
        event.step for file in folder.iterdir() for event in EventFileLoader(str(file)).Load() if event.summary.value
    }


@NEEDS_ROOT
def test_what_a_full_disk_did_not_take_whole_leaves_no_part_of_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path, table = disk.folder / "lines.jsonl", disk.folder / "table"
        first = append(path, "one\n")
        table.write_text("old")
        disk.refuse("full")
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                append(path, "x" * 100_000)
            with pytest.raises(OSError, match="No space left"), replacing(table) as scratch:
                scratch.write_bytes(bytes(100_000))
            with pytest.raises(OSError, match="No space left"):
                check_takes(disk.folder)
        assert path.stat().st_size == first and table.read_text() == "old"
        disk.take()
        append(path, "two\n")
        assert path.read_text() == "one\ntwo\n"
        assert sorted(file.name for file in disk.folder.iterdir()) == [".ballast", "lines.jsonl", "table"]


def test_two_processes_may_replace_one_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "tasks"
    other = "from pathlib import Path; from buffers.disk import replacing\nwith replacing(Path('tasks')) as scratch: "
    with replacing(path) as scratch:
        scratch.write_text("ours")
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        subprocess.run(
            [sys.executable, "-c", other + "scratch.write_text('theirs')"], cwd=tmp_path, env=environment, check=True
        )
        assert path.read_text() == "theirs"
    assert path.read_text() == "ours" and list(tmp_path.iterdir()) == [path]


def test_a_tracker_that_is_not_installed_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(TrackerError, match=r"run\.trackers .* got wandb \(not installed\); pip install wandb"):
        check_trackers(["wandb"])
