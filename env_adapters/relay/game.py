"""The relay game: a scout sees where the exit is and says one letter; a runner hears the letter and moves. Neither wins alone.

Called by `env_adapters.relay.server` (which plays it with an agent) and `env_adapters.relay.make_data`. Invariants: the same task
and the same answers give the same transcript; a scout who always says another letter for another way, and a runner who knows them,
score 1. The roles are paid in coins of their own: a right move is worth `SCOUT_PAY` to the scout and 1 to the runner. It does no
I/O and knows no model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from buffers.records import Task

TURNS = 2
KEYS = "wasd"
NAMES = {"w": "north", "a": "west", "s": "south", "d": "east"}
SCOUT, RUNNER = "scout", "runner"
RULES = {SCOUT: "You see the exit. Say w, a, s or d.", RUNNER: "You hear the scout. Move with w, a, s or d."}
SCOUT_PAY = 100.0

Message = dict[str, Any]


class RelayGame:
    """One episode: `scout` gives what the scout reads next, `runner` what the runner reads of the scout's answer; `move` ends a
    turn."""

    def __init__(self, task: Task) -> None:
        self._draw = random.Random(task.ground_truth["seed"])
        self._turn = 0
        self._right = 0
        self._way = ""

    @property
    def way(self) -> str:
        """The letter of the exit's direction in this turn."""
        return self._way

    @property
    def is_done(self) -> bool:
        """All turns were played."""
        return self._turn == TURNS

    def scout(self) -> list[Message]:
        """A turn begins: new messages for the scout."""
        self._way = self._draw.choice(KEYS)
        return [*self._rules(SCOUT), {"role": "user", "content": f"The exit is {NAMES[self._way]}."}]

    def runner(self, said: str) -> list[Message]:
        """New messages for the runner, who hears the first letter of what was said, if it is one of the four."""
        letter = said.strip().lower()[:1]
        heard = f"The scout says {letter}." if letter and letter in KEYS else "The scout says nothing."
        return [*self._rules(RUNNER), {"role": "user", "content": heard}]

    def move(self, text: str) -> None:
        """The runner's answer ends the turn."""
        self._right += text.strip().lower() == self._way
        self._turn += 1

    def scores(self) -> dict[str, float]:
        """The whole's share of right moves under the name `""`, and what each role is paid."""
        share = self._right / TURNS
        return {"": share, SCOUT: SCOUT_PAY * share, RUNNER: share}

    def _rules(self, role: str) -> list[Message]:
        return [{"role": "system", "content": RULES[role]}] if self._turn == 0 else []


def relay_tasks(num_tasks: int, *, seed: int) -> list[Task]:
    """Random exits. An agent may not see them."""
    draw = random.Random(f"relay tasks {seed}")
    return [_task(f"relay-{seed}-{index}", draw.randrange(2**31)) for index in range(num_tasks)]


def relay_traces(num_traces: int, *, seed: int, helpful: float) -> Iterator[list[Message]]:
    """Conversations of one role each, of nearly random play: they teach who speaks when. `helpful`: share of answers in which the
    scout says the exit's own letter, and the runner does what is said."""
    draw = random.Random(f"relay traces {seed}")
    for index in range(num_traces):
        game = RelayGame(_task(f"trace-{seed}-{index}", draw.randrange(2**31)))
        talks: dict[str, list[Message]] = {SCOUT: [], RUNNER: []}
        while not game.is_done:
            talks[SCOUT] += game.scout()
            said = game.way if draw.random() < helpful else draw.choice(KEYS)
            talks[SCOUT].append({"role": "assistant", "content": said})
            talks[RUNNER] += game.runner(said)
            moved = said if draw.random() < helpful else draw.choice(KEYS)
            talks[RUNNER].append({"role": "assistant", "content": moved})
            game.move(moved)
        yield talks[SCOUT if index % 2 else RUNNER]


def _task(task_id: str, seed: int) -> Task:
    return Task(
        task_id=task_id,
        prompt=[{"role": "system", "content": RULES[SCOUT]}],
        data_source="relay",
        ground_truth={"seed": seed},
    )
