"""The demo game: find the exit of a 5 x 5 room in at most 8 moves, by following one hint per move.

Called by `env_adapters.walk.server` (which plays it with an agent), `env_adapters.walk.make_data` (which writes its
tasks and its traces for SFT) and `env_adapters.adapter` (which makes the adapter). The invariant: the same task and
the same answers give the same transcript, on every machine; following each hint always reaches the exit, so the best
mean score is 1.0. It does no I/O and knows no model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from buffers.records import Task
from env_adapters.adapter import EnvAdapter, Message, Step, task_of, user

SIZE = 5
MAX_MOVES = 8
"""The longest shortest way: from one corner to the opposite one."""
KEYS = {"w": (0, -1), "a": (-1, 0), "s": (0, 1), "d": (1, 0)}
"""Answer -> step (x to the east, y to the south)."""
NAMES = {"w": "north", "a": "west", "s": "south", "d": "east"}
RULES = "Find the exit. Move with w, a, s or d."
INVALID = "Invalid move. "
WON = "You are out."
LOST = "No moves left."


class WalkGame:
    """One episode. `reset` gives the first messages, `step` takes an answer until it says done."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.reset()

    @property
    def hinted_key(self) -> str:
        """The answer that the last hint asks for."""
        return self._hinted

    def reset(self) -> list[Message]:
        self._place: tuple[int, int] = _point(self._task.extra_info["start"])
        self._exit: tuple[int, int] = _point(self._task.ground_truth["exit"])
        self._random = random.Random(self._task.ground_truth["hint_seed"])
        self._moves = 0
        self._done = False
        return [{"role": "system", "content": RULES}, {"role": "user", "content": self._hint()}]

    def step(self, text: str) -> tuple[str, bool, float | None]:
        """Take one answer: (observation, done, score). The score is None until the game is done.

        An answer that is not one of the four letters costs the move; so does a wall. Raises ValueError after the end.
        """
        if self._done:
            raise ValueError(
                f"a finished game takes no move, got {text!r} for {self._task.task_id}; call reset() first"
            )
        key = text.strip().lower()
        self._moves += 1
        if key in KEYS:
            self._place = _inside(self._place, step=KEYS[key])
        won = self._place == self._exit
        self._done = won or self._moves == MAX_MOVES
        if self._done:
            return (WON if won else LOST), True, 1.0 if won else 0.0
        return ("" if key in KEYS else INVALID) + self._hint(), False, None

    def _hint(self) -> str:
        (x, y), (exit_x, exit_y) = self._place, self._exit
        useful = []
        if x != exit_x:
            useful.append("d" if exit_x > x else "a")
        if y != exit_y:
            useful.append("s" if exit_y > y else "w")
        self._hinted = self._random.choice(useful)
        return f"The exit is {NAMES[self._hinted]}."


class WalkEnv(EnvAdapter):
    """The game as an adapter, played without a process of its own. The start, the exit and the hints are the task's, so the seed
    changes nothing: the members of a group have them in common."""

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


def walk_tasks(num_tasks: int, *, seed: int) -> list[Task]:
    """Random start, exit and hints. What the agent may see names neither the exit nor the seed of the hints."""
    draw = random.Random(f"walk tasks {seed}")
    return [_task(f"walk-{seed}-{index}", draw=draw) for index in range(num_tasks)]


def walk_traces(num_traces: int, *, seed: int, helpful: float = 0.1) -> Iterator[list[Message]]:
    """Conversations of nearly random play, message for message as an agent's own, from the rules to its last answer.

    `helpful` is the share of moves that follow the hint on purpose; the others are drawn from the four letters. They
    teach a model to speak the protocol, not to play.
    """
    draw = random.Random(f"walk traces {seed}")
    for index in range(num_traces):
        game = WalkGame(_task(f"trace-{seed}-{index}", draw=draw))
        messages = game.reset()
        while True:
            answer = game.hinted_key if draw.random() < helpful else draw.choice(list(KEYS))
            messages.append({"role": "assistant", "content": answer})
            observation, done, _ = game.step(answer)
            if done:
                break
            messages.append({"role": "user", "content": observation})
        yield messages


def _task(task_id: str, *, draw: random.Random) -> Task:
    start, exit_ = draw.sample([(x, y) for y in range(SIZE) for x in range(SIZE)], 2)
    truth = {"exit": list(exit_), "hint_seed": draw.randrange(2**31)}
    unprompted = Task(task_id=task_id, prompt=[], ground_truth=truth, extra_info={"start": list(start)})
    return Task(
        task_id=task_id,
        prompt=WalkGame(unprompted).reset(),
        data_source="walk",
        ground_truth=truth,
        extra_info=unprompted.extra_info,
    )


def _point(pair: list[int]) -> tuple[int, int]:
    x, y = pair
    return x, y


def _inside(place: tuple[int, int], *, step: tuple[int, int]) -> tuple[int, int]:
    x, y = place[0] + step[0], place[1] + step[1]
    return min(max(x, 0), SIZE - 1), min(max(y, 0), SIZE - 1)
