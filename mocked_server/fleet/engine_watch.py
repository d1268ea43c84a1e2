"""Looks at all engines twice a second: gives the task pool its slots, and keeps the figures that people read.

Built and run by `learner.pipeline`. Loop row: takes the engines' figures (waits: half a second); gives the pool its slots where
`agents.concurrency` is auto; unblocked by time. It asks engines for figures only, and changes none of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from buffers.tasks.task_pool import TaskPool
from mocked_server.fleet.admission import Admission
from mocked_server.fleet.member import EngineFigures

LOOK_S = 0.5
WINDOW_S = 10.0
"""Tokens per second on the panel are of so long."""

Figures = Callable[[], Sequence[EngineFigures]]


@dataclass(eq=False)
class EngineWatch:
    """`figures`: those of all engines now. `admission`: None where the number of slots is given."""

    figures: Figures
    _: KW_ONLY
    pool: TaskPool
    admission: Admission | None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._ended_before = int(self.pool.metrics()["pool/scored"])
        self._looks: deque[tuple[float, list[EngineFigures]]] = deque()
        """(time, figures) of the looks in the window, and of the last one before it."""
        self._at_step: tuple[float, list[EngineFigures]] = (self.clock(), list(self.figures()))
        self.look()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Take the engines' figures, and let the pool follow them."""
        now, figures = self.clock(), list(self.figures())
        self._looks.append((now, figures))
        while len(self._looks) > 2 and self._looks[1][0] <= now - WINDOW_S:
            self._looks.popleft()
        if self.admission is not None:
            counts = self.pool.metrics()
            self.pool.max_running = self.admission.look(
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
        (then, before), now, figures = self._at_step, self.clock(), list(self.figures())
        self._at_step = now, figures
        return metrics_of(EngineRates.between(before, figures, seconds=now - then))

    def _recent(self) -> list[EngineRates]:
        """The figures of the last look, and rates of the last `WINDOW_S` before it."""
        (then, before), (now, figures) = self._looks[0], self._looks[-1]
        return EngineRates.between(before, figures, seconds=now - then)


# Figures of engines as people read them: rates between two looks, lines of the panel, metrics. Names and units are explained in
# docs/metrics.md.

MAX_LINES = 8
"""Engines with a line of their own on the panel."""
IN_STEPS = (
    *("running", "waiting", "tokens_per_s", "kv_share", "cached_share", "version", "restarts", "preemptions"),
    "moved_in",
)
"""Figures of a step's line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """An engine's figures, and what it did for each second between two looks."""

    now: EngineFigures
    tokens_per_s: float
    cached_share: float | None
    """Prompt tokens that its cache held, of those of the requests that ended between the looks; None: no request ended."""

    @classmethod
    def between(
        cls, before: Sequence[EngineFigures], now: Sequence[EngineFigures], *, seconds: float
    ) -> list[EngineRates]:
        """Each engine that is there now. One that was not there before did all that it ever did since."""
        earlier = {engine.name: engine for engine in before}
        return [cls._of(earlier.get(engine.name), engine, seconds=seconds) for engine in now]

    @classmethod
    def _of(cls, before: EngineFigures | None, now: EngineFigures, *, seconds: float) -> EngineRates:
        sampled, prompts, cached = (
            getattr(now, name) - (getattr(before, name) if before is not None else 0)
            for name in ("sampled_tokens", "prompt_tokens", "cached_tokens")
        )
        return cls(
            now=now,
            tokens_per_s=sampled / seconds if seconds > 0 else 0.0,
            cached_share=cached / prompts if prompts > 0 else None,
        )


def kv_share(engine: EngineFigures) -> float:
    """Share of the engine's cache that generations under way hold; above 1: prompts wait for room. 0 while its size is unknown."""
    return engine.tokens_held / engine.kv_capacity if engine.kv_capacity else 0.0


def metrics_of(engines: Sequence[EngineRates]) -> dict[str, float]:
    """`engine/<name>/<figure>` of each, and how many of them are up."""
    figures = {"engine/up": float(sum(engine.now.is_up for engine in engines))}
    for engine in engines:
        figures |= {f"engine/{engine.now.name}/{figure}": value for figure, value in _metrics(engine).items()}
    return figures


def _metrics(engine: EngineRates) -> dict[str, float]:
    """Figures of a step's line, as floats; without a share of the cache that is not known."""
    figures = status_of(engine)
    return {name: float(figures[name]) for name in IN_STEPS if figures[name] is not None}


def status_of(engine: EngineRates) -> dict[str, Any]:
    """All figures and rates of one engine by name, but for its own."""
    figures = asdict(engine.now)
    del figures["name"]
    return figures | {
        "tokens_per_s": engine.tokens_per_s,
        "kv_share": kv_share(engine.now),
        "cached_share": engine.cached_share,
    }


def lines_of(engines: Sequence[EngineRates]) -> list[str]:
    """A line for each of the first `MAX_LINES` engines, and one for all others."""
    lines = [_line(engine) for engine in engines[:MAX_LINES]]
    if rest := engines[MAX_LINES:]:
        down = sum(not engine.now.is_up for engine in rest)
        lines.append(
            f"{len(rest)} more  {sum(engine.now.running for engine in rest)} running  "
            f"{sum(engine.tokens_per_s for engine in rest):,.0f} tokens/s  "
            f"KV up to {max(kv_share(engine.now) for engine in rest):.0%}" + (f"  {down} down" if down else "")
        )
    return lines


def _line(engine: EngineRates) -> str:
    now = engine.now
    parts = [
        f"{now.name:<3} {now.running:>3} running" if now.is_up else f"{now.name:<3} down",
        f"{now.waiting} waiting" if now.waiting else "",
        f"{engine.tokens_per_s:,.0f} tokens/s",
        f"KV {kv_share(now):.0%}",
        "" if engine.cached_share is None else f"cached {engine.cached_share:.0%}",
        f"version {now.version}",
        *(
            f"{count} {word}" if count else ""
            for count, word in ((now.preemptions, "preempted"), (now.moved_in, "moved in"), (now.restarts, "restarts"))
        ),
    ]
    return "  ".join(part for part in parts if part)
