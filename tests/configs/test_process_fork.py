"""Rules of configs/fork_server.py: a server is forked whatever the name of the folder for temporary files."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from configs.fork_server import ending_with_us

PROGRAM = """
import sys
from multiprocessing import forkserver
from configs import fork_server
from configs.child_processes import leave

fork_server.start()
process = fork_server.own_context().Process(target=print, args=("here", forkserver._forkserver._forkserver_address))
process.start()
process.join()
leave(process.exitcode)
"""


@pytest.mark.parametrize("name", ["short", "d" * 90, "ü" * 50])
def test_a_long_folder_for_temporary_files_is_not_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path / name)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    word, address = ended.stdout.split()
    assert word == "here" and not Path(address).parent.exists(), "it is removed at the end"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ctrl_c_of_the_terminal_does_not_reach_what_is_started(tmp_path: Path, method: str) -> None:
    context = ending_with_us(multiprocessing.get_context(method), [])
    process = context.Process(target=subprocess.run, args=(["cp", "/proc/self/status", str(tmp_path / "status")],))
    process.start()
    process.join()
    lines = dict(line.split(":\t", 1) for line in (tmp_path / "status").read_text().splitlines() if ":\t" in line)
    blocked = int(lines["SigBlk"], 16)
    assert blocked & 1 << (signal.SIGINT - 1)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


STACKS = """
import os, signal, time
from configs import fork_server

fork_server.start()
process = fork_server.own_context().Process(target=time.sleep, args=(3600.0,))
process.start()
caught = lambda: int(open(f"/proc/{process.pid}/status").read().partition("SigCgt:")[2].split()[0], 16)
while not caught() & 1 << (signal.SIGUSR1 - 1):
    time.sleep(0.01)
os.kill(process.pid, signal.SIGUSR1)
process.join(1.0)
print(process.exitcode)
process.kill()
"""


def test_a_child_writes_its_stacks_on_sigusr1_and_goes_on() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STACKS], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert ended.stdout == "None\n", ended.stderr
    assert "most recent call first" in ended.stderr and "Thread 0x" in ended.stderr
