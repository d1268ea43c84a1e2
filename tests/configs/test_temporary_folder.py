"""Rules of `configs.child_processes`: what a process and all that it starts leave in the folder for temporary files
goes with it, or with the next process where it was killed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from configs.child_processes import (
    MAX_CHARS,
    PREFIX,
    goes_with_this_process,
    own_temporary_folder,
    remove_left_behind,
    socket_folder,
    to_remove,
)
from tests.support.processes.child_process import child_process, gone

ROOT = Path(__file__).parents[2]
ENTERED = """
import os, sys, tempfile
from configs.child_processes import own_temporary_folder
with own_temporary_folder():
    if sys.argv[1:] == ["fork"] and os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
    if sys.argv[1:] == ["program"]:
        import subprocess
        program = "import sys, time; print(); sys.stdout.flush(); time.sleep(600)"
        left = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE)
        left.stdout.readline()
        print(left.pid)
    print(tempfile.gettempdir(), flush=True)
    sys.stdin.read() if sys.argv[1:] != ["fork"] else os.kill(os.getpid(), 9)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of a process that has none of its own yet."""
    monkeypatch.setattr("configs.child_processes._removed", {})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_files_of_this_process_and_of_those_that_it_starts_go_at_the_end(place: Path) -> None:
    with own_temporary_folder():
        folder = Path(tempfile.gettempdir())
        assert folder.parent == place and stat.S_IMODE(folder.stat().st_mode) == 0o700
        write = "import tempfile; tempfile.mkstemp(prefix='of_a_child_'); tempfile.mkdtemp(prefix='pymp-')"
        subprocess.run([sys.executable, "-c", write], check=True)
        assert {path.name[:5] for path in folder.iterdir()} == {"of_a_", "pymp-"}
        assert folder in to_remove()
    assert list(place.iterdir()) == [] and to_remove() == []
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(place)


def test_a_folder_that_is_too_deep_for_sockets_has_a_short_one_beside_it_that_goes_too(place: Path) -> None:
    assert len(str(place)) > MAX_CHARS and socket_folder(MAX_CHARS) == "/tmp"
    with own_temporary_folder():
        sockets = Path(socket_folder(MAX_CHARS))
        assert sockets.parent == Path("/tmp") and sockets.name.startswith(PREFIX)
        assert socket_folder(200) == os.path.realpath(tempfile.gettempdir())
        assert {sockets, Path(tempfile.gettempdir())} == set(to_remove())
    assert not sockets.exists()


def test_the_limit_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/dev/shm")
    assert socket_folder(8) == "/dev/shm" and socket_folder(7) == "/tmp"


def test_a_fork_removes_nothing_of_the_process_that_it_was_forked_of(place: Path) -> None:
    with own_temporary_folder():
        goes_with_this_process(place / "of this one")
        if (pid := os.fork()) == 0:
            os._exit(len(to_remove()))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and place / "of this one" in to_remove()


@pytest.mark.parametrize("how", ["", "fork"])
def test_what_a_killed_process_left_is_removed_by_the_next_one_and_what_is_in_use_is_not(place: Path, how: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ENTERED, *filter(None, [how])]
    with child_process(command, stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdin is not None
        left = Path(process.stdout.readline().strip())
        assert left.parent == place
        if how == "fork":  # it has killed itself; its fork lives on, and may use what is there
            assert gone(process.pid)
        remove_left_behind(place)
        assert left.is_dir()
        if how == "fork":
            process.stdin.close()
            process.stdout.read()
        else:
            process.kill()
            assert gone(process.pid)
        with own_temporary_folder():
            assert not left.exists()


def test_a_program_that_a_killed_process_left_is_ended_by_the_next_one(place: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with child_process([sys.executable, "-c", ENTERED, "program"], stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        program, left = int(process.stdout.readline()), Path(process.stdout.readline().strip())
        remove_left_behind(place)
        assert left.is_dir() and not gone(program, within_s=0.0), "of a process that lives"
        process.kill()
        assert gone(process.pid) and not gone(program, within_s=0.0)
        with own_temporary_folder():
            assert gone(program) and not left.exists()
