"""Rules of learner/recovery/restarts.py and learner/recovery/restarts.py, with environments that are
killed early."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

import pytest

from buffers.errors import EngineError, EnvError
from env_adapters.child_process import start_environment
from learner.recovery.restarts import MAX_IN_A_ROW, Environment, RestartLimit


def test_what_keeps_dying_ends_it_with_its_error_each_engine_by_itself_and_a_step_forgives() -> None:
    restart_limit = RestartLimit()
    for _ in range(MAX_IN_A_ROW):
        restart_limit.record("engine", EngineError("gone"), name="e0")
    restart_limit.record("engine", EngineError("gone"), name="e1")
    with pytest.raises(EngineError, match="gone"):
        restart_limit.record("engine", EngineError("gone"), name="e0")
    restart_limit.reset()
    restart_limit.record("engine", EngineError("again"), name="e0")
    assert restart_limit.figures() == {"restarts/engine": MAX_IN_A_ROW + 2.0}


KILLED_TWICE = """
import os, signal, sys
from pathlib import Path
starts = Path("starts")
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if starts.read_text() in sys.argv[1].split(","):
    os.kill(os.getpid(), signal.SIGKILL)
print("ready 127.0.0.1:1", flush=True)
sys.stdin.read()
"""


async def never(_: str) -> None:
    raise AssertionError("it never ran")


async def taken() -> bool:
    return False


def environment(folder: Path, *, kills: str) -> Environment:
    command = [sys.executable, "-c", KILLED_TWICE, kills]
    return Environment(
        partial(start_environment, command, env={}, cwd=folder, log=folder / "log", deadline_s=60.0),
        lost=never,
        taken=taken,
    )


async def test_an_environment_that_is_killed_before_it_is_ready_is_started_again(tmp_path: Path) -> None:
    started, restart_limit = environment(tmp_path, kills="x,xx"), RestartLimit()
    assert await started.start(restart_limit=restart_limit) == "127.0.0.1:1"
    await started.stop()
    assert restart_limit.figures() == {"restarts/environment": 2.0}


async def test_an_environment_that_ends_by_itself_before_it_is_ready_is_not_tried_again(tmp_path: Path) -> None:
    start = partial(start_environment, [sys.executable, "-c", "raise SystemExit('no port')"], cwd=tmp_path)
    started = Environment(partial(start, env={}, log=tmp_path / "log", deadline_s=60.0), lost=never, taken=taken)
    restart_limit = RestartLimit()
    with pytest.raises(EnvError, match="no port"):
        await started.start(restart_limit=restart_limit)
    assert restart_limit.figures() == {}


async def test_an_environment_that_is_killed_each_time_ends_it(tmp_path: Path) -> None:
    kills = ",".join("x" * number for number in range(1, MAX_IN_A_ROW + 2))
    with pytest.raises(EnvError, match="was killed before it was ready"):
        await environment(tmp_path, kills=kills).start(restart_limit=RestartLimit())


async def test_one_that_its_disk_has_ended_is_started_again_once_that_takes_files_and_is_not_blamed(
    tmp_path: Path,
) -> None:
    program, back, waits = 'print("ready 127.0.0.1:1", flush=True)', asyncio.Event(), 2 * MAX_IN_A_ROW

    async def lost(_: str) -> None:
        nonlocal waits
        waits -= 1
        if waits == 0:
            back.set()

    async def waited() -> bool:
        return True

    start = partial(start_environment, [sys.executable, "-c", program], env={}, cwd=tmp_path, log=tmp_path / "log")
    started, restart_limit = Environment(partial(start, deadline_s=60.0), lost=lost, taken=waited), RestartLimit()
    await started.start(restart_limit=restart_limit)
    keeping = asyncio.create_task(started.keep(restart_limit=restart_limit))
    await back.wait()
    keeping.cancel()
    await started.stop()
    assert restart_limit.figures() == {}
