"""Child programs: agents and environments. Each runs in a session of its own and writes to a log file.

Used by `agents` and by the pipeline. Invariant: `stop` ends the program and everything it started (its process group), so nothing
outlives a run. Programs are never run through a shell.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from buffers.disk import end_of
from buffers.errors import EnvDied, EnvError

STOP_GRACE_S = 5.0
ENDING_S = 1.0
"""Seconds between the end of a program's output and the program's end."""
LOG_TAIL_CHARS = 2000
CHUNK_BYTES = 65_536


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
    return [program, *(os.path.realpath(word) if os.path.isfile(word) else word for word in words[1:])]


Starts = Callable[..., Awaitable[Any]]
"""Such as `asyncio.create_subprocess_exec`; of what it returns `pid` and `wait` are used."""


@dataclass(eq=False)
class Child:
    """One running program. Start -> (wait | first_line) -> stop."""

    process: Any
    _: KW_ONLY
    log: Path
    stdout: Pipe | None = None

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None,
        cwd: Path,
        log: Path,
        stdin: Path = Path(os.devnull),
        pipe_stdout: bool = False,
        starts: Starts = asyncio.create_subprocess_exec,
    ) -> Child:
        """Start `command` (already resolved). stderr, and stdout unless piped, are appended to `log`; stdin is a file."""
        log.parent.mkdir(parents=True, exist_ok=True)
        cwd.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            sink = opened.enter_context(log.open("ab"))
            source = opened.enter_context(stdin.open("rb"))
            stdout = await open_pipe(opened) if pipe_stdout else None
            process = await starts(
                *command,
                cwd=cwd,
                env=None if env is None else dict(env),
                stdin=source,
                stdout=sink if stdout is None else stdout.writing,
                stderr=sink,
                start_new_session=True,
            )
        return cls(process, log=log, stdout=stdout)

    async def wait(self) -> int:
        """The exit code (negative: the signal that ended it)."""
        code: int = await self.process.wait()
        return code

    async def killed(self) -> bool:
        """True if a signal has ended it, or does so now."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                return await self.wait() < 0
        return False

    async def first_line(self) -> str:
        """The first line of standard output; empty when the program ended without one."""
        assert self.stdout is not None, "start with pipe_stdout=True"
        return (await self.stdout.reader.readline()).decode(errors="replace").strip()

    async def output(self, *, most: int) -> bytes:
        """Copy standard output to the log until it ends; its last `most` bytes. No more than that is ever in memory."""
        assert self.stdout is not None, "start with pipe_stdout=True"
        tail = b""
        with self.log.open("ab", buffering=0) as sink:
            while chunk := await self.stdout.reader.read(CHUNK_BYTES):
                with suppress(
                    OSError
                ):  # what a full disk does not take is missing in the log, and is judged all the same
                    sink.write(chunk)
                tail = (tail + chunk)[-most:]
        return tail

    def log_tail(self) -> str:
        """The end of the log, for error messages."""
        return end_of(self.log, chars=LOG_TAIL_CHARS)

    async def stop(self, first: signal.Signals = signal.SIGTERM, *, grace_s: float = STOP_GRACE_S) -> None:
        """End the program's process group: `first`, then SIGKILL after a grace period. Safe to call twice."""
        signal_group(self.process.pid, first)
        # Not wait_for: Python 3.11's loses a cancellation that comes as the process ends, and its task would never end.
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.process.wait()
        signal_group(self.process.pid, signal.SIGKILL)  # also ends grandchildren that ignored the first signal
        await self.process.wait()

    def close(self) -> None:
        """Stop reading standard output."""
        if self.stdout is not None:
            self.stdout.transport.close()


def signal_group(leader: int, number: signal.Signals) -> None:
    """Signal all processes of a group; none where everything in it has ended."""
    with suppress(ProcessLookupError):
        os.killpg(leader, number)


@dataclass(frozen=True, slots=True)
class Pipe:
    """A pipe of our own: with asyncio's, `wait` would not return before everything that a program left behind has ended."""

    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport
    writing: BinaryIO


async def open_pipe(opened: ExitStack) -> Pipe:
    """A pipe whose writing end is closed with `opened`: the program has it then."""
    reading, writing = os.pipe()
    sink = opened.enter_context(os.fdopen(writing, "wb", buffering=0))
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    source = os.fdopen(reading, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, source)
    return Pipe(reader, transport, sink)


async def start_environment(
    command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path, deadline_s: float
) -> tuple[Child, str]:
    """Start an environment program and wait for its line `ready HOST:PORT`; returns the child and that address.

    Raises EnvDied when a signal ended it before, EnvError when it never says that.
    """
    try:
        child = await Child.start(
            resolve_command(command), env={**os.environ, **env}, cwd=cwd, log=log, pipe_stdout=True
        )
    except FileNotFoundError as error:
        raise EnvError(f"env.command cannot be started: {error}") from None
    line: str | None = None
    word = address = ""
    with suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            line = await child.first_line()
        word, _, address = line.partition(" ")
    if word == "ready" and address:
        return child, address
    killed = not line and await child.killed()
    await child.stop()
    if killed:
        raise EnvDied(f"the environment was killed before it was ready; its log {log} ends: {child.log_tail()}")
    got = (
        f"got nothing in {deadline_s:.0f} s" if line is None else f"got {line!r}" if line else "it ended without a word"
    )
    raise EnvError(f"env.command must print `ready HOST:PORT`, {got}; its log {log} ends: {child.log_tail()}")
