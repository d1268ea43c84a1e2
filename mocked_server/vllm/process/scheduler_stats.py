"""What vLLM's scheduler says of itself after each step: prompts that wait, cache in use, generations set aside.

Owned by `VLLMEngine`, which gives vLLM the logger. vLLM sends this only where there is a logger of some kind, and keeps statistics
of each request then: a few percent of the engine's time. Invariant: a preemption counts when it was for lack of cache, with the
next tokens of its generation. vLLM also preempts all running generations when its cache is cleared for new weights; a request's
own figures hold both kinds, and are known at its end only.
"""

from __future__ import annotations

from typing import Any


class SchedulerStats:
    """Figures of the last step, and counts of all lives of one engine. All zero while no logger is in use."""

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
