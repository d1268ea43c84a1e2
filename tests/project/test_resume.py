"""Whole runs that are killed, and go on: with the real engine, agents and environment, and real SIGKILLs."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import equal

from buffers.ledger.doctor import findings
from buffers.ledger.schema import read_database
from tests.support.patience import PATIENCE_S
from tests.support.run_parts import Run, assert_nothing_left, start

pytestmark = [pytest.mark.slow, pytest.mark.engine]

SMALL = ("sft.steps=5", "buffer.groups_per_step=4", "buffer.group_size=2", "agents.concurrency=16")
CLOCKS = ("time/", "throughput/", "pool/", "ledger/", "generation/", "tracker/", "engine/", "publish/", "learner/mfu")


def lines(run: Run) -> dict[int, dict[str, float]]:
    """The figures of each step that do not depend on the clock."""
    found = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in found if line["step"]]
    assert steps == sorted(set(steps))
    return {line["step"]: {k: v for k, v in line.items() if not k.startswith(CLOCKS)} for line in found if line["step"]}


def books_balance(run: Run, *, steps: int, groups_per_step: int = 4) -> None:
    """No group was trained twice, or left out, in what led to the last step."""
    with sqlite3.connect(run.folder / "ledger.sqlite") as db:
        lineage, kept = db.execute("SELECT max(lineage) FROM lineage").fetchone()[0], []
        up_to = steps
        while lineage is not None:
            kept += db.execute(
                "SELECT step, group_id FROM trained JOIN step USING (step_id) WHERE lineage = ? AND step <= ?",
                (lineage, up_to),
            ).fetchall()
            lineage, start_step = db.execute(
                "SELECT parent, step FROM lineage WHERE lineage = ?", (lineage,)
            ).fetchone()
            up_to = min(up_to, start_step)
        assert sorted({step for step, _ in kept}) == list(range(1, steps + 1))
        groups = [group for _, group in kept]
        assert len(groups) == len(set(groups)) == steps * groups_per_step
        trained = db.execute("SELECT group_id FROM grp WHERE state = 'trained'").fetchall()
        assert {group for (group,) in trained} == set(groups)
    db.close()


def heavy(run: Run) -> list[str]:
    """Its engine and its learner, while they live."""
    return [line for line in run.processes() if "VLLM::" in line or "understudy::learner_rank" in line]


def kill_run(run: Run) -> None:
    """SIGKILL to its own process only: that leaves neither engine nor learner. Then to what is left."""
    assert len(heavy(run)) == 2
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    until = time.monotonic() + PATIENCE_S
    while (left := heavy(run)) and time.monotonic() < until:
        time.sleep(0.2)
    run.kill()
    assert left == []


@pytest.mark.long
def test_a_run_that_is_killed_again_and_again_makes_its_steps_with_the_same_bits(tmp_path: Path) -> None:
    knobs = ("run.checkpoints.every=2", "run.checkpoints.keep=50", *SMALL)
    first = start(tmp_path, "run.steps=40", *knobs, resume="auto")  # nothing there yet: a fresh run
    first.wait_for_step(1)  # before any checkpoint but that of the start, or just after the next one
    kill_run(first)
    second = start(tmp_path, "run.steps=40", *knobs, resume="auto")
    second.wait_for_step(7)
    second.kill()
    before = lines(second)
    folder = second.folder / "checkpoints"
    assert (folder / "step-000006.1").is_dir()
    last = max(before)
    of_second, of_first = folder / "step-000002.1", folder / "step-000002"
    early = of_second if of_second.is_dir() else of_first
    third = start(tmp_path, f"run.steps={last}", *knobs, resume=str(early))
    code, output = third.wait()
    assert code == 0, output
    assert "resuming after step 2" in output
    after = lines(third)
    assert sorted(after) == list(range(1, last + 1))
    for step in range(1, last + 1):
        assert after[step] == before[step], step
    for step in (4, 6):
        one = load_file(folder / f"step-{step:06d}.1" / "model" / "model.safetensors")
        two = load_file(folder / f"step-{step:06d}.2" / "model" / "model.safetensors")
        assert all(equal(one[name], two[name]) for name in one), step
    books_balance(third, steps=last)
    assert third.summary()["steps"] == last and third.summary()["max_logprob_diff"] < 1e-4
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert (third.folder / "last" / "config.json").is_file()
    assert_nothing_left(third)


@pytest.mark.long
def test_steps_with_stored_groups_are_made_again_with_the_same_bits(tmp_path: Path) -> None:
    knobs = (
        "run.checkpoints.every=1",
        "run.checkpoints.keep=50",
        "buffer.replay.share=0.5",
        "buffer.replay.only=all",
        *SMALL,
    )
    first = start(tmp_path, "run.steps=40", *knobs)
    first.wait_for_step(6)
    first.kill()
    before, last = lines(first), max(lines(first))
    folder = first.folder / "checkpoints"
    second = start(tmp_path, "run.steps=40", *knobs, resume=str(folder / "step-000002"))
    until = time.monotonic() + PATIENCE_S
    while not (folder / "step-000003.1").is_dir():  # killed on the way to where it was
        assert second.process.poll() is None and time.monotonic() < until, "step 3 was not made again"
        time.sleep(0.05)
    second.kill()
    third = start(tmp_path, f"run.steps={last}", *knobs, resume=str(folder / "step-000002"))
    code, output = third.wait()
    assert code == 0, output
    after = lines(third)
    for step in range(1, last + 1):
        assert after[step] == before[step], step
        assert after[step]["replay/groups"] == (2.0 if step > 1 else 0.0), step
    for step in range(3, last):
        one = load_file(folder / f"step-{step:06d}" / "model" / "model.safetensors")
        two = load_file(folder / f"step-{step:06d}.2" / "model" / "model.safetensors")
        assert all(equal(one[name], two[name]) for name in one), step
    with closing(read_database(third.folder / "ledger.sqlite")) as db:
        joined = (
            "SELECT group_id FROM joined JOIN step USING (lease_id) WHERE lineage = ? AND step = ? ORDER BY group_id"
        )
        for step in range(3, last + 1):
            stored = [db.execute(joined, (lineage, step)).fetchall() for lineage in (0, 2)]
            assert stored[0] == stored[1] and len(stored[0]) == 2, step
        assert findings(db) == []
    assert third.summary()["max_logprob_diff"] < 1e-4
    assert_nothing_left(third)
