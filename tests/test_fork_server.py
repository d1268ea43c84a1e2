"""Rules of mocked_server/vllm_fork_server.py, with children that are no engines; whole runs fork engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from child import child_process, gone

from mocked_server.vllm_engine import has_gpu
from mocked_server.vllm_fork_server import forked_engines

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("forking.py")


@pytest.fixture
def forking() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process that started the fork server, and what a process that was forked of that said."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with child_process([sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())


def test_what_is_forked_has_what_was_imported_and_the_environment_of_its_start(forking) -> None:  # type: ignore[no-untyped-def]
    _, said = forking
    assert said["same"], "it was imported once more"
    assert (said["late"], said["early"]) == ("2", False)


def test_how_it_ended_is_known(forking) -> None:  # type: ignore[no-untyped-def]
    assert forking[1]["code"] == -signal.SIGKILL


def test_the_server_ends_when_all_that_use_it_have_ended(forking) -> None:  # type: ignore[no-untyped-def]
    process, said = forking
    assert not gone(said["server"], within_s=0.0)
    process.kill()
    os.kill(said["child"], signal.SIGKILL)  # an engine ends by itself: `WorkerExtension.end_with`
    assert gone(said["child"]) and gone(said["server"])


def test_without_it_nothing_is_changed() -> None:
    from vllm.v1.engine import utils

    before = utils.get_mp_context
    with forked_engines():
        assert utils.get_mp_context is before


def test_to_ask_for_a_gpu_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA was started nothing may be forked: neither an engine nor a run that is started again."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: os.environ.get(name) == "1")
    assert has_gpu()
