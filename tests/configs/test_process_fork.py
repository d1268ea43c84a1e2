"""Rules of configs/child_processes.py: a server is forked whatever the name of the folder for temporary files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, socket
from configs.child_processes import fork_server, leave

def serve(listener, alive):
    listener.accept()[0].sendall(b"here")

server = fork_server(serve)
with socket.socket(socket.AF_UNIX) as client:
    client.connect(server.address)
    print(client.recv(4).decode(), server.address)
os.waitpid(server.pid, 0)
leave(0)
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
