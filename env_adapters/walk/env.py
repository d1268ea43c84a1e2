"""The demo's walk game as an adapter: the rules of `env_adapters.walk.game`, played without a process of its own.

Made by `env_adapters.catalog`. The start, the exit and the hints are the task's, so the seed changes nothing: the members of a
group have them in common.
"""

from __future__ import annotations

from typing import Any

from env_adapters.adapter import EnvAdapter, Message, Step, task_of, user
from env_adapters.walk.game import WalkGame


class WalkEnv(EnvAdapter):
    """One walk through the room."""

    def __init__(self) -> None:
        self._score = 0.0

    async def reset(self, task: dict[str, Any], *, seed: int) -> list[Message]:
        self._game = WalkGame(task_of(task))
        return self._game.reset()

    async def step(self, action: str) -> Step:
        observation, done, score = self._game.step(action)
        self._score = score or 0.0
        return Step(messages=[user(observation)], done=done, reward=score)

    async def score(self) -> float:
        return self._score
