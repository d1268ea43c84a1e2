"""The guessing game: find a number in 1..100 in at most 7 guesses; each wrong one is answered with higher or lower.

Made by `env_adapters.adapter`. The invariant: the number follows from the seed and the task's bounds alone, so the members of a
group look for the same one; halving the range always finds it, so the best mean score is 1.0. It does no I/O.
"""

from __future__ import annotations

import random
import re
from typing import Any

from buffers.errors import EnvError
from env_adapters.adapter import EnvAdapter, Message, Step, task_of, user

INVALID = "That is no number. "
WON = "That is it."
LOST = "No guesses left."


class GuessingGame(EnvAdapter):
    """`low`, `high`: bounds of the number, both included; a task's `extra_info` may have bounds of its own."""

    def __init__(self, *, low: int = 1, high: int = 100, guesses: int = 7) -> None:
        self._bounds = low, high
        self._guesses = guesses
        self._won = False

    async def reset(self, task: dict[str, Any], *, seed: int) -> list[Message]:
        info = task_of(task).extra_info
        low, high = int(info.get("low", self._bounds[0])), int(info.get("high", self._bounds[1]))
        if low > high:
            raise EnvError(
                f"low must be <= high in the guessing game, got {low} > {high} in task {task.get('task_id')}; swap them",
                reason="environment reset: bad task",
            )
        self._number = random.Random(f"guess {seed}").randint(low, high)
        self._left = self._guesses
        return [user(f"Guess my number between {low} and {high}. You have {self._left} guesses; answer with a number.")]

    async def step(self, action: str) -> Step:
        """The last number in the text is the guess. A text without one costs the guess."""
        numbers = re.findall(r"-?\d+", action)
        guess = int(numbers[-1][:20]) if numbers else None
        self._left -= 1
        self._won = guess == self._number
        if self._won or self._left == 0:
            return Step(messages=[user(WON if self._won else LOST)], done=True, reward=float(self._won))
        if guess is None:
            return Step(messages=[user(INVALID + self._hint_of_left())], done=False, reward=0.0)
        word = "Higher." if self._number > guess else "Lower."
        return Step(messages=[user(f"{word} {self._hint_of_left()}")], done=False, reward=0.0)

    async def score(self) -> float:
        return float(self._won)

    def _hint_of_left(self) -> str:
        return f"{self._left} guess{'es' if self._left > 1 else ''} left."
