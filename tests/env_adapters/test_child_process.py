"""Rules of env_adapters/child_process.py: a program is stopped, and whoever stops it can be."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from buffers.errors import EnvError
from env_adapters.child_process import Child, start_environment
from tests.support.patience import PATIENCE_S


class Ending:
    """A process whose end the test chooses. Its id is nobody's."""

    pid = 1 << 30

    def __init__(self) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)


@pytest.mark.parametrize("turns", range(6))
async def test_a_task_that_is_cancelled_as_its_program_ends_is_cancelled(tmp_path: Path, turns: int) -> None:
    """`turns` of the event loop between both: a lane that loses this goes on for ever, and the run with it."""
    process = Ending()
    child = Child(process, log=tmp_path / "log.txt")  # type: ignore[arg-type]

    async def lane() -> None:
        while True:
            await child.stop()
            await asyncio.sleep(0)

    running = asyncio.create_task(lane())
    for _ in range(5):
        await asyncio.sleep(0)
    process.ended.set_result(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=PATIENCE_S)
    running.cancel()
    assert done and running.cancelled()


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("program", "words"),
    [("pass", "it ended without a word"), ("print('hello')", "got 'hello'"), ("import time; time.sleep(60)", "in 1 s")],
)
async def test_an_environment_that_is_never_ready_is_told_by_what_it_did(
    tmp_path: Path, program: str, words: str
) -> None:
    command = [sys.executable, "-c", program]
    deadline_s = 1.0 if "sleep" in program else 60.0
    with pytest.raises(EnvError, match="must print `ready HOST:PORT`") as refused:
        await start_environment(command, env={}, cwd=tmp_path, log=tmp_path / "env.log", deadline_s=deadline_s)
    assert words in str(refused.value)


def test_the_end_of_a_log_is_read_however_long_it_is(tmp_path: Path) -> None:
    child = Child(None, log=tmp_path / "log.txt")  # type: ignore[arg-type]
    assert child.log_tail() == ""
    with child.log.open("wb") as log:
        log.truncate(1 << 40)  # no machine has room for it
        log.seek(0, 2)
        log.write("\nwords, of which the last one is ü\n".encode())
    assert child.log_tail().endswith("\nwords, of which the last one is ü")
