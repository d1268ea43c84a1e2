"""A run whose whole disk is full: it waits, with its agents, and goes on by itself; a resume there is told in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from buffers.ledger.doctor import findings
from buffers.ledger.schema import read_database
from tests.faults.disk_faults import ROOT, started
from tests.support.faults.disks import FAULTS, NEEDS_ROOT, small_disk
from tests.support.patience import PATIENCE_S

HELD_S = 8.0


@NEEDS_ROOT
@pytest.mark.long(minutes=3)
def test_a_run_goes_on_after_its_disk_was_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size="300m", inodes=5000) as disk:
        with started(disk.folder, {}, "run.steps=100000") as run:
            assert run.wait_for_step(3), run.lines
            for fault in FAULTS:
                read = len(run.lines)
                disk.refuse(fault)
                until = time.monotonic() + PATIENCE_S
                while not any("waits" in line for line in run.lines[read:]) and time.monotonic() < until:
                    time.sleep(0.1)
                time.sleep(HELD_S)
                at = run.step()
                assert run.process.poll() is None, run.lines
                disk.take()
                assert run.wait_for_step(at + 5), run.lines
        assert run.process.returncode == 130 and not any("Traceback" in line for line in run.lines), run.lines
        disk.refuse(FAULTS[0])
        command = [sys.executable, "-m", "learner.cli", "resume", str(run.place)]
        refused = subprocess.run(
            command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        told = refused.stdout + refused.stderr
        assert refused.returncode != 0 and "Traceback" not in told and len(told.strip().splitlines()) <= 3, told
        disk.take()
        steps = run.step()
        with started(disk.folder, {}, "run.steps=100000", "--resume", "auto") as again:
            assert again.wait_for_step(steps + 3), again.lines
        with closing(read_database(run.place / "ledger.sqlite")) as db:
            assert findings(db) == []
            numbers = [step for (step,) in db.execute("SELECT step FROM step ORDER BY step")]
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= steps + 3
