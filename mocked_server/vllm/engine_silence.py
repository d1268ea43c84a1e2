"""Finds out that an engine is deaf: its process lives, and it answers nothing.

Owned by `VLLMEngine`, which says when something is expected of the engine and when it was heard. Invariant: an engine that answers
the probe within the time-out is never called deaf, however long one generation takes. It does not end the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

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

    def _patience(self) -> float:
        return self.timeout_s * (LONG_WORK if self._long else 1)
