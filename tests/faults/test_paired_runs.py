"""What is killed, what runs with kills are compared with, and what is written of them."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from tests.faults import paired_runs
from tests.faults.killer import kill_one, killed, living
from tests.support.processes.child_process import child_process, gone


def test_a_run_with_kills_is_compared_with_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def play_run(folder: Path, *, seed: int, mean_s: float | None, knobs: list[str]) -> paired_runs.Outcome:
        assert knobs == ["run.steps=2"] and folder.is_dir()
        kills = [] if mean_s is None else [(1.0, "engine")] * (seed + 1)
        wall_s = 100.0 if mean_s is None else 110.0 + 10 * seed
        return paired_runs.Outcome(
            seed=seed, reward=1.0, wall_s=wall_s, kills=kills, restarts={}, max_logprob_diff=0.0
        )  # fmt: skip

    monkeypatch.setattr(paired_runs, "play_run", play_run)
    kept = tmp_path / "kept"
    monkeypatch.setattr(
        sys, "argv", ["paired_runs", "--json", str(tmp_path / "f.json"), "--folder", str(kept), "run.steps=2"]
    )
    assert paired_runs.main() == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["kills"] == 6 and figures["wall_ratio"] == pytest.approx(1.2)
    assert [one["seed"] for one in figures["with_kills"]] == [0, 1, 2] and figures["reward_with"] == [1.0] * 3
    with pytest.raises(SystemExit):
        paired_runs.main()
    assert "--folder must be a new folder, got " in capsys.readouterr().err
    assert sorted(path.name for path in kept.iterdir())[:2] == ["seed-0-kills", "seed-0-quiet"]


GUARD = """
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen([*sleep, mark]) for mark in ("walk_agent", "nothing of a run")]
print("ready", flush=True)
[child.wait() for child in children]
"""


@pytest.mark.seconds
def test_only_a_part_that_lives_is_killed() -> None:
    with child_process([sys.executable, "-c", GUARD]) as guard:
        assert guard.stdout is not None and guard.stdout.readline() == "ready\n"
        ((pid,),) = living(guard.pid).values()
        assert kill_one(guard.pid, chance=random.Random(0)) == "agent" and gone(pid)
        assert kill_one(guard.pid, chance=random.Random(0)) is None
        (rest,) = living(guard.pid, marks={"rest": "nothing of a run"})["rest"]
        assert killed(rest) and gone(rest)
