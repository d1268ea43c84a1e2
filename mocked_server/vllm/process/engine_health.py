"""What is seen of an engine from outside: that it makes no progress, how its process ended, what its scheduler does.

Used by `VLLMEngine` and `ServerEngine`, which say when something is expected of the engine and when it was heard. Invariants: an
engine that answers the probe within the time-out, or works on one long step, is never called silent, however long one generation
takes; nor is one of which nothing is expected, as what it gave waits for a reader or a disk; time in which this process was held up
itself is nobody's silence. It does not end the engine.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

STUCK_S = 10.0
"""Seconds without an output and without work of its processors after which an engine is stuck: stopped, or in a dead lock."""
IDLE_SHARE = 0.01
"""Share of one processor that counts as no work."""
LOOK_S = 0.5
IDLE_S = 5.0
"""Seconds after which an engine of which nothing is asked is asked the probe."""
LONG_WORK = 10
"""Times the time-out for loading weights, during which an engine answers nothing else."""


@dataclass(eq=False)
class EngineSilence:
    """`timeout_s`: half of it without any output while something is expected leads to a probe, which has the other half."""

    timeout_s: float
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        self._expected = 0
        self._long = 0
        self._quiet_s = 0.0
        """Seconds without a sign of life while something was expected."""

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Something is asked of the engine inside."""
        self._expect(1)
        try:
            yield
        finally:
            self._expect(-1)

    @contextmanager
    def given(self) -> Iterator[None]:
        """Inside `expecting`: what the engine gave is read inside, and kept on a disk; until that is done nothing is expected."""
        self.heard()
        self._expect(-1)
        try:
            yield
        finally:
            self._expect(1)

    def _expect(self, more: int) -> None:
        if self._expected == 0:
            self.heard()
        self._expected += more

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
        self._quiet_s = 0.0

    async def lasting(
        self,
        probe: Callable[[], Awaitable[object]],
        *,
        processor_time: Callable[[], float] | None = None,
        asks_idle: bool = False,
    ) -> None:
        """Wait until the engine is silent for the time-out, or, by `processor_time` (seconds of it so far), for STUCK_S without
        work: a long step takes processor time. `probe` asks it something that it answers between two steps; what that raises says
        that the engine's end is known already. `asks_idle`: also while nothing is expected of it."""
        asking: asyncio.Task[None] | None = None
        looked, used = self.clock(), 0.0
        idle_s = still_s = 0.0
        try:
            while True:
                await self.sleep(LOOK_S)
                now = self.clock()
                step, looked = min(now - looked, 2 * LOOK_S), now  # more: it was this process that did not run
                if asking is not None and asking.done():
                    asking.result()
                    asking = None
                    self.heard()
                idle_s = 0.0 if self._expected else idle_s + step
                self._quiet_s += step if self._expected else 0.0
                worked = processor_time() if processor_time is not None else 0.0
                if not self._expected or self._long or worked - used > IDLE_SHARE * STUCK_S:
                    still_s, used = 0.0, worked
                else:
                    still_s += step
                patience_s = self.timeout_s * (LONG_WORK if self._long else 1)
                if self._quiet_s >= patience_s:
                    return
                if processor_time is not None and min(self._quiet_s, still_s) >= STUCK_S:
                    return
                if asking is None and (self._quiet_s >= patience_s / 2 or (asks_idle and idle_s >= IDLE_S)):
                    asking = asyncio.create_task(self._ask(probe), name="ask a silent engine")
        finally:
            if asking is not None:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    async def _ask(self, probe: Callable[[], Awaitable[object]]) -> None:
        with self.expecting():
            await probe()


def processor_time(processes: Sequence[BaseProcess]) -> float:
    """Seconds of processor time that these processes and their children have used; of those that are gone none."""
    total = 0.0
    for process in _with_children(processes):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def are_stopped(processes: Sequence[BaseProcess]) -> bool:
    """Whether one of these processes or of their children is stopped, by a signal or a debugger."""
    for process in _with_children(processes):
        with suppress(psutil.Error):
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return True
    return False


def _with_children(processes: Sequence[BaseProcess]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with suppress(psutil.Error):
            parent = psutil.Process(process.pid)
            found += [parent, *parent.children(recursive=True)]
    return found


# How an engine's process ended: by itself, as one does that a request kills, or by something outside. Invariant: what could as
# well have come from outside is never called the engine's own.

UNKNOWN = 255
"""Exit code that multiprocessing gives for a process whose fork server is gone."""
CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)
"""Signals that a process brings upon itself."""


@dataclass(frozen=True, slots=True)
class EngineEnding:
    """`by_itself`: see `EngineLost`. `words`: what was seen, to follow "it"."""

    by_itself: bool
    words: str


TAKEN_DOWN = EngineEnding(False, "was taken down")
STOPPED = EngineEnding(False, "was stopped from outside (SIGSTOP), and is killed")
DEAF = EngineEnding(True, "made no progress, and is killed")


def ending_of(exit_codes: Sequence[int | None], *, oom_kills: int = 0) -> EngineEnding:
    """The end of an engine of which vLLM says that it is dead. `exit_codes`: of its processes; None: it still runs, so it said
    itself that it failed. `oom_kills`: processes that Linux ended for want of memory since the engine started."""
    code = next((code for code in exit_codes if code is not None), None)
    if code is None:
        return EngineEnding(True, "failed with an error of its own")
    if code == UNKNOWN:
        return EngineEnding(False, "ended, and nobody saw how")
    if code == 0:
        return EngineEnding(False, "was told to end from outside (SIGTERM), and did")
    if code > 0:
        return EngineEnding(True, f"ended with exit code {code}")
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    if -code in CRASHES:
        return EngineEnding(True, f"crashed ({name})")
    if -code == signal.SIGKILL and oom_kills:
        return EngineEnding(
            False,
            f"was killed ({name}), likely by Linux, which ended {oom_kills} processes meanwhile as memory ran out",
        )
    return EngineEnding(False, f"was killed from outside ({name})")


def oom_kills() -> int:
    """Processes that Linux has ended for want of memory since the machine started; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


class SchedulerStats:
    """Figures of the last step, and counts of all lives of one engine. All zero while no logger is in use: vLLM says this only
    where there is one, and keeps statistics of each request then, a few percent of the engine's time.

    A preemption counts when it was for lack of cache, with the next tokens of its generation. vLLM also preempts all running
    generations when its cache is cleared for new weights; a request's own figures hold both kinds, and are known at its end only.
    """

    def __init__(self) -> None:
        self.preemptions = 0
        self.waiting = 0
        self.kv_share = 0.0
        """Share of the cache's blocks that running generations hold."""
        self._running = 0
        self._cleared = 0
        """Generations that were preempted because the cache was cleared; vLLM says so with their next tokens."""

    @property
    def is_settled(self) -> bool:
        """Generations that were set aside with the cache have their place in it again: `kv_share` is of all that run."""
        return self._cleared == 0

    def cleared(self, *, under_way: int) -> None:
        """The cache was cleared with so many requests under way; those that were running are set aside by that."""
        self._cleared = min(self._running, under_way)

    def step(self, *, running: int, waiting: int, kv_share: float, preempted: int) -> None:
        """Figures after a step. `preempted`: since the step before."""
        by_clearing = min(self._cleared, preempted)
        self.preemptions += preempted - by_clearing
        self._cleared = self._cleared - by_clearing if running or waiting else 0
        self._running, self.waiting, self.kv_share = running, waiting, kv_share

    def logger(self) -> Any:
        """An entry of `AsyncLLM`'s `stat_loggers`: it logs nothing, and keeps what it is given here."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        stats = self

        class QuietLogger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...
            def log_engine_initialized(self) -> None: ...

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                preempted = 0 if iteration_stats is None else iteration_stats.num_preempted_reqs
                if scheduler_stats is not None:
                    stats.step(
                        running=scheduler_stats.num_running_reqs,
                        waiting=scheduler_stats.num_waiting_reqs,
                        kv_share=scheduler_stats.kv_cache_usage,
                        preempted=preempted,
                    )

        return QuietLogger
