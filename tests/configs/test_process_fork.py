"""Rules of configs/fork_server.py: a server is forked whatever the name of the folder for temporary files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
