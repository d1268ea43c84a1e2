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
import asyncio
import os
import signal

from buffers.records import Task
from env_adapters.relay.game import RUNNER, SCOUT, TURNS, RelayGame
from env_adapters.walk.server import ScoreClient, WalkServer, read_line, write_line


class RelayServer(WalkServer):
    """Plays one episode per connection. `by_branch`: scores are of branches."""

    def __init__(self, scores: ScoreClient, *, by_branch: bool = False) -> None:
        super().__init__(scores)
        self._by_branch = by_branch

    async def _play_episode(
        self, episode_id: str, task: Task, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        game = RelayGame(task)
        try:
            while not game.is_done:
                await write_line(writer, {"role": SCOUT, "messages": game.scout(), "done": False})
                said = await _said(reader)
                await write_line(writer, {"role": RUNNER, "messages": game.runner(said), "done": False})
                game.move(await _said(reader))
        except (ConnectionError, KeyError, ValueError, TypeError) as error:
            await self._scores.report(episode_id, failed=f"agent left or sent a bad line: {error!r}")
            raise
        scores = game.scores()
        # The calls alternate: the last two are the scout's and the runner's.
        branches = {SCOUT: 2 * TURNS - 2, RUNNER: 2 * TURNS - 1}
        for role, branch in branches.items():
            of = {"branch": branch} if self._by_branch else {"role": role}
            await self._scores.report(episode_id, score=scores[role], **of)
        await self._scores.report(episode_id, score=scores[""])
        await write_line(writer, {"done": True})


async def _said(reader: asyncio.StreamReader) -> str:
    line = await read_line(reader)
    if line is None:
        raise ConnectionError("the agent left before the end")
    return str(line["said"])


async def _run(arguments: argparse.Namespace) -> None:
    scores = ScoreClient(os.environ["SERVER_URL"], scorer_key=os.environ["SCORER_KEY"])
    relay = RelayServer(scores, by_branch=arguments.by == "branch")
    server = await asyncio.start_server(relay.serve, arguments.host, arguments.port, backlog=512)
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
    host, port = server.sockets[0].getsockname()[:2]
    print(f"ready {host}:{port}", flush=True)
    await stop.wait()
    server.close()
    await relay.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Play the relay game over TCP and report scores to SERVER_URL.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port; the line `ready HOST:PORT` names it")
    parser.add_argument("--by", choices=("role", "branch"), default="role", help="what the scores are of")
    arguments = parser.parse_args()
    missing = [name for name in ("SERVER_URL", "SCORER_KEY") if name not in os.environ]
    if missing:
        parser.error(
            f"{' and '.join(missing)} must be set in the environment: the model server's root and scorer's key"
        )
    asyncio.run(_run(arguments))


if __name__ == "__main__":
    main()
