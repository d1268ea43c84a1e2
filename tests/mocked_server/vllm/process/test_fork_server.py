"""Rules of configs/fork_server.py and mocked_server/vllm/process/fork_server.py, with children that are no
engines; whole runs fork engines."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from configs import fork_server
from mocked_server.vllm.engine_arguments import has_gpu
from mocked_server.vllm.process.fork_server import engines_of_ours
from tests.support.patience import PATIENCE_S
from tests.support.processes.child_process import child_process, gone

ROOT = Path(__file__).parents[4]
SCRIPT = Path(__file__).with_name("fork_server_program.py")
STARTING = Path(__file__).with_name("starting_engine.py")


@pytest.fixture
def forking() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process that started the fork server, and what a process that was forked of that said."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with child_process([sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())


@pytest.mark.seconds
def test_what_is_forked_has_what_was_imported_and_the_environment_of_its_start(forking) -> None:  # type: ignore[no-untyped-def]
    _, said = forking
    assert said["same"], "it was imported once more"
    assert (said["late"], said["early"], said["threads"]) == ("2", False, 3)


@pytest.mark.seconds
def test_how_it_ended_is_known(forking) -> None:  # type: ignore[no-untyped-def]
    assert forking[1]["code"] == -signal.SIGKILL


@pytest.mark.seconds
def test_the_server_ends_when_all_that_use_it_have_ended(forking) -> None:  # type: ignore[no-untyped-def]
    process, said = forking
    assert not gone(said["server"], within_s=0.0)
    process.kill()
    assert gone(said["child"]) and gone(said["server"])


def test_without_it_processes_are_started_as_vllm_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.v1.engine import utils

    monkeypatch.setattr(fork_server, "_owner", None)
    for method in ("fork", "spawn"):
        # Not in the environment: vLLM reads that once and for all when an engine has run in this process.
        monkeypatch.setitem(vars(envs), "VLLM_WORKER_MULTIPROC_METHOD", method)
        plain = multiprocessing.get_context(method).Process
        with engines_of_ours() as started:
            assert utils.get_mp_context().get_start_method() == method
            assert isinstance(one := utils.get_mp_context().Process(), plain) and started == [one]
        assert utils.get_mp_context().Process is plain and started == [one], "processes of others are vLLM's own"


@contextmanager
def starting(model: Path, method: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server whose engine is there and still starts: (the server, the engine's process id)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(STARTING), str(model), method]
    with child_process(command, stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        server = psutil.Process(process.pid)
        assert process.stdout.readline() == "ready\n"
        there = set(server.children(recursive=True))
        say(process, "go on")
        yield process, booting(server, there)


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


@pytest.mark.engine
@pytest.mark.parametrize(
    "method", ["fork server", *(pytest.param(name, marks=pytest.mark.long) for name in ("fork", "spawn"))]
)
def test_an_engine_that_still_starts_ends_with_its_server_that_is_killed(tiny_model: Path, method: str) -> None:
    with starting(tiny_model, method) as (process, engine):
        process.kill()
        process.wait()
        assert gone(engine, within_s=60), "the engine outlived its server"
        assert process.stdout is not None and "up\n" not in process.stdout.readlines(), "it had started already"


@pytest.mark.engine
@pytest.mark.parametrize("method", ["fork server", pytest.param("spawn", marks=pytest.mark.long)])
def test_an_engine_whose_start_is_given_up_ends(tiny_model: Path, method: str) -> None:
    with starting(tiny_model, method) as (process, engine):
        say(process, "give up")
        assert gone(engine, within_s=60), "the engine outlived its start"
        assert process.stdout is not None and process.stdout.readline() == "given up\n"
        assert process.wait(PATIENCE_S) == 0


def booting(server: psutil.Process, there: set[psutil.Process]) -> int:
    """The engine, as soon as it is there and has read, or reads, what it needs."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for child in set(server.children(recursive=True)) - there:
            with suppress(psutil.NoSuchProcess, FileNotFoundError):
                if "libtorch" in Path(f"/proc/{child.pid}/maps").read_text():
                    return int(child.pid)
    raise AssertionError("no engine was started")


def test_to_ask_for_a_gpu_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA was started nothing may be forked: neither an engine nor a run that is started again."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: os.environ.get(name) == "1")
    assert has_gpu()


WORKERS = """
import json, os, sys
from types import SimpleNamespace

from mocked_server.vllm.process.fork_server import end_as_workers_do
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

end_as_workers_do()
codes = []
for code, state in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        workers = [
            SimpleNamespace(proc=SimpleNamespace(exitcode=each), death_writer=None, worker_response_mq=None)
            for each in (None, code)
        ]
        executor = SimpleNamespace(workers=workers, _ensure_worker_termination=lambda _: None, **state)
        MultiprocExecutor.shutdown(executor)
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


@pytest.mark.seconds
def test_an_engine_one_of_whose_workers_was_killed_ends_as_a_killed_one() -> None:
    failed = {"is_failed": True, "shutting_down": False}
    cases = [
        (-signal.SIGKILL, failed),
        (-signal.SIGSEGV, failed),
        (1, failed),
        (-signal.SIGTERM, {**failed, "is_failed": False}),
        (-signal.SIGTERM, {**failed, "shutting_down": True}),
    ]
    command = [sys.executable, "-c", WORKERS, json.dumps(cases)]
    said = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True)
    assert json.loads(said.stdout.splitlines()[-1]) == [-signal.SIGKILL, 0, 0, 0, 0]
