"""Loops that restart an environment that has died, or fail episodes whose agents are silent.

Run by `learner.pipeline` until they are cancelled. The learner's processes are the learn loop's, agents are `agents.external`'s,
engines are the fleet's (`mocked_server.fleet.engine_fleet`). What keeps dying ends the run (`RestartLimit`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from buffers.errors import EnvDied, EnvError

# Counts the restarts of a run's parts, and ends the run when one keeps dying. A process that dies now and then (out of memory,
# a node's hiccup) costs what it was doing; one that dies again and again, without a step in between, has a cause that a restart
# does not mend, and ends the run.

logger = logging.getLogger(__name__)

MAX_IN_A_ROW = 3
"""Restarts of one part without a step in between; the next death ends the run."""


class RestartLimit:
    """Counts restarts by part: `engine`, `learner`, `environment`; each engine has a limit of its own."""

    def __init__(self) -> None:
        self._total: Counter[str] = Counter()
        self._in_a_row: dict[str, Counter[str]] = defaultdict(Counter)

    def record(self, part: str, error: Exception, *, name: str = "") -> None:
        """Count a death of `part`, of which the one called `name` died. Raises `error` when it may not be started again."""
        self._in_a_row[part][name] += 1
        if self._in_a_row[part][name] > MAX_IN_A_ROW:
            raise error
        self._total[part] += 1
        logger.warning("the %s died and is started again: %s", f"{part} {name}".strip(), error)

    def excuse(self, part: str) -> None:
        """The cause of `part`'s deaths was found and ended: its restarts in a row are counted from 0 again."""
        self._in_a_row.pop(part, None)

    def reset(self) -> None:
        """A step was made: all restarts in a row are counted from 0 again."""
        self._in_a_row.clear()

    def figures(self) -> dict[str, float]:
        """`restarts/<part>`: restarts so far, of parts that died."""
        return {f"restarts/{part}": float(number) for part, number in sorted(self._total.items())}


class Program(Protocol):
    """A running child program."""

    log: Path

    async def wait(self) -> int: ...
    async def stop(self) -> None: ...
    def log_tail(self) -> str: ...


async def ended(task: asyncio.Task[None]) -> None:
    """Cancel it, and wait until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def end_silent(
    silent: Callable[[float], Sequence[str]], *, fail: Callable[[str, str], Awaitable[None]], seconds: float
) -> None:
    """End the episodes whose agents were not heard for so long: their slots are used again, their tasks tried again."""
    while True:
        await asyncio.sleep(min(1.0, seconds / 4))
        for episode_id in silent(seconds):
            await fail(episode_id, "silent agent")


class Environment:
    """The environment's program. `start`: starts it and gives its address; `lost`: called when it has died and another one
    listens at that address; `taken`: waits until the disk of its log takes something, and says whether that took a wait."""

    def __init__(
        self,
        start: Callable[[], Awaitable[tuple[Program, str]]],
        *,
        lost: Callable[[str], Awaitable[None]],
        taken: Callable[[], Awaitable[bool]],
    ) -> None:
        self._start = start
        self._lost = lost
        self._taken = taken
        self._child: Program | None = None

    async def start(self, *, restart_limit: RestartLimit) -> str:
        """Its address (HOST:PORT). Raises EnvError when it does not come up; one that was killed meanwhile is started again."""
        while True:
            try:
                self._child, address = await self._start()
                return address
            except EnvDied as death:
                restart_limit.record("environment", death)

    async def keep(self, *, restart_limit: RestartLimit) -> None:
        """Start it again when it has ended. Raises EnvError."""
        while self._child is not None:
            code = await self._child.wait()
            await self.stop()  # what it left behind
            error = EnvError(
                f"the environment process ended (exit code {code}); its log {self._child.log} ends:\n"
                f"{self._child.log_tail()}"
            )
            while True:
                if not await self._taken():
                    restart_limit.record("environment", error)
                try:
                    await self._lost(await self.start(restart_limit=restart_limit))
                    break
                except EnvError as again:
                    error = again

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop()
