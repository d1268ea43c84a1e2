"""Looks at all engines twice a second: gives the task pool its slots, and keeps the figures that people read.

Built and run by `learner.pipeline`. Loop row: takes the engines' figures (waits: half a second); gives the pool its slots where
`agents.concurrency` is auto; unblocked by time. It asks engines for figures only, and changes none of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mocked_server.fleet.admission import Admission
from mocked_server.fleet.engine_rates import EngineRates, lines_of, metrics_of, status_of
from mocked_server.fleet.member import EngineFigures

LOOK_S = 0.5
WINDOW_S = 10.0
"""Tokens per second on the panel are of so long."""

Figures = Callable[[], Sequence[EngineFigures]]


class Slots(Protocol):
    """What is asked of the task pool."""

    max_running: int

    def metrics(self) -> Mapping[str, float]:
        """`pool/running` and `pool/scored`, among others."""
        ...


class EngineWatch:
    """`figures`: those of all engines now. `admission`: None where the number of slots is given."""

    def __init__(
        self,
        figures: Figures,
        *,
        pool: Slots,
        admission: Admission | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.figures = figures
        self._pool = pool
        self._admission = admission
        self._ended_before = int(pool.metrics()["pool/scored"])
        self._clock = clock
        self._looks: deque[tuple[float, list[EngineFigures]]] = deque()
        """(time, figures) of the looks in the window, and of the last one before it."""
        self._at_step: tuple[float, list[EngineFigures]] = (clock(), list(figures()))
        self.look()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Take the engines' figures, and let the pool follow them."""
        now, figures = self._clock(), list(self.figures())
        self._looks.append((now, figures))
        while len(self._looks) > 2 and self._looks[1][0] <= now - WINDOW_S:
            self._looks.popleft()
        if self._admission is not None:
            counts = self._pool.metrics()
            self._pool.max_running = self._admission.look(
                figures,
                running=int(counts["pool/running"]),
                ended=int(counts["pool/scored"]) - self._ended_before,
                now=now,
            )

    def lines(self) -> list[str]:
        """One line for each engine, for the panel."""
        return lines_of(self._recent())

    def status(self) -> dict[str, dict[str, Any]]:
        """Figures and rates of each engine by its name, for `GET /status`."""
        return {engine.now.name: status_of(engine) for engine in self._recent()}

    def metrics(self) -> dict[str, float]:
        """Figures of all engines for a step's line; rates are since the last call."""
        (then, before), now, figures = self._at_step, self._clock(), list(self.figures())
        self._at_step = now, figures
        return metrics_of(EngineRates.between(before, figures, seconds=now - then))

    def _recent(self) -> list[EngineRates]:
        """The figures of the last look, and rates of the last `WINDOW_S` before it."""
        (then, before), (now, figures) = self._looks[0], self._looks[-1]
        return EngineRates.between(before, figures, seconds=now - then)
