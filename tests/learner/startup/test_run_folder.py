"""Rules of learner/startup/run_folder.py: a living run keeps what is found by its folder's path, and only runs are moved aside."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from buffers.errors import UnderstudyError
from configs.load import ConfigError, load_config
from learner.run import check_inputs
from learner.startup.run_folder import claimed
from tests.support.faults.disks import FAULTS, NEEDS_ROOT, small_disk

OTHER = """
import os, sys, time
from pathlib import Path
from learner.startup.run_folder import claimed
with claimed(Path(sys.argv[1]), resume="auto"):
    if os.fork() == 0:
        os.close(1)
        time.sleep(600)
    print("claimed", flush=True)
    sys.stdin.read()
"""


@contextmanager
def living_run(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has this folder, with a child that outlives it."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder)],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "claimed\n"
        try:
            yield process
        finally:
            subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=True)


def earlier_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.yaml", "ledger.sqlite", "log.txt"):
        (folder / name).write_text("earlier")
    return folder


@pytest.mark.parametrize("resume", ["", "auto"])
def test_a_living_run_keeps_its_folder_and_its_killer_may_have_it(tmp_path: Path, resume: str) -> None:
    folder = earlier_run(tmp_path / "same")
    config = load_config(overrides=[f"run.dir={tmp_path}", "run.name=same"])
    with living_run(folder) as process:
        for begin in (lambda: check_inputs(config, resume=resume), lambda: claimed(folder, resume=resume).__enter__()):
            with pytest.raises(UnderstudyError) as refused:
                begin()
            assert "run.name" in str(refused.value) and f"{folder} (process {process.pid} on " in str(refused.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".same.lock", "same"]
        process.kill()
        process.wait()
        with claimed(folder, resume=resume) as (again, _):
            assert again == (resume == "auto")
        assert (folder / "log.txt").exists() == again


def test_a_living_run_is_found_by_another_name_of_its_folder(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "runs" / "same")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "link").symlink_to(folder)
    config = load_config(overrides=[f"run.dir={tmp_path / 'others'}", "run.name=link"])
    with living_run(folder), pytest.raises(UnderstudyError, match="run that lives"):
        check_inputs(config, resume="")


@pytest.mark.parametrize("files", [["tasks.parquet"], ["agent.py", "config.yaml"]])
def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, files: list[str]) -> None:
    (tmp_path / "data").mkdir()
    for name in files:
        (tmp_path / "data" / name).touch()
    config = load_config(overrides=[f"run.dir={tmp_path}", "run.name=data"])
    for resume in ("", "auto"):
        with pytest.raises(UnderstudyError, match=f"got {tmp_path / 'data'}, which is no run"):
            check_inputs(config, resume=resume)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == files


def test_an_earlier_run_is_moved_aside_and_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, number in ((earlier_run(tmp_path / "same"), 2), (tmp_path / "empty", 1)):
        check_inputs(load_config(overrides=[f"run.dir={tmp_path}", f"run.name={folder.name}"]), resume="")
        with claimed(folder) as (again, checkpoint):
            assert not again and checkpoint is None and not list(folder.iterdir())
        assert len(list(tmp_path.glob(f"{folder.name}*"))) == number


@pytest.mark.parametrize("name", [".", "..", "../x", "a/b", "n" * 300, "ü" * 101, '"a\\nb"', '"\\e[2J"'])
def test_a_name_that_is_no_folder_of_its_own_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(overrides=[f"run.name={name}"])
    assert str(refused.value).startswith("run.name must be the name of a folder") and "\n" not in str(refused.value)


@NEEDS_ROOT
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_and_a_resume_on_a_disk_that_takes_nothing_are_refused_in_one_line(tmp_path: Path, fault: str) -> None:
    with small_disk(tmp_path / "disk") as disk:
        folder = disk.folder / "run"
        with claimed(folder):
            (folder / "config.yaml").touch()
            (folder / "ledger.sqlite").touch()
        disk.refuse(fault)
        for name, resume in (("run", "auto"), ("other", "")):
            with pytest.raises(UnderstudyError) as refused, claimed(disk.folder / name, resume=resume):
                pass
            assert str(refused.value) == (
                f"run.dir must be on a disk that takes files, got {disk.folder}: No space left on device; free space there, "
                f"then run the same command again"
            )
        disk.take()
        with claimed(folder, resume="auto") as (again, _):
            assert again
        assert sorted(path.name for path in disk.folder.iterdir())[-1] == "run", "nothing was moved aside"


@pytest.mark.parametrize(
    "place",
    ["log.txt", "metrics.jsonl", "tokens", "checkpoints/step-000002/model/config.json", "agents/lane-0/log.txt"],
)
def test_a_resume_does_not_write_through_a_link_out_of_its_folder(tmp_path: Path, place: str) -> None:
    folder, mine = earlier_run(tmp_path / "sent"), tmp_path / "mine"
    (mine.mkdir if place == "tokens" else mine.touch)()
    link = folder / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(mine)
    with pytest.raises(UnderstudyError, match=rf"got {link}, a link to {mine};"), claimed(folder, resume="auto"):
        pass
    with claimed(folder, resume="") as (again, _):  # a new run of that name moves it aside
        assert not again and list(folder.iterdir()) == []


def test_links_within_a_run_and_checkpoints_on_another_disk_are_resumed(tmp_path: Path) -> None:
    folder, disk = earlier_run(tmp_path / "mine"), tmp_path / "disk"
    (disk / "step-000002").mkdir(parents=True)
    (folder / "checkpoints").symlink_to(disk)
    (folder / "last").symlink_to("checkpoints/step-000002")
    (folder / "latest").symlink_to("log.txt")
    (folder / "model").mkdir()
    (folder / "model" / "tokenizer.json").symlink_to("/elsewhere/tokenizer.json")
    with claimed(folder, resume="auto") as (again, _):
        assert again
