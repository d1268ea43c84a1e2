"""Finds out that an engine makes no progress: its process lives, and it answers nothing.

Owned by `VLLMEngine`, which says when something is expected of the engine and when it was heard. Invariant: an engine that answers
the probe within the time-out, or works on one long step, is never called deaf, however long one generation takes. It does not end
the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess

import psutil

STUCK_S = 10.0
"""Seconds without an output and without work of its processors after which an engine is stuck: stopped, or in a dead lock."""
IDLE_SHARE = 0.01
"""Share of one processor that counts as no work."""
LOOK_S = 0.5
LONG_WORK = 10
"""Times the time-out for loading weights, during which an engine answers nothing else."""


class EngineSilence:
    """`timeout_s`: half of it without any output while something is expected leads to a probe, which has the other half."""

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._expected = 0
        self._long = 0
        self._last_heard = clock()
        self._begun = asyncio.Event()

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Something is asked of the engine inside."""
        if self._expected == 0:
            self._last_heard = self._clock()
            self._begun.set()
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1
            if self._expected == 0:
                self._begun.clear()

    @contextmanager
    def long_work(self) -> Iterator[None]:
        """The engine is busy with one thing inside."""
        self._long += 1
        try:
            yield
        finally:
            self._long -= 1
            self.heard()

    def heard(self) -> None:
        """The engine gave a sign of life."""
        self._last_heard = self._clock()

    async def lasting(self, probe: Callable[[], Awaitable[object]]) -> None:
        """Wait until the engine is deaf. `probe` asks it something that it answers between two steps; what that raises says
        that the engine's end is known already, and nothing is left to find out."""
        while True:
            await self._begun.wait()
            left = self._last_heard + self._patience() / 2 - self._clock()
            if left > 0:
                await asyncio.sleep(left)
                continue
            try:
                async with asyncio.timeout(self._patience() / 2):
                    await probe()
            except TimeoutError:
                if self._expected:
                    return
            self.heard()

    async def without_progress(self, processor_time: Callable[[], float]) -> None:
        """Wait until something was expected for STUCK_S while the engine gave no output and its processes hardly ran. A long step
        takes processor time. `processor_time`: seconds of it so far."""
        since, used = self._clock(), processor_time()
        while True:
            await asyncio.sleep(LOOK_S)
            now, last = self._clock(), processor_time()
            quiet_since = max(since, self._last_heard)
            if not self._expected or self._long or last - used > IDLE_SHARE * STUCK_S:
                since, used = now, last
            elif now - quiet_since >= STUCK_S:
                return

    def _patience(self) -> float:
        return self.timeout_s * (LONG_WORK if self._long else 1)


def processor_time(processes: Sequence[BaseProcess]) -> float:
    """Seconds of processor time that these processes and their children have used; of those that are gone none."""
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            parent = psutil.Process(process.pid)
            for one in (parent, *parent.children(recursive=True)):
                with suppress(psutil.Error):
                    times = one.cpu_times()
                    total += times.user + times.system
    return total
