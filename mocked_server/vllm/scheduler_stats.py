"""What vLLM's scheduler says of itself after each step: prompts that wait, cache in use, generations set aside.

Owned by `VLLMEngine`, which gives vLLM the logger. vLLM sends this only where there is a logger of some kind, and keeps statistics
of each request then: a few percent of the engine's time. A preemption is counted as it happens, where a request's own figures
tell of it at the request's end; and a prefix that generations share counts once.
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

    def logger(self) -> Any:
        """An entry of `AsyncLLM`'s `stat_loggers`: it logs nothing, and keeps what it is given here."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        stats = self

        class QuietLogger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...
            def log_engine_initialized(self) -> None: ...

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    stats.waiting = scheduler_stats.num_waiting_reqs
                    stats.kv_share = scheduler_stats.kv_cache_usage
                if iteration_stats is not None:
                    stats.preemptions += iteration_stats.num_preempted_reqs

        return QuietLogger
