"""Every game of TextArena that can be played here, by the adapter, from a seed to the end; printed as JSON, a line for each.

`play_textarena.py [AT_ONCE]`: how many games at once. Moves are drawn from what the player was told, valid ones and nonsense.
"""

import asyncio
import hashlib
import json
import random
import re
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from buffers.errors import EnvError
from buffers.records import Task
from buffers.tasks.textarena_games import in_time, names, players_of
from env_adapters.adapter import WithDeadlines
from env_adapters.textarena_env import TextArenaEnv

MOST_MOVES = 150
NONSENSE = (
    "",
    "]",
    "[",
    "[]",
    "[-1]",
    "[99999999999999999999]",
    "no idea",
    "[a b c d]",
    "\x00",
    "[0, 1",
    "[[[",
    "[١] ß",
)
WORDS = ("up", "left", "fold", "call", "cooperate", "hit", "stand", "pass", "a", "e2e4", "rock", "draw", "bet")


def drawn_move(chance: random.Random, *, told: str) -> str:
    options = re.findall(r"\[[^\]\n]{1,30}\]", told[-5000:])
    kind = chance.random()
    if options and kind < 0.5:
        return chance.choice(options)
    if kind < 0.85:
        return f"[{' '.join(str(chance.randrange(7)) for _ in range(chance.randrange(1, 4)))}]"
    return chance.choice(NONSENSE) if kind < 0.9 else f"[{chance.choice(WORDS)}]"


async def played(name: str, *, seed: int) -> dict[str, object]:
    """How a game went; or why it is refused."""
    info = {"game": name, "options": {}, "seed": seed}
    try:
        players = in_time(lambda: players_of(name, players=0, options={}))
        report = {"name": name, "players": players}
        report["checked"] = TextArenaEnv.check(Task(task_id=name, prompt=[], extra_info={**info, "players": players}))
    except (ValueError, EnvError) as error:
        return {"name": name, "refused": str(error)}
    info["players"] = players
    adapter, chance, heard = WithDeadlines(TextArenaEnv(), deadline_s=30.0), random.Random(seed), hashlib.sha256()
    said, done, moves = {}, False, 0
    try:
        messages = await adapter.reset({"task_id": name, "extra_info": info}, seed=seed + 1)
        while not done and moves < MOST_MOVES:
            (message,) = messages
            said[adapter.player] = said.get(adapter.player, "") + message["content"]
            heard.update(f"{adapter.player} {message['content']}".encode())
            step = await adapter.step(drawn_move(chance, told=said[adapter.player]))
            messages, done, moves = step.messages, step.done, moves + 1
        report["scores"] = await adapter.scores()
    except EnvError as error:
        report["failed"] = error.reason
    await adapter.close()
    turns = sorted(said)
    return {**report, "done": done, "moves": moves, "turns": turns, "heard": heard.hexdigest()}


def draws() -> None:
    while True:
        random.random()
        time.sleep(0.001)


async def main(at_once: int) -> None:
    room = asyncio.Semaphore(at_once)

    async def one(name: str) -> None:
        async with room:
            print(json.dumps(await played(name, seed=3)), file=sys.__stdout__, flush=True)

    await asyncio.gather(*(one(name) for name in names() if not name.endswith(("-raw", "-train"))))


if __name__ == "__main__":
    sys.stdout = sys.stderr  # some games print
    if (at_once := int(sys.argv[1])) > 1:  # others in the process draw random numbers too
        threading.Thread(target=draws, daemon=True).start()
    asyncio.run(main(at_once))
