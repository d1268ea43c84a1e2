"""Rules of learner/training/forked_ranks.py, with a program in place of Ray's worker; whole runs fork their ranks."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.processes.child_process import child_process, gone

ROOT = Path(__file__).parents[3]
STARTING = """
import json, os, sys
from learner.training import forked_ranks
forked_ranks.start()
print(json.dumps({"pid": os.getpid(), "launcher": forked_ranks.launcher()}), flush=True)
sys.stdin.read()
"""
ASKED_FOR = """
import json, os, sys
there = [name for name in ("torch", "transformers", "learner.training.trainer", "ray") if name in sys.modules]
import torch
said = {"there": there, "threads": torch.get_num_threads(), "arguments": sys.argv[1:], "pid": os.getpid()}
said |= {"environment": dict(os.environ), "folder": os.getcwd(), "name": __name__, "group": os.getpgrp()}
print(json.dumps(said), flush=True)
sys.exit(3 if sys.stdin.read() == "end" else 0)
"""


@pytest.fixture(scope="module")
def warm_process() -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The process that started it, and the command that has something forked of it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with child_process([sys.executable, "-c", STARTING], stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        yield process, shlex.split(json.loads(process.stdout.readline())["launcher"]["py_executable"])


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "asked_for.py"
    path.write_text(ASKED_FOR)
    return path


@contextmanager
def asked(command: list[str], program: Path, **late: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Who asks, and what the program said."""
    words = [*command, str(program), "one", "two words"]
    environment = {"PATH": os.environ["PATH"], **late}
    with child_process(words, cwd=program.parent, stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())


@pytest.mark.seconds
def test_what_is_forked_has_what_was_imported_and_the_askers_arguments_environment_folder_and_streams(  # type: ignore[no-untyped-def]
    warm_process, program: Path
) -> None:
    with asked(warm_process[1], program, OMP_NUM_THREADS="1", LATE="2") as (process, said):
        assert said["there"] == ["torch", "transformers", "learner.training.trainer"]
        assert said["pid"] != process.pid and said["name"] == "__main__"
        assert said["arguments"] == ["one", "two words"] and said["folder"] == str(program.parent)
        assert said["environment"]["LATE"] == "2" and "PYTHONPATH" not in said["environment"]
        assert said["threads"] == 1
        assert said["group"] == said["pid"], "Ray ends the group of a worker that has ended"
        process.communicate("end", timeout=PATIENCE_S)
    assert gone(said["pid"])


def test_who_asked_and_what_was_forked_end_together(warm_process, program: Path) -> None:  # type: ignore[no-untyped-def]
    with asked(warm_process[1], program) as (process, said), asked(warm_process[1], program) as (other, told):
        process.kill()
        assert gone(said["pid"]), "what was forked lives on"
        assert other.poll() is None and not gone(told["pid"], within_s=0.0), "another one's fork ended"
        os.kill(told["pid"], signal.SIGKILL)
        other.wait(timeout=PATIENCE_S)


@pytest.mark.seconds
def test_without_a_warm_process_the_program_runs_all_the_same(warm_process, program: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with asked([*warm_process[1][:-1], str(tmp_path / "nobody")], program) as (process, said):
        assert said["pid"] == process.pid and said["there"] == []
        process.communicate("end", timeout=PATIENCE_S)
        assert process.returncode == 3


def test_it_is_not_started_where_ray_was_imported() -> None:
    import ray  # noqa: F401

    from learner.training import forked_ranks

    forked_ranks.start()
    assert forked_ranks.launcher() == {}


@pytest.mark.seconds
def test_it_ends_with_the_process_that_started_it(warm_process, program: Path) -> None:  # type: ignore[no-untyped-def]
    starter, command = warm_process
    children = Path(f"/proc/{starter.pid}/task/{starter.pid}/children")
    (pid,) = map(int, children.read_text().split())
    starter.kill()
    assert gone(pid)
    with asked(command, program) as (process, said):
        assert said["pid"] == process.pid
