"""A game of TextArena, for one player or several. A task says which: `extra_info` has `game`, `players`, `options`, `seed`.

Made by `env_adapters.adapter`; `data.tasks: textarena://NAME` makes such tasks. Invariants: a game is made and played in one
thread; the player whose turn it is reads what was said since its last move; an invalid move is the game's to answer, and scores
are its rewards for each player. A game that is cut short scores 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from buffers.errors import EnvError
from buffers.records import Task
from buffers.tasks.textarena_games import Game, in_time, players_of
from env_adapters.adapter import EnvAdapter, Message, Step, user
from env_adapters.guarded_calls import WorkerThread


class TextArenaEnv(EnvAdapter):
    """See the module."""

    def __init__(self) -> None:
        self._thread: WorkerThread | None = None
        self._game: Game

    async def reset(self, task: dict[str, Any], *, seed: int) -> list[Message]:
        """A task without a seed of its own is played with the group's."""
        named = _named(task.get("extra_info") or {}, task_id=str(task.get("task_id")))
        self._thread = WorkerThread(f"textarena {named['name']}")
        self._game = await self._thread.call(lambda: _begun({"seed": seed, **named}))
        return [user(self._game.told())]

    @property
    def player(self) -> int:
        return self._game.player

    async def step(self, action: str) -> Step:
        assert self._thread is not None, "reset() first"
        done = await self._thread.call(lambda: self._game.move(action))
        return Step(messages=[] if done else [user(self._game.told())], done=done)

    async def score(self) -> float:
        return (await self.scores())[0]

    async def scores(self) -> list[float]:
        return self._game.scores()

    async def close(self) -> None:
        if self._thread is not None:
            await self._thread.end(lambda: None)

    @classmethod
    def check(cls, task: Task) -> int:
        """See `EnvAdapter`. Each game is begun once, with these players and options."""
        named = _named(task.extra_info, task_id=task.task_id)
        return _checked(named["name"], named["players"], json.dumps(named["options"], sort_keys=True))


def _named(info: Mapping[str, Any], *, task_id: str) -> dict[str, Any]:
    """Arguments of `Game` that a task gives. Raises EnvError."""
    kinds = {"game": str, "players": int, "options": Mapping, "seed": int}
    given = {"options": {}, **{key: info[key] for key in kinds if info.get(key) is not None}}
    wrong = [key for key, kind in kinds.items() if not isinstance(given.get(key, 0 if key == "seed" else None), kind)]
    if wrong:
        raise EnvError(
            f"extra_info.{wrong[0]} of task {task_id!r:.60} must be there as {kinds[wrong[0]].__name__}, got "
            f"{info.get(wrong[0])!r:.60}; name the tasks by data.tasks=textarena://GAME, or write game, players and options",
            reason="environment reset: bad task",
        )
    return {"name": given.pop("game"), **given}


def _begun(named: Mapping[str, Any]) -> Game:
    try:
        return Game(**named)
    except ValueError as error:
        raise EnvError(str(error), reason="environment reset: make") from error


@lru_cache(maxsize=1024)
def _checked(name: str, players: int, options: str) -> int:
    try:
        return in_time(lambda: players_of(name, players=players, options=json.loads(options)))
    except ValueError as error:
        raise EnvError(str(error), reason="environment reset: make") from error
