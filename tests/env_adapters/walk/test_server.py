"""The demo's environment process and its agent, as real programs against a fake model server."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from env_adapters.walk.game import WalkGame, walk_tasks
from env_adapters.walk.server import ScoreClient, WalkServer
from tests.support.patience import PATIENCE_S
from tests.support.walk_parts import SCORER_KEY, WORKER_KEY, FakeModelServer

ROOT = Path(__file__).resolve().parents[3]
AGENT = ROOT / "agents/examples/walk_agent.py"


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeModelServer]:
    server = FakeModelServer(walk_tasks(24, seed=0))
    yield server
    server.close()


@pytest.fixture(scope="module")
def environment(fake: FakeModelServer) -> Iterator[subprocess.Popen[str]]:
    process = start_environment(fake.url)
    fake.env_address = first_line(process)
    yield process
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "Traceback" not in errors


def start_environment(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "env_adapters.walk.server", "--port", "0"],
        cwd=ROOT,
        env={**os.environ, "SERVER_URL": url, "SCORER_KEY": SCORER_KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    word, address = process.stdout.readline().split()
    assert word == "ready"
    return address


class Player:
    """A scripted agent: one connection."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self.lines = self.socket.makefile("r")

    def send(self, message: Any) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def ask(self, message: Any) -> Any:
        self.send(message)
        return json.loads(self.lines.readline())

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


@pytest.fixture
def player(fake: FakeModelServer, environment: subprocess.Popen[str]) -> Iterator[Player]:
    player = Player(fake.env_address)
    yield player
    player.close()


def winning_moves(fake: FakeModelServer, number: int) -> list[str]:
    game, moves = WalkGame(fake.tasks[number]), []
    done = False
    while not done:
        moves.append(game.hinted_key)
        _, done, _ = game.step(moves[-1])
    return moves


def test_the_score_is_acknowledged_before_the_agent_hears_that_it_is_done(
    fake: FakeModelServer, player: Player
) -> None:
    fake.score_arrived.clear()
    fake.score_may_be_stored.clear()
    assert player.ask({"episode_key": "key-20"}) == {"messages": fake.tasks[20].prompt, "done": False}
    *moves, last = winning_moves(fake, 20)
    for move in moves:
        turn = player.ask({"move": move})
        assert turn["observation"].startswith("The exit is ") and turn["done"] is False
    player.send({"move": last})
    assert fake.score_arrived.wait(timeout=PATIENCE_S)
    assert select.select([player.socket], [], [], 0) == ([], [], [])  # nothing is said before the acknowledgement
    assert "e20" not in fake.outcomes
    fake.score_may_be_stored.set()
    assert json.loads(player.lines.readline()) == {"observation": "You are out.", "done": True}
    assert fake.outcomes["e20"] == {"score": 1.0}


def test_an_agent_that_leaves_early_fails_its_episode(fake: FakeModelServer, player: Player) -> None:
    player.ask({"episode_key": "key-21"})
    player.ask({"move": "not a letter"})
    player.close()
    assert fake.wait_for_outcome("e21") == {"failed": "agent left"}


def test_a_bad_line_fails_its_episode_and_closes_the_connection(fake: FakeModelServer, player: Player) -> None:
    player.ask({"episode_key": "key-22"})
    player.send({"moves": "w"})
    assert player.lines.readline() == ""
    assert fake.outcomes["e22"] == {"failed": "agent sent a bad line: KeyError('move')"}


def test_an_unknown_key_is_turned_away_and_reports_nothing(fake: FakeModelServer, player: Player) -> None:
    before = dict(fake.outcomes)
    player.send({"episode_key": "stranger"})
    assert player.lines.readline() == ""
    assert fake.outcomes == before


def test_an_episode_is_played_on_one_connection_and_another_one_with_its_key_is_turned_away(
    fake: FakeModelServer, player: Player
) -> None:
    player.ask({"episode_key": "key-19"})
    scout = Player(fake.env_address)
    scout.send({"episode_key": "key-19"})
    assert scout.lines.readline() == ""
    scout.close()
    *moves, last = winning_moves(fake, 19)
    for move in moves:
        assert player.ask({"move": move})["done"] is False
    assert player.ask({"move": last})["done"] is True
    assert fake.outcomes.pop("e19") == {"score": 1.0}


def test_a_line_that_is_nested_too_deep_is_a_bad_line_like_others(fake: FakeModelServer, player: Player) -> None:
    player.ask({"episode_key": "key-18"})
    player.socket.sendall(b"[" * 60_000 + b"\n")
    assert player.lines.readline() == ""
    assert "nested too deep" in str(fake.outcomes.pop("e18")["failed"])


async def test_who_names_no_episode_is_sent_away() -> None:
    scores = ScoreClient("http://127.0.0.1:1", scorer_key="k")
    walk = WalkServer(scores=scores, hello_s=0.01)
    async with await asyncio.start_server(walk.serve, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await reader.read() == b""
        writer.close()
    await walk.close()


@pytest.mark.seconds
def test_a_score_is_sent_again_when_the_connection_dies(fake: FakeModelServer, player: Player) -> None:
    fake.scores_to_drop = 2
    player.ask({"episode_key": "key-23"})
    turn: Any = {}
    for move in ["x"] * 8:
        turn = player.ask({"move": move})
    assert turn == {"observation": "No moves left.", "done": True}
    assert fake.outcomes["e23"] == {"score": 0.0}
    assert fake.scores_to_drop == 0


@pytest.mark.seconds
def test_the_agent_plays_every_task_and_survives_a_failed_episode(
    fake: FakeModelServer, environment: subprocess.Popen[str], tmp_path: Path
) -> None:
    fake.keys_without_model = {"key-3"}
    agent = {"TASKS_URL": f"{fake.url}/v1/tasks", "OPENAI_API_KEY": WORKER_KEY, "CONCURRENCY": "4"}
    done = run_agent(fake, agent, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("episode e3: BadRequestError: ") and done.stderr.count("\n") == 1
    assert fake.wait_for_outcome("e3") == {"failed": "agent left"}
    played = [number for number in range(20) if number != 3]
    assert [fake.outcomes[f"e{number}"] for number in played] == [{"score": 1.0}] * 19
    key, last = fake.chats[-1]
    assert {name: last[name] for name in ("model", "max_tokens", "temperature")} == {
        "model": "policy",
        "max_tokens": 4,
        "temperature": 1.0,
    }
    rounds = [body["messages"] for chat_key, body in fake.chats if chat_key == key]
    for before, after in itertools.pairwise(rounds):  # each round continues the one before it
        assert after[: len(before)] == before
        assert [message["role"] for message in after[len(before) :]] == ["assistant", "user"]


@pytest.mark.seconds
def test_a_fresh_agent_plays_its_one_task(
    fake: FakeModelServer, environment: subprocess.Popen[str], tmp_path: Path
) -> None:
    fake.keys_without_model = set()
    fake.outcomes.pop("e5", None)
    task = json.dumps(fake.tasks[5].public())
    agent = {"TASK_JSON": task, "ENV_ADDRESS": fake.env_address, "OPENAI_API_KEY": "key-5"}
    done = run_agent(fake, agent, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert fake.outcomes["e5"] == {"score": 1.0}


@pytest.mark.seconds
def test_sigterm_ends_the_process_while_an_agent_is_connected(fake: FakeModelServer) -> None:
    process = start_environment(fake.url)
    player = Player(first_line(process))
    player.ask({"episode_key": "key-20"})
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    assert player.lines.readline() == ""
    player.close()


async def test_the_same_episodes_are_slow_on_every_run() -> None:
    scores = ScoreClient("http://127.0.0.1:1", scorer_key="k")
    walk = WalkServer(scores=scores, latency_s=0.1, tail=(0.25, 10.0))
    latencies = [walk.latency_of(f"{number}-0-0") for number in range(1000)]
    assert set(latencies) == {0.1, 1.0}
    assert latencies.count(1.0) == pytest.approx(250, abs=40)
    assert latencies == [
        WalkServer(scores=scores, latency_s=0.1, tail=(0.25, 10.0)).latency_of(f"{n}-0-0") for n in range(1000)
    ]
    assert WalkServer(scores=scores, latency_s=0.1).latency_of("0-0-0") == 0.1
    await scores.close()


def run_agent(fake: FakeModelServer, extra: dict[str, str], *, folder: Path) -> subprocess.CompletedProcess[str]:
    """The example as a user runs it: its own folder, nothing of ours on its import path."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, str(AGENT)],
        cwd=folder,
        env={**kept, "OPENAI_BASE_URL": f"{fake.url}/v1", "MODEL": "policy", **extra},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
