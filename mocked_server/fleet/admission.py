"""How many episodes may run, by what the engines can hold: slots grow with each turnover of the pool, and are cut at once.

Asked twice a second by `mocked_server.fleet.engine_watch`. A pure state machine: no tasks, no clock and no engines of its own.
Invariant: the slots never grow while an engine preempts, lets prompts wait, or uses more than `GROW_BELOW` of its cache; an
engine that joins brings its share of slots all the same. No running episode is cancelled: what is too much ends by itself, and
until then engines set generations aside, which costs their prefill and no agent's work.

Rules and constants are those that prime-rl has measured (`orchestrator/concurrency.py`, August 2026; AIMD), at polls 5 s apart.
It cancels the youngest episodes above `TRIM_AGAIN_ABOVE`, makes a pause of 30 s between two trims where this one waits for the
pool to drain, and grows as soon as usage is low: here that must have lasted for a turnover, because episodes that start together
also end together, and leave an empty cache behind.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mocked_server.fleet.member import EngineFigures

logger = logging.getLogger(__name__)

GROWTH = 1.25
"""Slots are multiplied by this while as many episodes end as may run at once (a turnover)."""
BINDING = 0.9
"""Slots grow only while at least this share of them is in use, give or take one episode."""
GROW_BELOW = 0.6
"""Slots grow only while every engine uses less than this share of its cache, and has done so for a turnover."""
TRIM_ABOVE = 0.8
"""Slots are lowered, to what would use `TRIM_TO`, when an engine uses more than this."""
TRIM_TO = 0.7
TRIM_AGAIN_ABOVE = 0.9
"""Slots are lowered again even before the pool has drained to the last trim: contexts grow faster than episodes end."""
QUEUE = 0.5
"""Prompts that wait for room in a cache, as a share of the generations that have it: more of them are too many."""
QUEUE_S = 30.0
"""A queue is a reason to cut when it lasted so long; bursts of turns that end together are shorter."""
CUT_BY_QUEUE = 0.9
CUT_BY_PREEMPTION = 0.8
CUT_AGAIN = 0.5
"""Shares of the running episodes that keep a slot: at a queue, at a preemption, and at either within `RELAPSE_S` after the pool
has drained to an earlier cut."""
RELAPSE_S = 30.0
PERMISSION_S = 15.0
"""Seconds after which the permission of the last look is void: an overload may be what kept the next look from being made."""


class Admission:
    """`slots`: episodes that may run at once. They begin with what the caches hold of the longest episodes."""

    def __init__(self, *, episode_tokens: int, most: int) -> None:
        """`episode_tokens`: of the longest possible episode (`rollout.max_model_len`); `most`: there are never more slots."""
        if episode_tokens < 1 or most < 1:
            raise ValueError(f"episode_tokens and most must be >= 1, got {episode_tokens} and {most}")
        self._episode_tokens = episode_tokens
        self._most = most
        self._exact = 1.0
        """The slots before they are rounded down."""
        self._capacity = 0
        """Tokens that the caches of the engines of the last look hold."""
        self._num_engines = 1
        self._preemptions: dict[str, int] = {}
        """Engine -> its count at the last look."""
        self._num_running = 0
        """Episodes that ran at the last look."""
        self._num_ended = 0
        self._num_calm = float("inf")
        """Episodes that ended since an engine used `GROW_BELOW` or preempted."""
        self._may_grow_until = float("-inf")
        self._queued_since: float | None = None
        self._is_draining = False
        """More episodes run than the last cut left; preemptions meanwhile are no news."""
        self._relapses_until = float("-inf")

    @property
    def slots(self) -> int:
        """Episodes that may run at once."""
        return int(self._exact)

    def look(self, engines: Sequence[EngineFigures], *, running: int, ended: int, now: float) -> int:
        """The slots from now on. `running`: episodes under way; `ended`: those that ended with a score, since the start;
        `now`: monotonic seconds. Engines that are down, or whose cache is not known yet, count for nothing; without any other
        nothing changes."""
        num_ended, self._num_ended = ended - self._num_ended, ended
        load, self._num_running = max(running, self._num_running), running
        there = [engine for engine in engines if engine.is_up and engine.kv_capacity > 0]
        preempted = self._preempted(there)
        if not there:
            self._may_grow_until, self._queued_since = now, None
            return self.slots
        self._fit(there)
        usage = max(engine.tokens_held / engine.kv_capacity for engine in there)
        has_queue = self._has_queue(there, now=now)
        if self._is_draining and running <= self.slots and not preempted and not has_queue:
            self._is_draining = False
            self._relapses_until = now + RELAPSE_S
        self._num_calm = 0.0 if preempted or usage >= GROW_BELOW else self._num_calm + num_ended
        has_room = self._num_calm >= self.slots and not any(engine.waiting for engine in there)
        may_grow = has_room and not self._is_draining
        if self._is_draining:
            pass
        elif preempted or has_queue:
            self._cut(load, preempted=preempted, now=now)
        elif usage > TRIM_AGAIN_ABOVE or (usage > TRIM_ABOVE and running <= self.slots):
            self._lower(running * TRIM_TO / usage, why=f"an engine uses {usage:.0%} of its cache")
        elif may_grow and now < self._may_grow_until and running + 1 >= BINDING * self.slots:
            # One turnover at most: what it has let in must show in the figures before more is.
            self._set(self._exact * GROWTH ** min(1.0, num_ended / self.slots))
        self._may_grow_until = now + PERMISSION_S if may_grow else now
        return self.slots

    def _fit(self, engines: Sequence[EngineFigures]) -> None:
        """Slots follow the engines that come and go."""
        capacity = sum(engine.kv_capacity for engine in engines)
        self._num_engines = len(engines)
        if not self._capacity:
            self._set(capacity / self._episode_tokens)
        elif capacity != self._capacity:
            self._set(self._exact * capacity / self._capacity)
        self._capacity = capacity

    def _preempted(self, engines: Sequence[EngineFigures]) -> bool:
        """True if an engine has preempted since the last look."""
        before, self._preemptions = self._preemptions, {engine.name: engine.preemptions for engine in engines}
        return any(count > before.get(name, count) for name, count in self._preemptions.items())

    def _has_queue(self, engines: Sequence[EngineFigures], *, now: float) -> bool:
        """True if too many prompts have waited for too long."""
        waiting = sum(engine.waiting for engine in engines)
        busy = sum(engine.running for engine in engines) - waiting
        if busy <= 0 or waiting <= QUEUE * busy:
            self._queued_since = None
            return False
        if self._queued_since is None:
            self._queued_since = now
        return now - self._queued_since >= QUEUE_S

    def _cut(self, load: int, *, preempted: bool, now: float) -> None:
        """`load`: episodes of this look or the last one, if more: engines tell of a preemption when it is over."""
        share = CUT_BY_PREEMPTION if preempted else CUT_BY_QUEUE
        if now < self._relapses_until:
            share = CUT_AGAIN
        self._lower(load * share, why="an engine preempts" if preempted else "prompts wait for room in a cache")
        self._is_draining = True
        self._queued_since = None

    def _lower(self, wanted: float, *, why: str) -> None:
        before = self.slots
        self._set(min(self._exact, wanted))
        if self.slots < before:
            logger.info("%d episodes may run instead of %d: %s", self.slots, before, why)

    def _set(self, wanted: float) -> None:
        """At least one slot for each engine."""
        self._exact = min(max(wanted, float(self._num_engines)), float(self._most))
