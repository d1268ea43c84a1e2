"""Starts the learner's ranks with their state, and restarts them when a process died.

Built by `learner.pipeline`, which runs `start` while the engine starts; used by `learner.learn_loop`. Invariant: when `start` or
`restart` returns, all ranks hold the state of the given checkpoint, or that of the run's start (after the warm start).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from configs.schema import WarmStartConfig
from learner.checkpoints.store import Checkpoint
from learner.recovery.restart_limit import RestartLimit
from learner.training.ranks import LearnerRanks, RankDied


class LearnerProcesses:
    """`on_warm_start`: called with the metrics of each warm start."""

    def __init__(
        self,
        ranks: LearnerRanks,
        *,
        warm_start: WarmStartConfig,
        seed: int,
        restart_limit: RestartLimit,
        on_warm_start: Callable[[dict[str, float]], None],
    ) -> None:
        self.ranks = ranks
        self._warm_start = warm_start
        self._seed = seed
        self._restart_limit = restart_limit
        self._on_warm_start = on_warm_start

    async def start(self, checkpoint: Checkpoint | None) -> None:
        """Needs Ray. Raises RankDied when they die too often, RankFailed."""
        while True:
            try:
                await self.ranks.start()
                return await self._prepare(checkpoint)
            except RankDied as death:
                self._restart_limit.record("learner", death)
            except asyncio.CancelledError:
                self.ranks.kill()  # `close` would wait for the end of the warm start
                raise

    async def restart(self, death: RankDied, checkpoint: Checkpoint | None) -> None:
        """Start them again after `death`. Raises as `start`."""
        self._restart_limit.record("learner", death)
        await self.start(checkpoint)

    async def _prepare(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            await self.ranks.load(checkpoint.learner)
        elif self._warm_start.demonstrations:
            traces, steps, lr = Path(self._warm_start.demonstrations), self._warm_start.steps, self._warm_start.lr
            self._on_warm_start(await self.ranks.warm_start(traces, steps=steps, lr=lr, seed=self._seed))
