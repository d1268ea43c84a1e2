"""Rules of learner/checkpoints/store.py, and of finding what to resume: complete or not there, the newest and the best
kept."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buffers.records import Position
from learner.checkpoints.store import Checkpoint, CheckpointError, CheckpointStore, read_checkpoint
from learner.startup.run_folder import find_resume
from tests.support.processes.child_process import child_process

ROOT = Path(__file__).parents[3]


def position(step: int, *, lineage: int = 0) -> Position:
    return Position(run_id="r", lineage=lineage, step=step)


def save(store: CheckpointStore, step: int, *, lineage: int = 0, score: float | None = None) -> Checkpoint:
    scratch = store.scratch(step)
    (scratch / "model").mkdir()
    (scratch / "model" / "weights").write_text(f"{lineage}:{step}")
    return store.commit(scratch, position=position(step, lineage=lineage), score=score)


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_the_newest_and_the_best_are_kept_and_links_show_them(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3), (5, 0.4)):
        save(store, step, score=score)
        assert (tmp_path / "last" / "weights").read_text() == f"0:{step}"
        assert (tmp_path / "best" / "weights").read_text() == f"0:{min(step, 2)}"
    assert names(store) == ["step-000002", "step-000004", "step-000005"]
    newest = store.newest()
    assert newest is not None and newest.position == position(5)


def test_what_a_crash_left_is_no_checkpoint_and_is_removed_with_the_next_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    save(store, 1)
    (store.scratch(2) / "model").mkdir()  # killed while it was written
    half = store.folder / "step-000009"
    half.mkdir()  # not by us: no record in it
    newest = store.newest()
    assert newest is not None and newest.position.step == 1
    save(store, 3)
    assert names(store) == ["step-000001", "step-000003", "step-000009"]


def test_a_later_lineage_is_newer_whatever_its_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=5)
    save(store, 8)
    save(store, 4)
    again = save(store, 4, lineage=1)
    assert names(store) == ["step-000004", "step-000004.1", "step-000008"]
    assert store.newest() == again
    assert (store.folder / "step-000004" / "model" / "weights").read_text() == "0:4"


def test_saving_where_the_run_was_resumed_changes_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    first = save(store, 4, score=0.5)
    assert save(store, 4, score=0.7) == first
    assert names(store) == ["step-000004"]


def test_a_folder_that_is_no_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(CheckpointError, match="--resume must be `auto` or name a complete checkpoint") as refusal:
            read_checkpoint(folder)
        assert str(folder) in str(refusal.value) and "\n" not in str(refusal.value)
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    record = save(store, 1).folder / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="not of format 1"):
        read_checkpoint(record.parent)


def test_what_is_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert find_resume(run, resume="") == (False, None)
    assert find_resume(run, resume="auto") == (False, None)  # nothing yet: a fresh run
    run.mkdir()
    (run / "ledger.sqlite").touch()
    assert find_resume(run, resume="") == (False, None)
    assert find_resume(run, resume="auto") == (True, None)  # killed before its first checkpoint
    store = CheckpointStore(run / "checkpoints", keep=5)
    first, second = save(store, 2), save(store, 4)
    assert find_resume(run, resume="auto") == (True, second)
    assert find_resume(run, resume=str(first.folder)) == (True, first)
    (run / "ledger.sqlite").unlink()
    with pytest.raises(CheckpointError, match="needs the ledger"):
        find_resume(run, resume=str(first.folder))
    with pytest.raises(CheckpointError, match="must name a checkpoint of this run"):
        find_resume(tmp_path / "other", resume=str(first.folder))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the store asks of the disk, in order: (call, name of the file or folder)."""
    calls: list[tuple[str, str]] = []

    def fsync(descriptor: int) -> None:
        calls.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))

    def noted(name: str, call: Any) -> Any:
        def instead(self: Path, *arguments: Any) -> Any:
            calls.append((name, self.name))
            return call(self, *arguments)

        return instead

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, noted(name, getattr(Path, name)))
    return calls


def test_a_checkpoint_is_on_disk_before_it_has_its_name_and_has_its_name_before_it_is_pointed_to(
    tmp_path: Path, told: list[tuple[str, str]]
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    save(store, 1)
    scratch = ".step-000001.tmp"
    assert sorted(told[:4]) == sorted([("flush", name) for name in ("weights", "model", "run.json", scratch)])
    assert told[3] == ("flush", scratch), "the folder after what is in it"
    assert told[4:] == [("rename", scratch), ("flush", "checkpoints"), ("replace", ".last.new")]


def test_a_checkpoint_that_is_removed_has_lost_its_name_first(
    tmp_path: Path, told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    save(store, 1)
    told.clear()

    def interrupted(folder: Path, **_: Any) -> None:
        if Path(folder).exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.commit(filled(store, 2), position=position(2), score=None)
    assert told[-1] == ("rename", "step-000001")
    assert names(store) == [".step-000001.old", "step-000002"]
    assert [one.position.step for one in store.all()] == [2]


def filled(store: CheckpointStore, step: int) -> Path:
    folder = store.folder / f".step-{step:06d}.tmp"
    (folder / "model").mkdir(parents=True)
    return folder


def test_a_scratch_folder_is_empty_whatever_a_crash_left_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    (store.scratch(1) / "half").write_text("written")
    assert list(store.scratch(1).iterdir()) == []


SAVER = """
import sys
from dataclasses import replace
from pathlib import Path
from buffers.records import Position
from learner.checkpoints.store import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]), keep=2)
step = int(sys.argv[2])
while True:
    step += 1
    scratch = store.scratch(step)
    for name in ("learner", "model"):
        (scratch / name).mkdir()
        for part in range(4):
            (scratch / name / str(part)).write_text(str(step) * 1000)
    store.commit(scratch, position=Position(run_id="r", lineage=0, step=step), score=float(step % 7))
    print(step, flush=True)
"""


@pytest.mark.slow
def test_whenever_the_process_is_killed_the_newest_checkpoint_is_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    step = 0
    for patience_s in (0.0, 0.001, 0.002, 0.003, 0.005, 0.008):
        command = [sys.executable, "-c", SAVER, str(store.folder), str(step)]
        with child_process(command, env={"PYTHONPATH": str(ROOT)}) as process:
            assert process.stdout is not None
            for _ in range(5):
                step = int(process.stdout.readline())
            time.sleep(patience_s)  # somewhere in the middle of the next one
            process.kill()
            for line in process.stdout:  # told before the kill, read after it
                step = int(line) if line.endswith("\n") else step
        newest = store.newest()
        assert newest is not None and newest.position.step >= step
        for one in store.all():
            parts = [one.folder / name / str(part) for name in ("learner", "model") for part in range(4)]
            assert all(part.read_text() == str(one.position.step) * 1000 for part in parts)
        assert (tmp_path / "last" / "0").is_file()
        step = newest.position.step


def test_weights_that_are_validated_after_they_were_saved_are_kept_by_that(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    good = save(store, step=1, score=None)
    assert not (tmp_path / "best").exists()
    store.scratch(2)  # the next one is being written
    assert store.rescore(good, 0.5).score == 0.5 and read_checkpoint(good.folder).score == 0.5
    assert (tmp_path / "best" / "weights").read_text() == "0:1" and (store.folder / ".step-000002.tmp").is_dir()
    save(store, step=2, score=0.25)
    save(store, step=3, score=None)
    assert [saved.position.step for saved in store.all()] == [1, 3]
    gone = replace(good, folder=tmp_path / "checkpoints" / "step-000009")
    assert store.rescore(gone, 1.0) == gone, "it was not kept"
