"""Rules of learner/recovery/at_once.py, with real signals and processes: nothing that a process has started outlives its end at
once, whatever its main thread does, its threads answer, and its children start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from learner.recovery.at_once import signals_end_at_once
from tests.support.patience import PATIENCE_S
from tests.support.processes.child_process import child_process, gone

ROOT = Path(__file__).parents[3]
LIVE_ON = "import time; time.sleep(1000)"
PARENT = (
    "import subprocess, sys, time; "
    f"print(subprocess.Popen([sys.executable, '-c', {LIVE_ON!r}], stdout=-3).pid, flush=True); time.sleep(1000)"
)
PROGRAM = f"""
import json, multiprocessing, os, signal, subprocess, sys, tempfile, threading, time
from pathlib import Path
from configs.child_processes import goes_with_this_process, own_temporary_folder
from learner.recovery.at_once import signals_end_at_once

def stubborn(writing):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = subprocess.Popen([sys.executable, "-c", {PARENT!r}], start_new_session=True, stdout=writing)
    os.write(writing, f"{{parent.pid}}\\n".encode())
    time.sleep(1000)

def answer_as_ray_does(child):
    child.join()
    os._exit(7)

def wait():
    time.sleep(1000)

def compute():
    sum(range(100_000))

with own_temporary_folder(), signals_end_at_once(lambda: "the way on"):
    lock = multiprocessing.get_context("spawn").Semaphore(1)
    shared = Path(tempfile.mkdtemp(dir="/dev/shm"))
    goes_with_this_process(shared)
    reading, writing = os.pipe()
    middle = multiprocessing.get_context("fork").Process(target=stubborn, args=(writing,))
    middle.start()
    threading.Thread(target=answer_as_ray_does, args=(middle,), daemon=True).start()
    files = [tempfile.gettempdir(), str(shared), "/dev/shm/sem." + lock._semlock.name.lstrip("/")]
    lines = os.fdopen(reading)
    pids = [middle.pid, int(lines.readline()), int(lines.readline())]
    print(json.dumps({{"pids": pids, "files": files}}), flush=True)
    while True:
        try:
            {{"waits": wait, "computes": compute}}[sys.argv[1]]()
        except BaseException:
            print("swallowed", flush=True)
"""


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("does", "number"), [("waits", signal.SIGINT), ("computes", signal.SIGTERM), ("waits", signal.SIGHUP)]
)
def test_no_process_and_no_file_is_left(tmp_path: Path, does: str, number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, does]
    with child_process(command, env=environment, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert all(Path(file).exists() for file in told["files"]) and len(told["pids"]) == 3
        process.send_signal(number)
        output, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (130, "") and said.endswith("the way on\n")
    assert all(gone(pid, within_s=0.0) for pid in told["pids"])
    assert [file for file in told["files"] if Path(file).exists()] == [] and list(tmp_path.iterdir()) == []


@pytest.mark.seconds
def test_a_fork_has_the_default_effect(tmp_path: Path) -> None:
    """An engine that is ended must not end the run, nor remove its files."""
    program = """
import os, signal, time
from learner.recovery.at_once import signals_end_at_once
with signals_end_at_once(lambda: "of the run"):
    if (pid := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, str(-signal.SIGTERM)), ended.stderr


def test_what_is_to_outlive_its_terminal_does() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_end_at_once(lambda: "never"):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
