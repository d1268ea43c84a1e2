"""Code that a model wrote, in the shipped sandbox: what it may not do, what it may, and what is left of it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agents import fence
from agents.tools.sandbox.sandbox import SYSTEM, ChildLimits, ChildSandbox, SandboxResult
from agents.tools.shipped.python import PythonTool
from agents.tools.toolbox import Toolbox
from buffers.errors import ToolError

ATTEMPTS = """
import ctypes, json, os, resource, socket, subprocess, sys, tempfile
outside, parent = {outside!r}, {parent}
attempts = dict(
    read=lambda: open(outside).read(),
    write=lambda: open(outside, "w"),
    truncate=lambda: os.truncate(outside, 0),
    remove=lambda: os.unlink(outside),
    through_a_link=lambda: (os.symlink(outside, "link"), open("link").read()),
    create=lambda: open(outside + ".new", "w"),
    rights=lambda: os.chmod(outside, 0o777),
    times=lambda: os.utime(outside, (0, 0)),
    attributes=lambda: os.setxattr(outside, "user.understudy", b"1"),
    shared_memory=lambda: open("/dev/shm/understudy-test", "w"),
    own_program=lambda: open("../program.py", "a"),
    environment_of_the_run=lambda: open(f"/proc/{{parent}}/environ").read(),
    internet=lambda: socket.create_connection(("127.0.0.1", {port})),
    unix_socket=lambda: socket.socket(socket.AF_UNIX),
    fork=os.fork,
    program=lambda: subprocess.run(["true"]),
    signal=lambda: os.kill(parent, 0),
    priority=lambda: os.setpriority(os.PRIO_PROCESS, parent, 19),
    limits_of_the_run=lambda: resource.prlimit(parent, resource.RLIMIT_NOFILE),
    memory=lambda: bytearray(2 << 30),
    more_memory=lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)),
    large_file=lambda: open("large", "wb").write(b"x" * (17 << 20)),
    large_disk=lambda: [open(f"part{{n}}", "wb").write(b"x" * (1 << 20)) for n in range(20)],
)
refused = dict()
for name, attempt in attempts.items():
    try:
        attempt()
    except (OSError, MemoryError, ValueError) as error:
        refused[name] = type(error).__name__
libc = ctypes.CDLL(None)
refused["namespace"] = libc.unshare(0x10000000)
refused["mount"] = libc.mount(b"none", b".", b"tmpfs", 0, None)
print(json.dumps(refused))
"""
WORKS = """
import asyncio, os, sys, tempfile, threading
import numpy
print(os.listdir("."), sorted(os.environ))
with tempfile.TemporaryFile() as file:
    file.write(b"x" * 1000)
thread = threading.Thread(target=lambda: print("thread"))
thread.start(); thread.join()
asyncio.run(asyncio.sleep(0, print("loop")))
print(numpy.eye(2).trace(), "é")
print("to stderr", file=sys.stderr)
"""

INNER = """
import os
try:
    os.chmod(".", 0o777)
except PermissionError:
    print("refused")
open("large", "wb").write(b"x" * (3 << 20))
"""


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where the sandbox makes its folders."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


async def test_code_reaches_nothing_outside_its_folder(tmp_path):
    sandbox = ChildSandbox()
    granted = await sandbox.capabilities()
    if missing := [name for name, held in granted.items() if not held and name != "disk"]:
        pytest.skip(f"this kernel does not keep code from {missing}; the tool refuses to run any")
    outside = tmp_path / "secret.txt"
    outside.write_text("secret")
    listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    code = ATTEMPTS.format(outside=str(outside), parent=os.getpid(), port=port)
    result = await sandbox.run(code, deadline_s=30)
    listener.close()
    assert result.exit_code == 0, result.output
    refused = json.loads(result.output)
    names = [
        line.split("=")[0].strip() for line in ATTEMPTS.splitlines() if line.startswith("    ") and "=lambda" in line
    ]
    possible = set() if granted["disk"] else {"large_disk"}
    assert {"fork", *names} - set(refused) == possible
    assert refused["namespace"] == refused["mount"] == -1
    assert outside.read_text() == "secret" and not Path(f"{outside}.new").exists()


async def test_ordinary_code_works_and_nothing_is_left_of_it(scratch):
    result = await ChildSandbox().run(WORKS, deadline_s=30)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "[] ['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'TMPDIR']",
        "thread",
        "loop",
        "2.0 é",
        "to stderr",
    ]
    assert list(scratch.iterdir()) == []


@pytest.mark.seconds
async def test_code_ends_at_its_deadline_and_keeps_what_it_printed(scratch):
    sandbox = ChildSandbox(concurrency=2)
    for deadline_s in (4.0, 16.0, 64.0):  # Python has to start within it
        wait, spin = await asyncio.gather(
            sandbox.run("import time; print('begun'); time.sleep(600)", deadline_s=deadline_s),
            sandbox.run("while True: pass", deadline_s=1.0),
        )
        assert (wait.late, wait.exit_code) == (True, None) and spin.late
        if wait.output:
            break
    assert wait.output == "begun\n"
    assert list(scratch.iterdir()) == []


async def test_a_flood_of_output_ends_the_code_and_stays_out_of_memory():
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sandbox = ChildSandbox(ChildLimits(output_bytes=1000))
    flood = "import sys\nfor _ in range(100): sys.stdout.write('x' * 1_000_000)\nopen('done', 'w')"
    result = await sandbox.run(flood, deadline_s=30)
    assert result.cut and result.exit_code is None and result.output == "x" * 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 20_000


class Watched(ChildSandbox):
    """Says when the code's process has started."""

    pid: asyncio.Future[int]

    @asynccontextmanager
    async def _child(self, folder, **how):
        async with super()._child(folder, **how) as (child, stdout):
            if not how["probe"]:
                self.pid.set_result(child.pid)
            yield child, stdout


async def test_a_cancelled_call_ends_its_code(scratch):
    sandbox = Watched()
    sandbox.pid = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(sandbox.run("import time; time.sleep(600)", deadline_s=600))
    pid = await sandbox.pid
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list(scratch.iterdir()) == []


async def test_the_tool_answers_what_was_printed_and_how_it_ended():
    async with Toolbox([PythonTool({"type": "native", "concurrency": 2})]).open() as tools:
        programs = [
            "print(6 * 7)",
            "x = 1",
            "def f():\n    return 1 / 0\nf()",
            "import sys; sys.exit(3)",
            "import os; os.abort()",
        ]
        outcomes = await asyncio.gather(*(tools.call("python", {"code": code}) for code in programs))
    assert all(outcome.ok for outcome in outcomes)
    texts = [outcome.text for outcome in outcomes]
    assert texts[:2] == ["42", "(no output; print what you want to see)"]
    assert texts[2].splitlines()[1] == '  File "program.py", line 3, in <module>'
    assert texts[2].splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert texts[3:] == ["(exit code 3)", "(ended by signal 6)"]


class Unfenced(ChildSandbox):
    """As on a kernel without Landlock."""

    async def capabilities(self) -> dict[str, bool]:
        return {"network": True, "files": False, "processes": True, "signals": True, "disk": False}


async def test_code_is_not_run_where_the_kernel_cannot_fence_it_unless_that_is_allowed():
    with pytest.raises(ToolError, match=r"kernel must keep code from files, and does not .* set weak: true"):
        await Unfenced().run("print(1)", deadline_s=30)
    assert (await Unfenced(weak=True).run("print(1)", deadline_s=30)).output == "1\n"


class Elsewhere:
    """A sandbox of somebody's own."""

    def __init__(self, greeting: str) -> None:
        self.greeting = greeting

    async def run(self, code: str, *, deadline_s: float) -> SandboxResult:
        return SandboxResult(output=f"{self.greeting} {code} {deadline_s:g}", exit_code=0)


async def test_another_sandbox_can_be_plugged():
    config = {
        "sandbox": "tests.agents.tools.test_python_tool.Elsewhere",
        "sandbox_config": {"greeting": "hi"},
        "deadline_s": 3,
    }
    async with Toolbox([PythonTool(config)]).open() as tools:
        assert (await tools.call("python", {"code": "1"})).text == "hi 1 3"
    with pytest.raises(ToolError, match=r"config of the python tool must have keys of .*, got \['memory'\]"):
        PythonTool({"memory": 1})


async def test_code_that_is_too_long_is_refused():
    with pytest.raises(ToolError, match="code must have at most 10 bytes"):
        await ChildSandbox(ChildLimits(code_bytes=10)).run("print('too long')", deadline_s=30)


async def test_without_user_namespaces_the_fence_still_holds():
    """Inside the sandbox there are none to be had: there, the same program asks what the kernel grants, and runs code."""
    readable = [sys.prefix, sys.base_prefix, *SYSTEM]
    spec = {"environment": {}, "readable": readable, "cpu_s": 9, "memory_mb": 999, "disk_mb": 2, "threads": 9}
    code = f"""
import json, os, sys
os.mkdir("work")
open("program.py", "w").write({INNER!r})
spec = {spec!r} | dict(folder=os.getcwd(), python=sys.executable, probe=PROBE)
os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", {Path(fence.__file__).read_text()!r}, "run", json.dumps(spec)])
"""
    outer = ChildSandbox(concurrency=2)
    granted = await outer.capabilities()
    probe, run = [outer.run(code.replace("PROBE", word), deadline_s=30) for word in ("True", "False")]
    inner, written = await asyncio.gather(probe, run)
    assert json.loads(inner.output) == {**granted, "disk": False}
    assert written.output.startswith("refused\n")  # no disk of theirs is read-only, so that seccomp has to
    assert written.output.endswith("OSError: [Errno 27] File too large\n")
