"""The demo's environment process: `python -m env_adapters.walk.server` plays the walk game over TCP and reports scores.

Started by the run (or by hand) beside the model server, which it reaches at `SERVER_URL` with `SCORER_KEY`. One
connection is one episode, one JSON object per line:

    agent -> {"episode_key": "..."}        server -> {"messages": [...], "done": false}
    agent -> {"move": "w"}                 server -> {"observation": "...", "done": false}

The invariants: the agent never sees the ground truth and never reports its own score; `"done": true` is sent only
after the score was acknowledged; an episode is played once, on one connection; one whose agent leaves early is reported
as failed. It does not retry episodes and keeps nothing on disk.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

from buffers.outgoing import RUN, Outgoing
from buffers.records import Task
from env_adapters.walk.game import WalkGame

HTTP_ATTEMPTS = 4
MAX_SHOWN_CHARS = 300
HELLO_S = 10.0
"""Seconds in which a connection must name an episode, or is closed: any program on this machine may connect."""

Score = dict[str, float | str]
Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""A line to the agent -> its answer."""


class ScoreClient:
    """The two calls an environment makes. Connection errors are tried again: both calls may be repeated safely."""

    def __init__(self, server_url: str, *, scorer_key: str, first_pause_s: float = 0.1) -> None:
        self._http = Outgoing(
            RUN,
            base_url=server_url,
            headers={"Authorization": f"Bearer {scorer_key}"},
            timeout=httpx2.Timeout(60.0),
            limits=httpx2.Limits(max_connections=32, max_keepalive_connections=32),
        )
        self._first_pause_s = first_pause_s

    async def task_of(self, episode_key: str) -> tuple[str, Task]:
        """The episode id and the task, ground truth included, of the agent that holds this key."""
        answer = await self._send("GET", "/episode", headers={"X-Episode-Key": episode_key})
        return answer["episode_id"], Task(**answer["task"])

    async def report(self, episode_id: str, **outcome: float | str) -> None:
        """Report `score=...` or `failed="reason"`; returns when the server has acknowledged it."""
        await self._send("POST", "/scores", body={"episode_id": episode_id, **outcome})

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        for attempt in range(1, HTTP_ATTEMPTS + 1):
            try:
                response = await self._http.request(method, path, headers=headers, json=body)
                break
            except httpx2.TransportError:
                if attempt == HTTP_ATTEMPTS:
                    raise
                await asyncio.sleep(self._first_pause_s * 2**attempt)
        if response.is_error:
            raise httpx2.HTTPStatusError(
                f"{method} {path} was refused ({response.status_code}): {response.text[:MAX_SHOWN_CHARS]}",
                request=response.request, response=response,
            )  # fmt: skip
        answer: dict[str, Any] = response.json()
        return answer


@dataclass(kw_only=True, eq=False)
class WalkServer:
    """Plays one episode per connection."""

    scores: ScoreClient
    latency_s: float = 0.0
    """Time that a move takes."""
    tail: tuple[float, float] = (0.0, 1.0)
    """(share of episodes, factor): these take `factor` times as long; `seed` decides which."""
    seed: int = 0
    hello_s: float = HELLO_S
    playing: set[asyncio.Task[Any]] = field(default_factory=set)
    """The connections."""
    episodes: set[str] = field(default_factory=set)
    """Episodes that are being played."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its key to its last line. A bad one is logged and closed; the others stay."""
        task = asyncio.current_task()
        assert task is not None
        self.playing.add(task)
        try:
            await self._play(reader, writer)
        except (ConnectionError, TimeoutError, httpx2.HTTPError, KeyError, ValueError, TypeError) as error:
            print(f"episode ended: {type(error).__name__}: {error}", file=sys.stderr)
        except asyncio.CancelledError:
            pass  # the process is ending: `close` cancelled this connection
        finally:
            self.playing.discard(task)
            writer.close()

    async def close(self) -> None:
        """End every connection. Their episodes are left to the model server's deadline."""
        for task in self.playing:
            task.cancel()
        await asyncio.gather(*self.playing)
        await self.scores.close()

    async def _play(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await asyncio.wait_for(read_line(reader), self.hello_s)
        if hello is None:
            return
        episode_id, task = await self.scores.task_of(str(hello["episode_key"]))
        if episode_id in self.episodes:  # else an agent would find the exit on one connection, and win on another
            raise ValueError(f"episode {episode_id} must be played on one connection, got another one")
        self.episodes.add(episode_id)
        try:
            await self._play_episode(episode_id, task, reader, writer)
        finally:
            self.episodes.discard(episode_id)

    async def _play_episode(
        self, episode_id: str, task: Task, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async def ask(line: dict[str, Any]) -> dict[str, Any]:
            await write_line(writer, {**line, "done": False})
            answer = await read_line(reader)
            if answer is None:
                raise ConnectionError(f"the agent of episode {episode_id} left before the end")
            return answer

        try:
            scores, last = await self._play_game(task, ask, pause_s=self.latency_of(episode_id))
        except (ConnectionError, KeyError, ValueError, TypeError) as error:
            left = isinstance(error, ConnectionError)
            await self.scores.report(episode_id, failed="agent left" if left else f"agent sent a bad line: {error!r}")
            raise
        for score in scores:
            await self.scores.report(episode_id, **score)
        await write_line(writer, {**last, "done": True})

    async def _play_game(self, task: Task, ask: Ask, *, pause_s: float) -> tuple[list[Score], dict[str, Any]]:
        """Scores of the episode, in order, and the last line to the agent."""
        game = WalkGame(task)
        answer = await ask({"messages": game.reset()})
        while True:
            if pause_s:
                await asyncio.sleep(pause_s)
            observation, _, score = game.step(str(answer["move"]))
            if score is not None:
                return [{"score": score}], {"observation": observation}
            answer = await ask({"observation": observation})

    def latency_of(self, episode_id: str) -> float:
        """Seconds per move of this episode."""
        share, factor = self.tail
        return self.latency_s * (factor if tail_draw(episode_id, seed=self.seed) < share else 1.0)


def tail_draw(episode_id: str, *, seed: int) -> float:
    """A number in 0..1; below the tail's share the episode is slow. A hash, so that a second run has the same stragglers."""
    return int.from_bytes(hashlib.sha256(f"{seed} {episode_id}".encode()).digest()[:8], "big") / 2**64


async def read_line(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next line's object, or None when the other side has closed."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except RecursionError as error:
        raise ValueError("a line must be one JSON object, got one that is nested too deep") from error
    if not isinstance(record, dict):
        raise ValueError(f"a line must be one JSON object, got {record!r}")
    return record


async def write_line(writer: asyncio.StreamWriter, record: dict[str, Any]) -> None:
    writer.write(json.dumps(record).encode() + b"\n")
    await writer.drain()


def _tail(text: str) -> tuple[float, float]:
    share, _, factor = text.partition(":")
    try:
        parsed = float(share), float(factor)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be SHARE:FACTOR such as 0.1:10, got {text!r}") from error
    if not 0.0 <= parsed[0] <= 1.0 or parsed[1] < 0.0:
        raise argparse.ArgumentTypeError(f"SHARE must be in 0..1 and FACTOR >= 0, got {text!r}")
    return parsed


def run_server(parser: argparse.ArgumentParser, make: Callable[[ScoreClient, argparse.Namespace], WalkServer]) -> None:
    """A game's process: reads its arguments, says `ready HOST:PORT` and plays until SIGTERM or SIGINT."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port; the line `ready HOST:PORT` names it")
    arguments = parser.parse_args()
    missing = [name for name in ("SERVER_URL", "SCORER_KEY") if name not in os.environ]
    if missing:
        parser.error(
            f"{' and '.join(missing)} must be set in the environment: the model server's root and scorer's key"
        )

    async def serve() -> None:
        game = make(ScoreClient(os.environ["SERVER_URL"], scorer_key=os.environ["SCORER_KEY"]), arguments)
        server = await asyncio.start_server(game.serve, arguments.host, arguments.port, backlog=512)
        stop = asyncio.Event()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
        at, own_port = server.sockets[0].getsockname()[:2]
        print(f"ready {at}:{own_port}", flush=True)
        await stop.wait()
        server.close()
        await game.close()

    asyncio.run(serve())


def main() -> None:
    parser = argparse.ArgumentParser(description="Play the walk game over TCP and report scores to SERVER_URL.")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="time that one move takes")
    parser.add_argument("--tail", type=_tail, default=(0.0, 1.0), help="SHARE:FACTOR of episodes that are slower")
    parser.add_argument("--seed", type=int, default=0, help="which episodes are the slower ones")
    run_server(
        parser,
        lambda scores, given: WalkServer(
            scores=scores, latency_s=given.latency_ms / 1000, tail=given.tail, seed=given.seed
        ),
    )


if __name__ == "__main__":
    main()
