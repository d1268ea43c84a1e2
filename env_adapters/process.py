"""Child programs: agents and environments. Each runs in a session of its own and writes to a log file.

Used by `agents.external` and by the pipeline. Invariant: `stop` ends the program and everything it started (its process group),
so nothing outlives a run. Programs are never run through a shell.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from buffers.errors import EnvError

STOP_GRACE_S = 5.0
LOG_TAIL_CHARS = 2000
LAST_WORDS_CHARS = 600


def resolve_command(command: Sequence[str]) -> list[str]:
    """`{python}` becomes this interpreter; words that are files become absolute, as the program gets a folder of its own.

    Raises FileNotFoundError naming the word when the program itself is not found.
    """
    words = [sys.executable if word == "{python}" else word for word in command]
    program = shutil.which(words[0])
    if program is None:
        raise FileNotFoundError(
            f"program {words[0]!r} must be on PATH or a file; check the first word of {list(command)}"
        )
    return [program, *(str(Path(word).resolve()) if Path(word).is_file() else word for word in words[1:])]


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what would put the checkout on a child's import path, plus `extra`."""
    kept = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONSTARTUP"}}
    return {**kept, **extra}


class Child:
    """One running program. Start -> (wait | first_line) -> stop."""

    def __init__(self, process: asyncio.subprocess.Process, *, log: Path) -> None:
        self._process = process
        self.log = log

    @classmethod
    async def start(
        cls, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path, pipe_stdout: bool = False
    ) -> Child:
        """Start `command` (already resolved). stderr, and stdout unless piped, are appended to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        cwd.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=cwd,
                env=dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if pipe_stdout else sink,
                stderr=sink,
                start_new_session=True,
            )
        return cls(process, log=log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        """The exit code (negative: the signal that ended it)."""
        return await self._process.wait()

    async def first_line(self) -> str:
        """The first line of standard output; empty when the program ended without one."""
        assert self._process.stdout is not None, "start with pipe_stdout=True"
        return (await self._process.stdout.readline()).decode(errors="replace").strip()

    def log_tail(self) -> str:
        """The end of the log, for error messages."""
        return self.log.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip() if self.log.exists() else ""

    async def stop(self) -> None:
        """End the program's process group: SIGTERM, then SIGKILL after a grace period. Safe to call twice."""
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), STOP_GRACE_S)
        except TimeoutError:
            pass
        self._signal(signal.SIGKILL)  # also ends grandchildren that ignored the first signal
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass  # everything in the group has ended


def last_words(folder: Path) -> str:
    """The end of the log that was written last among `<folder>/*/log.txt`."""
    logs = sorted(folder.glob("*/log.txt"), key=lambda log: log.stat().st_mtime)
    return logs[-1].read_text(errors="replace")[-LAST_WORDS_CHARS:].strip() if logs else "(no log)"


async def start_environment(
    command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path, deadline_s: float
) -> tuple[Child, str]:
    """Start an environment program and wait for its line `ready HOST:PORT`; returns the child and that address."""
    try:
        child = await Child.start(
            resolve_command(command), env={**os.environ, **env}, cwd=cwd, log=log, pipe_stdout=True
        )
    except FileNotFoundError as error:
        raise EnvError(f"env.command cannot be started: {error}") from None
    try:
        line = await asyncio.wait_for(child.first_line(), deadline_s)
    except TimeoutError:
        line = ""
    word, _, address = line.partition(" ")
    if word != "ready" or not address:
        await child.stop()
        raise EnvError(
            f"env.command must print `ready HOST:PORT` within {deadline_s:.0f} s, got {line!r}; "
            f"its log {log} ends: {child.log_tail()}"
        )
    return child, address
