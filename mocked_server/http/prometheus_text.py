"""`GET /metrics` of the administrator's port: engines and counts as Prometheus reads them. The only file that knows its client.

Built by `mocked_server.http.routes`. A registry of its own: what other libraries count in this process is not on the page, and
nothing is kept between two scrapes. Names: `understudy_engine_<figure>{engine="e0"}`, and `understudy_` with the name that a
count has in `GET /status` (`pool/running`: `understudy_pool_running`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mocked_server.fleet.engine_watch import kv_share
from mocked_server.fleet.member import EngineFigures

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "understudy"
GAUGES: dict[str, tuple[str, Callable[[EngineFigures], float]]] = {
    "up": ("1 while the engine takes requests.", lambda engine: engine.is_up),
    "version": ("Policy version that it samples with.", lambda engine: engine.version),
    "running": ("Generations under way.", lambda engine: engine.running),
    "waiting": ("Generations whose prompt waits for room in the cache.", lambda engine: engine.waiting),
    "held_tokens": ("Tokens of the generations under way.", lambda engine: engine.tokens_held),
    "kv_capacity_tokens": ("Tokens that the cache holds; 0: not known yet.", lambda engine: engine.kv_capacity),
    "kv_share": ("held_tokens / kv_capacity_tokens.", kv_share),
}
COUNTERS: dict[str, tuple[str, Callable[[EngineFigures], float]]] = {
    "sampled_tokens": ("Tokens sampled.", lambda engine: engine.sampled_tokens),
    "prompt_tokens": ("Prompt tokens of the generations that ended.", lambda engine: engine.prompt_tokens),
    "cached_tokens": ("Prompt tokens that the cache held already.", lambda engine: engine.cached_tokens),
    "preemptions": ("Generations set aside for lack of cache.", lambda engine: engine.preemptions),
    "restarts": ("Processes started in place of dead ones.", lambda engine: engine.restarts),
    "moved_in": ("Episodes that came from another engine.", lambda engine: engine.moved_in),
}
COUNTED = ("pool/started", "pool/scored", "pool/failed", "pool/closed")
"""Counts of the status that only grow; the others are gauges."""


class PrometheusText:
    """`status`: counts by name, as `GET /status` has them; what is no number is left out. `engines`: the figures of all engines."""

    def __init__(
        self, *, status: Callable[[], Mapping[str, Any]], engines: Callable[[], Sequence[EngineFigures]]
    ) -> None:
        self._status = status
        self._engines = engines
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def page(self) -> bytes:
        """The text of one scrape."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: what there is depends on the scrape. The registry asks this once."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The figures now."""
        engines = list(self._engines())
        for kind, figures in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (meaning, value) in figures.items():
                family = kind(f"{PREFIX}_engine_{name}", meaning, labels=["engine"])
                for engine in engines:
                    family.add_metric([engine.name], float(value(engine)))
                yield family
        for name, value in self._status().items():
            if isinstance(value, int | float):
                kind = CounterMetricFamily if name in COUNTED else GaugeMetricFamily
                yield kind(f"{PREFIX}_{name.replace('/', '_')}", f"{name} of GET /status.", value=float(value))
