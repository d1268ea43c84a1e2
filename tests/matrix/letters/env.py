"""An environment that any text pleases more or less: the share of letters of the first half of the alphabet, over some turns."""

from __future__ import annotations

import asyncio
from typing import Any

from buffers.records import Task
from env_adapters.adapter import EnvAdapter, Step, user


class Letters(EnvAdapter):
    """`turns` answers, or as many as the task's `extra_info.turns`, each followed by its `pause_s` seconds. `step_rewards`: each
    step is rewarded, and the episode's own score is 0."""

    def __init__(self, *, turns: int = 2, step_rewards: bool = False) -> None:
        self._turns = turns
        self._step_rewards = step_rewards
        self._pause_s = 0.0
        self._shares: list[float] = []

    async def reset(self, task: dict[str, Any], *, seed: int) -> list[dict[str, Any]]:
        extra_info = task.get("extra_info") or {}
        self._turns = extra_info.get("turns", self._turns)
        self._pause_s = extra_info.get("pause_s", 0.0)
        return list(task["prompt"])

    async def step(self, action: str) -> Step:
        await asyncio.sleep(self._pause_s)
        self._shares.append(early_share(action))
        reward = self._shares[-1] if self._step_rewards else None
        return Step(messages=[user("More.")], done=len(self._shares) >= self._turns, reward=reward)

    async def score(self) -> float:
        return 0.0 if self._step_rewards or not self._shares else sum(self._shares) / len(self._shares)


class Duel(EnvAdapter):
    """Two players say something in turn, twice each. Who says the larger share of letters of the first half of the alphabet gets
    1, the other -1; a game that is cut short is nobody's."""

    def __init__(self) -> None:
        self._said: list[str] = []

    @property
    def player(self) -> int:
        return len(self._said) % 2

    async def reset(self, task: dict[str, Any], *, seed: int) -> list[dict[str, Any]]:
        return [user("You are player 0.")]

    async def step(self, action: str) -> Step:
        self._said.append(action)
        return Step(
            messages=[user(f"You are player {self.player}. The other said {action}.")], done=len(self._said) == 4
        )

    async def score(self) -> float:
        return (await self.scores())[0]

    async def scores(self) -> list[float]:
        first, second = (early_share("".join(self._said[player::2])) for player in (0, 1))
        lead = float((first > second) - (first < second)) if len(self._said) == 4 else 0.0
        return [lead, -lead]

    @classmethod
    def check(cls, task: Task) -> int:
        return 2


def early_share(text: str) -> float:
    """Share of the text's letters that come before n; 0 of none."""
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return sum(letter < "n" for letter in letters) / max(len(letters), 1)
