"""A whole run beside a neighbour who means harm: what an agent is given, and what another user's bytes do to each port."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from configs.child_processes import PREFIX
from tests.project.test_resume import SMALL
from tests.support.run_parts import LOOPBACK, MARK, Run, assert_nothing_left, start

pytestmark = [pytest.mark.slow, pytest.mark.engine]

ROOT = Path(__file__).parents[2]
AGENT = """
import os, runpy, sys
open("seen", "w").write("\\n".join(sorted(os.environ)))
runpy.run_path(sys.argv[1], run_name="__main__")
"""
THROW = """
import os, random, socket, struct, sys
from contextlib import suppress
"".encode("idna")
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
store = b"\\0\\xce\\xf7\\x85\\x3c"  # torch's: how its clients begin
garbage = [
    b"", b"\\xff" * 4096, b"\\0" * 4096, random.Random(0).randbytes(4096), b"[" * 60_000 + b"\\n", b"x" * 100_000,
    b"GET / HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 99999999999\\r\\n\\r\\n",
    b"POST /get_or_create_runtime_env HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 4\\r\\n\\r\\n\\x0a\\xff\\xff\\xff",
    b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + b"\\xff" * 4000,
    b"\\xff" + b"\\0" * 8 + b"\\x01\\x7f\\x03\\x01NULL" + b"\\0" * 48,  # ZMQ's greeting
    store + b"\\x01" + struct.pack("<Q", 2**62), store + b"\\x0a" + struct.pack("<Q", 2**60),
]
held, reached = [], set()
for port in map(int, sys.argv[1:]):
    for words in garbage:
        with suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", port), timeout=600)
            held.append(sock)
            reached.add(port)
            sock.sendall(words)
print(*sorted(reached), flush=True)
sys.stdin.read()
"""


def temporary_folder(run: Run) -> Path:
    """The one that goes with it, as its programs know it."""
    for line in run.processes():
        with suppress(OSError):
            for entry in Path(f"/proc/{line.split()[0]}/environ").read_text().split("\0"):
                if entry.startswith("TMPDIR=") and (folder := Path(entry.partition("=")[2])).name.startswith(PREFIX):
                    return folder
    raise AssertionError("no process of the run has its folder for temporary files")


def listening(run: Run) -> dict[int, str]:
    """Port -> address, of all its processes."""
    found = {}
    for line in run.processes():
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(int(line.split()[0])).net_connections(kind="inet"):
                if one.status == psutil.CONN_LISTEN:
                    found[one.laddr.port] = one.laddr.ip
    return found


@pytest.mark.long
def test_a_run_goes_on_among_neighbours_and_its_agents_are_given_no_keys_of_the_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "JUDGE_URL"):
        monkeypatch.setenv(name, "a secret")
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    run = start(
        tmp_path, "run.steps=6", *SMALL, "learner.ranks=2", f"agents.environment=[{MARK}, JUDGE_URL]",
        f"agents.command=['{{python}}', '{agent}', '{ROOT / 'agents/examples/walk_agent.py'}']",
    )  # fmt: skip
    run.wait_for_step(1)
    ports, folder = listening(run), temporary_folder(run)
    assert len(ports) > 4 and set(ports.values()) <= LOOPBACK
    command = [sys.executable, "-c", THROW, *map(str, ports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as neighbour:
        assert neighbour.stdout is not None and neighbour.stdin is not None
        assert len(neighbour.stdout.readline().split()) == len(ports)
        run.wait_for_step(3)  # with all those connections held open
        neighbour.stdin.close()
    code, output = run.wait()
    assert code == 0, output
    assert run.summary()["steps"] == 6
    seen = set((run.folder / "agents" / "agent-0" / "seen").read_text().splitlines())
    assert {"JUDGE_URL", "PATH", "OPENAI_API_KEY"} <= seen
    assert not {name for name in seen if "TOKEN" in name or name.startswith(("RAY_", "WANDB_", "PYTHONPATH"))}
    assert_nothing_left(run)
    assert not folder.exists()


@pytest.mark.long
def test_a_run_that_was_killed_leaves_no_files_behind_once_it_has_gone_on(tmp_path: Path) -> None:
    first = start(tmp_path, "run.steps=3", "run.checkpoints.every=1", *SMALL, resume="auto")
    first.wait_for_step(1)
    left = temporary_folder(first)
    first.kill()
    assert left.is_dir() and os.stat(left).st_mode & 0o777 == 0o700
    second = start(tmp_path, "run.steps=3", "run.checkpoints.every=1", *SMALL, resume="auto")
    code, output = second.wait()
    assert code == 0, output
    assert not left.exists()
    assert_nothing_left(second)
