"""All engines of a run as the one engine that generation, weight sync and the admin's routes ask.

Built by `learner.pipeline`. A request is routed here, inside `generate` (`mocked_server.fleet.routing`): no router stands between
the server and its engines. `run` is the loop that keeps the engines alive.

Loop row: `run` waits for the death of each engine; gives a new process in its place; unblocked by nothing else. An engine whose
restarts are used up leaves the fleet; the run ends when it was the last.

Invariants: weights are loaded by one engine after the other, and each pauses for its own copy only; a request that finds no engine
waits for one; what a dead engine had sampled goes to the caller, in EngineLost, and is continued on another
(`mocked_server.generation`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from buffers.errors import EngineDied, EngineError
from mocked_server.fleet.member import (
    AdapterEngine,
    EngineFigures,
    EngineLost,
    FleetEngine,
    LayerEngine,
    Probed,
    Sampled,
    probe,
)
from mocked_server.fleet.routing import Routes

logger = logging.getLogger(__name__)

PROBE_DEATHS = 4
"""One more than a request takes that kills engines (`mocked_server.generation`) and is under way beside the probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Caller of a request, for its route. `alone`: its engine serves nothing else meanwhile, and is none of `apart_from`, where
    there is another one."""

    episode_id: str
    group_id: int | None = None
    alone: bool = False
    apart_from: frozenset[str] = frozenset()


def _never_again(_: str, error: Exception) -> None:
    raise error


class EngineFleet:
    """`engines`: at least one, with names of their own; those that are up already take requests at once. `record_death(engine,
    error)`: counts a death, and raises `error` when that engine may not be started again. `max_policy_lag`: see `Routes`."""

    def __init__(
        self,
        engines: Sequence[FleetEngine],
        *,
        record_death: Callable[[str, Exception], None] = _never_again,
        max_policy_lag: int | None = None,
    ) -> None:
        if not engines:
            raise EngineError("a fleet needs at least one engine, got none; set rollout.engines=1")
        self._engines = {engine.name: engine for engine in engines}
        self._record_death = record_death
        self._routes = Routes(max_policy_lag=max_policy_lag)
        self._changed = asyncio.Event()
        self.version = 0
        """Newest version of the policy that was given to engines."""
        self.is_supervised = False
        """`run` starts engines that died again."""
        self._keeping: asyncio.TaskGroup | None = None
        self._starting: list[FleetEngine] = []
        """Engines that `add` starts."""
        self._serving: Counter[str] = Counter()
        """Engine -> its requests under way."""
        self._reserved: set[str] = set()
        """Engines that serve one request alone."""
        self._weights: tuple[Path, int] | None = None
        """(folder, version) of the newest."""
        for engine in engines:
            if engine.is_up:
                self._join(engine)

    @property
    def names(self) -> list[str]:
        """The names of its engines, of those that start again too."""
        return list(self._engines)

    async def start(self) -> None:
        """Start all engines; returns when they take requests. Raises EngineError when one does not come up."""
        async with asyncio.TaskGroup() as starting:
            for engine in self._engines.values():
                starting.create_task(self._start(engine), name=f"start engine {engine.name}")
        for engine in self._engines.values():
            self._join(engine)

    async def _start(self, engine: FleetEngine) -> None:
        while True:
            try:
                return await engine.start()
            except EngineDied as death:  # killed meanwhile
                self._record_death(engine.name, death)

    async def run(self) -> None:
        """Restart engines that die, until cancelled. Raises EngineError when none is left."""
        self.is_supervised = True
        async with asyncio.TaskGroup() as self._keeping:
            for engine in list(self._engines.values()):
                self._keeping.create_task(self._keep(engine), name=f"keep engine {engine.name}")
            await asyncio.Event().wait()

    async def add(self, engine: FleetEngine) -> None:
        """Start one more engine with the newest weights; it takes requests when this returns. Raises EngineError when it does not
        come up."""
        self._starting.append(engine)  # it is given newer weights meanwhile: the files of older ones go
        try:
            if self._weights is not None:
                await engine.load_weights(self._weights[0], version=self._weights[1])
            await self._start(engine)
            while (weights := self._weights) is not None and engine.is_up and engine.version != weights[1]:
                await engine.load_weights(weights[0], version=weights[1])
        finally:
            self._starting.remove(engine)
        self._engines[engine.name] = engine
        self._join(engine)
        if self._keeping is not None:
            self._keeping.create_task(self._keep(engine), name=f"keep engine {engine.name}")

    async def remove(self, name: str) -> None:
        """End an engine; others continue what it was sampling."""
        engine = self._engines.pop(name)
        self._routes.leave(name)
        self._tell_change()
        await engine.close()

    async def _keep(self, engine: FleetEngine) -> None:
        while True:
            await engine.until_dead()
            self._routes.leave(engine.name)
            if engine.name not in self._engines:  # removed
                return
            error: EngineError = EngineError(
                f"the process of engine {engine.name} died, see the run's log for how; scored episodes are in the ledger"
            )
            while True:
                try:
                    self._record_death(engine.name, error)
                except EngineError as last:
                    return await self._dismiss(engine, last)
                try:
                    await engine.restart()
                    break
                except EngineError as again:
                    error = again
            self._join(engine)

    async def _dismiss(self, engine: FleetEngine, error: EngineError) -> None:
        """Drop an engine that died too often. Raises `error` when no other engine is left."""
        del self._engines[engine.name]
        self._tell_change()
        await engine.close()
        if not self._engines:
            raise error
        logger.error("engine %s leaves the fleet, %d are left: %s", engine.name, len(self._engines), error)

    def _join(self, engine: FleetEngine) -> None:
        """It takes requests, with the weights that it has."""
        self.version = max(self.version, engine.version)
        if engine.name not in self._reserved:
            self._routes.join(engine.name, version=engine.version)
        self._tell_change()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # What generation asks

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: Any,
        *,
        request_id: str,
        caller: Caller,
        sampled: Sequence[Sampled] = (),
        **extra: Any,
    ) -> AsyncGenerator[Any, None]:
        """Yield vLLM's RequestOutputs of the engine that serves this caller. Raises EngineLost when that dies meanwhile; a
        request that finds none waits until one is back."""
        tokens = len(prompt_token_ids) + sum(len(one.token_ids) for one in sampled)
        async with self._engine_alone(caller) if caller.alone else self._engine_among_others(caller, tokens) as engine:
            outputs = engine.generate(prompt_token_ids, params, request_id=request_id, sampled=sampled, **extra)
            async with aclosing(outputs):
                async for output in outputs:
                    yield output

    @asynccontextmanager
    async def _engine_among_others(self, caller: Caller, tokens: int) -> AsyncGenerator[FleetEngine, None]:
        engine = await self._engine_for(caller, tokens)
        self._serving[engine.name] += 1
        try:
            yield engine
        finally:
            self._serving[engine.name] -= 1
            if engine.name in self._reserved:
                self._tell_change()

    @asynccontextmanager
    async def _engine_alone(self, caller: Caller) -> AsyncGenerator[FleetEngine, None]:
        """An engine that takes no other call until this ends, once what it serves has ended."""
        while True:
            names = [name for name in self._routes.open() if name in self._engines and self._engines[name].is_up]
            if not names:
                await self._changed.wait()
                continue
            name = min(names, key=lambda name: (name in caller.apart_from, self._serving[name]))
            engine = self._engines[name]
            self._reserved.add(name)
            self._routes.leave(name)
            try:
                while self._serving[name] and engine.is_up:
                    await self._changed.wait()
                if engine.is_up:
                    yield engine
                    return
            finally:
                self._reserved.discard(name)
                if engine.is_up and name in self._engines:
                    self._join(engine)

    async def _engine_for(self, caller: Caller, tokens: int) -> FleetEngine:
        while True:
            name = self._routes.choose(caller.episode_id, group=caller.group_id, tokens=tokens)
            if name is None:
                await self._changed.wait()
                continue
            engine = self._engines.get(name)
            if engine is not None and engine.is_up:
                return engine
            self._routes.leave(name)  # it is dead, and `run` has not looked yet

    async def wait_restarted(self) -> bool:
        """True if engines that die are replaced, so that a request may be sent again."""
        return self.is_supervised

    def forget(self, episode_id: str) -> None:
        """The episode has ended: it weighs on no engine."""
        self._routes.forget(episode_id)

    # What is compared with the learner

    async def probe(self, prompt_token_ids: Sequence[int], *, params: Any, role: str = "") -> dict[str, Probed]:
        """Engine -> what it samples after this prompt, see `mocked_server.fleet.member`; of one at least, without those that are
        down. One that dies of something outside, or beside other requests, is asked again when it is back. Raises EngineLost for
        one that ends by itself PROBE_DEATHS times."""
        samples: dict[str, Probed] = {}
        deaths = list[tuple[str, int]]()
        while True:
            left = [one for name, one in self._engines.items() if name not in samples]
            engine = next((one for one in left if one.is_up or not self.is_supervised), None)
            if engine is None and samples:
                return samples
            if engine is None:
                await self._changed.wait()
                continue
            is_alone = not self._serving[engine.name]
            try:
                samples[engine.name] = await probe(engine, prompt_token_ids, params=params, role=role)
            except EngineLost as lost:
                if lost.by_itself and is_alone and lost.life not in deaths:
                    deaths.append(lost.life)
                if not self.is_supervised or [name for name, _ in deaths].count(engine.name) == PROBE_DEATHS:
                    raise

    async def layer_states(self, name: str, prompt_token_ids: Sequence[int], *, role: str = "") -> list[bytes]:
        """See `LayerEngine`; empty for an engine that cannot show them."""
        engine = self._engines.get(name)
        return await engine.layer_states(prompt_token_ids, role=role) if isinstance(engine, LayerEngine) else []

    # Weights and memory

    async def load_weights(self, folder: Path, *, version: int) -> float:
        """Give the weights to each engine in turn. One that is down gets them with its restart. Returns the seconds that the
        engine with the longest pause has paused."""
        self.version, self._weights = version, (folder, version)
        self._routes.publish(version)
        longest = 0.0
        for engine in [*self._engines.values(), *self._starting]:
            longest = max(longest, await engine.load_weights(folder, version=version))
            if engine.is_up and engine.version == version and engine.name in self._engines:
                self._join(engine)
        return longest

    async def load_adapter(self, folder: Path, *, role: str, version: int) -> float:
        """Give a role's adapter to each engine in turn, as `load_weights` does. Versions of several roles are not compared: no
        engine lags more than the load that is under way. Raises EngineError for an engine that has no adapters by role."""
        longest = 0.0
        for engine in self._engines.values():
            if not isinstance(engine, AdapterEngine):
                raise EngineError(
                    f"engine {engine.name} must have an adapter for each role, and cannot; set learner.lora.per_role=false"
                )
            longest = max(longest, await engine.load_adapter(folder, role=role, version=version))
            self.version = max(self.version, engine.version)
        return longest

    async def sleep(self) -> None:
        """Give the memory of all engines back until `wake_up`."""
        await asyncio.gather(*(engine.sleep() for engine in self._engines.values()))

    async def wake_up(self) -> None:
        """Undo `sleep`."""
        await asyncio.gather(*(engine.wake_up() for engine in self._engines.values()))

    def figures(self) -> list[EngineFigures]:
        """The figures of each engine, in the order of their names."""
        return [
            replace(engine.figures(), moved_in=self._routes.moved_in(name))
            for name, engine in sorted(self._engines.items())
        ]

    async def close(self) -> None:
        """End all engines."""
        self.is_supervised = False
        await asyncio.gather(*(engine.close() for engine in [*self._engines.values(), *self._starting]))
