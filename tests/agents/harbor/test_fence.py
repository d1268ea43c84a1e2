"""Rules of rooms (agents/fence.py): a room has its own files and processes, reads the machine's programs, ends with its holder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from agents.fence import OWN, VARIABLES
from configs.child_processes import ROOT
from tests.support.processes.child_process import gone

FENCE = [sys.executable, "-S", "-m", "agents.fence"]
OURS = {"PYTHONPATH": str(ROOT)}


def can_make_rooms() -> bool:
    done = subprocess.run(["unshare", "--user", "--mount", "true"], capture_output=True, check=False)
    return done.returncode == 0


pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not can_make_rooms(), reason="this kernel lets nobody make user namespaces"
)


class Room:
    """A room that is held, and what runs in it."""

    def __init__(self, holder: subprocess.Popen[str], folder: Path) -> None:
        self.holder, self.folder = holder, folder
        assert holder.stdout is not None
        word, self.pid = holder.stdout.readline().split()
        assert word == "ready"

    def run(self, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A line of shell, in /app."""
        given = {**OURS, VARIABLES: json.dumps({"PATH": os.defpath, **variables})}
        words = [*FENCE, "enter", self.pid, "/app", "/bin/sh", "-c", line]
        return subprocess.run(words, env=given, capture_output=True, text=True, check=False)


@contextmanager
def room(folder: Path, **spec: Any) -> Iterator[Room]:
    folder.mkdir(exist_ok=True)
    words = [*FENCE, "hold", str(folder), json.dumps({"network": True, "mounts": [], **spec})]
    with subprocess.Popen(words, env=OURS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            yield Room(holder, folder)
        finally:
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait()


def test_a_room_has_files_of_its_own_and_the_machines_programs(tmp_path: Path) -> None:
    with room(tmp_path / "room") as made:
        assert made.run("id -u; pwd; echo hello > file; exit 7").returncode == 7
        assert (tmp_path / "room" / "app" / "file").read_text() == "hello\n"
        seen = made.run("ls /").stdout.split()
        assert {name.split("/")[0] for name in OWN} <= set(seen) and "usr" in seen
        assert not {Path(str(tmp_path)).parts[1]} - {"tmp"} & set(seen), "the machine's other folders are not there"
        assert made.run(f"ls {tmp_path}").returncode != 0
        refused = made.run("touch /usr/file; mount -o remount,rw /usr; mount -t tmpfs none /app")
        assert refused.returncode != 0 and not Path("/usr/file").exists()
        assert made.run("grep CapBnd /proc/self/status").stdout.split()[-1] == "0" * 16


def test_a_command_has_the_variables_that_it_is_given_and_no_others(tmp_path: Path) -> None:
    with room(tmp_path / "room") as made:
        assert set(made.run("env", MINE="1").stdout.split()) >= {"MINE=1"}
        assert "PYTHONPATH" not in made.run("env").stdout
        assert "ROOM_VARIABLES" not in made.run("cat /proc/1/environ").stdout


def test_no_process_of_the_machine_is_seen_and_none_of_a_room_outlives_it(tmp_path: Path) -> None:
    long = f"{10_000 + os.getpid()}.5"
    with room(tmp_path / "room") as made:
        seen = made.run("ls -d /proc/[0-9]*").stdout.split()
        assert len(seen) <= 4, "the room's first process, its shell, and ls"
        made.run(f"setsid sleep {long} > /dev/null 2>&1 & sleep 0.2")
        (sleeping,) = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if sleeps(path, long)]
    assert gone(int(sleeping)) and gone(int(made.pid))


def sleeps(path: Path, long: str) -> bool:
    with suppress(OSError):
        return path.read_bytes() == f"sleep\0{long}\0".encode()
    return False


def test_a_room_leaves_nothing_on_disk_unless_it_is_kept(tmp_path: Path) -> None:
    with room(tmp_path / "gone") as made:
        made.run("echo hello > file")
    with room(tmp_path / "kept") as made:
        made.run("echo hello > file")
        assert made.holder.stdin is not None
        made.holder.stdin.write("keep\n")
    assert not (tmp_path / "gone").exists() and (tmp_path / "kept" / "app" / "file").exists()


def test_mounts_are_shown_at_their_place(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    mounts = [{"source": str(tmp_path / "logs"), "target": "/logs/agent"}]
    with room(tmp_path / "room", mounts=mounts) as made:
        made.run("echo said > /logs/agent/log")
    assert (tmp_path / "logs" / "log").read_text() == "said\n"


def test_a_room_without_network_has_none(tmp_path: Path) -> None:
    with room(tmp_path / "room", network=False) as made:
        assert len(made.run("cat /proc/net/dev").stdout.splitlines()) <= 3  # two lines of titles, and lo


def test_what_cannot_be_made_is_told(tmp_path: Path) -> None:
    spec = json.dumps({"network": True, "mounts": [{"source": "/no/such/folder", "target": "/x"}]})
    words = [*FENCE, "hold", str(tmp_path), spec]
    done = subprocess.run(words, env=OURS, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "does not let this process show /no/such/folder" in done.stderr
