"""The relay game's environment process: `python -m env_adapters.relay.server` plays it over TCP and reports scores.

Started by the run beside the model server, which it reaches at `SERVER_URL` with `SCORER_KEY`. One connection is one episode, one
JSON object per line; what a role reads is new messages of its own conversation:

    agent -> {"episode_key": "..."}     server -> {"role": "scout", "messages": [...], "done": false}
    agent -> {"said": "w"}              server -> {"role": "runner", "messages": [...], "done": false}
    agent -> {"said": "w"}              server -> {"done": true}

Each role is scored by its own pay, then the whole. `--by branch` reports the same numbers as scores of the two conversations, for
a run without roles. The server of the walk game has the connections and their rules.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from buffers.records import Task
from env_adapters.relay.game import RUNNER, SCOUT, TURNS, RelayGame
from env_adapters.walk.server import Ask, Score, WalkServer, run_server


@dataclass(kw_only=True, eq=False)
class RelayServer(WalkServer):
    """Plays one episode per connection. `by_branch`: scores are of branches."""

    by_branch: bool = False

    async def _play_game(self, task: Task, ask: Ask, *, pause_s: float) -> tuple[list[Score], dict[str, Any]]:
        game = RelayGame(task)
        while not game.is_done:
            said = str((await ask({"role": SCOUT, "messages": game.scout()}))["said"])
            game.move(str((await ask({"role": RUNNER, "messages": game.runner(said)}))["said"]))
        scores = game.scores()
        # The calls alternate: the last two are the scout's and the runner's.
        branches = {SCOUT: 2 * TURNS - 2, RUNNER: 2 * TURNS - 1}
        parts: list[Score] = [
            {"score": scores[role], **({"branch": branch} if self.by_branch else {"role": role})}
            for role, branch in branches.items()
        ]
        return [*parts, {"score": scores[""]}], {}


def main() -> None:
    parser = argparse.ArgumentParser(description="Play the relay game over TCP and report scores to SERVER_URL.")
    parser.add_argument("--by", choices=("role", "branch"), default="role", help="what the scores are of")
    run_server(parser, lambda scores, given: RelayServer(scores=scores, by_branch=given.by == "branch"))


if __name__ == "__main__":
    main()
