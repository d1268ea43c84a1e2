"""Rules of benchmarks/learning.py and harness.py: when a run has learned, and what is reported."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, learning
from benchmarks.harness import in_turn, parser_of, play
from benchmarks.learning import Learned, learned, solved_at


def run_of(rewards: list[float], *, recipe: str = "rloo", lag: int = 0, seed: int = 0) -> Learned:
    steps = [{"reward/mean": reward, "staleness/mean": 0.5} for reward in rewards]
    return learned(steps, recipe=recipe, lag=lag, seed=seed)


def test_solved_is_the_end_of_the_first_window_at_the_target() -> None:
    assert solved_at([0.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0], target=0.9) == 6
    assert solved_at([1.0] * 5, target=0.9) == 5
    assert solved_at([0.0, *[1.0] * 4], target=0.9) is None


def test_a_run_that_is_too_short_to_judge_is_refused() -> None:
    run = run_of([0.0, *[1.0] * 5], lag=4, seed=1)
    assert (run.solved_at, run.reward_last, run.recipe, run.lag, run.seed) == (6, 1.0, "rloo", 4, 1)
    assert run.mean_lag == 0.5
    with pytest.raises(ValueError, match="at least 5 steps, got 3"):
        run_of([1.0] * 3)


def test_the_table_has_a_row_for_each_recipe_and_what_did_not_learn() -> None:
    good = run_of([1.0] * 6)
    runs = [good, replace(good, seed=1, reward_last=0.5, solved_at=None), replace(good, recipe="grpo", lag=4)]
    cells = learning.summarise(runs)
    assert cells[0] == {
        "recipe": "rloo", "lag": 0, "mean_lag": 0.5, "solved_at": [5, None], "reward_last": 0.75, "worst_last": 0.5,
    }  # fmt: skip
    lines = learning.table(cells).splitlines()
    assert lines[2:] == [
        "| rloo | 5, never | 0.750 | 0.500 |  |  |  |",
        "| grpo |  |  |  | 5 | 1.000 | 1.000 |",
    ]


def test_each_run_is_the_products_with_its_recipe_its_lag_and_its_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: dict[str, list[str]] = {}
    configs: list[str] = []

    def whole_run(folder: Path, name: str, *settings: str, config: str) -> list[dict[str, Any]]:
        played[name] = list(settings)
        configs.append(config)
        return [{"reward/mean": 1.0, "staleness/mean": 0.5}] * 5

    monkeypatch.setattr(learning, "whole_run", whole_run)
    words = ["--recipes", "demo_naive", "--lags", "0", "4", "--seeds", "7", "--json", str(tmp_path / "out.json")]
    assert learning.main([*words, "--override", "learner.lr=1e-3"]) == 0
    shared = ["learner.correction=naive", "run.steps=40", "run.seed=7"]
    assert played == {
        f"demo_naive-{lag}-7": [*shared, f"buffer.max_policy_lag={lag}", "learner.lr=1e-3"] for lag in (0, 4)
    }
    report = json.loads((tmp_path / "out.json").read_text())
    assert [cell["solved_at"] for cell in report["cells"]] == [[5], [5]] and len(report["runs"]) == 2
    played.clear()
    assert learning.main(["--recipes", "demo", "--lags", "1", "--seeds", "0", "--family", "llama"]) == 0
    (settings,) = played.values()
    assert settings[-1].startswith("model.path=") and settings[-1].endswith("/llama")
    assert configs == ["demo", "demo", "configs/walk_env.yaml"]


def test_a_report_says_what_was_measured_on_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parser_of("some", doc="What it is.\n\nMore.").parse_args(["--json", str(tmp_path / "out.json")])
    arguments.steps = 3
    assert play("some", arguments, lambda *_: iter([{"speed": 2.0}, {"speed": 2.5}]), about="three runs") == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert list(found) == ["benchmark", "settings", "machine", "speed", "wall_s"]
    assert (found["benchmark"], found["settings"], found["speed"]) == ("some", {"steps": 3}, 2.5)
    assert found["machine"]["cores"] >= 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith("at the start; three runs") and last.split() == ["speed:", "2.5"]


def test_a_benchmark_whose_process_fails_keeps_what_was_measured_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(arguments: Any, folder: Path) -> Any:
        yield {"speed": 2.5}
        harness.run_to_end([sys.executable, "-c", "raise SystemExit(3)"], log=folder / "log")

    arguments = parser_of("some", doc="What it is.").parse_args(["--json", str(tmp_path / "out.json")])
    assert play("some", arguments, measure) == 1
    assert json.loads((tmp_path / "out.json").read_text())["speed"] == 2.5
    assert "exit code 0, got 3" in capsys.readouterr().err


def test_sides_take_turns_and_go_back_and_forth() -> None:
    order: list[str] = []
    sides = {name: lambda name=name: order.append(name) or len(order) for name in ("one", "two")}  # type: ignore[misc]
    assert in_turn(sides, repeats=3) == {"one": [1, 4, 5], "two": [2, 3, 6]}
    assert order == ["one", "two", "two", "one", "one", "two"]


def twice(*, number: int, rank: int, world_size: int, address: str) -> list[int]:
    assert address.startswith("127.0.0.1:")
    return [2 * number, rank, world_size]


@pytest.mark.seconds
def test_a_function_is_called_in_processes_of_its_own(tmp_path: Path) -> None:
    assert harness.call(twice, folder=tmp_path, ranks=2, number=3) == [[6, 0, 2], [6, 1, 2]]
