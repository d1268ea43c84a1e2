"""The relay game: neither role wins alone, each is paid in its own coins, and scores are of roles or of branches."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from buffers.records import Task
from env_adapters.relay.game import KEYS, NAMES, SCOUT_PAY, TURNS, RelayGame, relay_tasks, relay_traces
from env_adapters.relay.server import RelayServer
from tests.support import walk_parts
from tests.support.patience import PATIENCE_S
from tests.support.walk_parts import SCORER_KEY, WORKER_KEY, FakeModelServer

ROOT = Path(__file__).resolve().parents[3]


def play(task: Task, *, says: Any, moves: Any) -> dict[str, float]:
    game = RelayGame(task)
    while not game.is_done:
        way = game.scout()[-1]["content"].removeprefix("The exit is ").rstrip(".")
        heard = game.runner(says(way))[-1]["content"].removeprefix("The scout says ").rstrip(".")
        game.move(moves(heard))
    return game.scores()


def test_any_code_that_both_know_wins_and_one_that_one_of_them_knows_does_not() -> None:
    letters = dict(zip(NAMES.values(), KEYS))
    other = dict(zip("wasd", "dwas"))
    tasks = relay_tasks(40, seed=1)
    coded = [
        play(task, says=lambda way: other[letters[way]], moves=dict(zip(other.values(), other)).get) for task in tasks
    ]
    assert coded == [{"": 1.0, "scout": SCOUT_PAY, "runner": 1.0}] * 40
    deaf = [play(task, says=letters.get, moves=lambda _: "w")[""] for task in tasks]
    mute = [play(task, says=lambda _: "?", moves=lambda heard: letters.get(heard, "w"))[""] for task in tasks]
    assert deaf == mute and 0.1 < sum(deaf) / 40 < 0.45


def test_traces_are_of_one_role_each_and_end_with_its_answer() -> None:
    traces = list(relay_traces(6, seed=0, helpful=1.0))
    assert [trace[0]["content"][:8] for trace in traces] == ["You hear", "You see "] * 3
    assert all(len(trace) == 1 + 2 * TURNS and trace[-1]["role"] == "assistant" for trace in traces)
    assert all(trace[2]["content"] == trace[1]["content"].rstrip(".")[-1] for trace in traces[::2])


class Scores:
    """The model server, as the environment knows it."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    async def task_of(self, episode_key: str) -> tuple[str, Task]:
        return "1-0-0", relay_tasks(1, seed=0)[0]

    async def report(self, episode_id: str, **outcome: Any) -> None:
        self.told.append(outcome)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("by_branch", "parts"),
    [(False, [{"role": "scout"}, {"role": "runner"}]), (True, [{"branch": 2}, {"branch": 3}])],
)
def test_the_environment_scores_each_role_and_then_the_whole(by_branch: bool, parts: list[dict[str, Any]]) -> None:
    scores = Scores()
    letters = dict(zip(NAMES.values(), KEYS))

    async def run() -> None:
        relay = RelayServer(scores=scores, by_branch=by_branch)  # type: ignore[arg-type]
        server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())

        async def ask(line: dict[str, Any]) -> Any:
            writer.write(json.dumps(line).encode() + b"\n")
            return json.loads(await reader.readline())

        turn, roles = await ask({"episode_key": "k"}), []
        while not turn["done"]:
            roles.append(turn["role"])
            last = turn["messages"][-1]["content"].rstrip(".").split()[-1]
            turn = await ask({"said": letters.get(last, last)})
        assert roles == ["scout", "runner"] * TURNS
        writer.close()
        server.close()
        await relay.close()

    asyncio.run(run())
    assert scores.told == [{"score": SCOUT_PAY, **parts[0]}, {"score": 1.0, **parts[1]}, {"score": 1.0}]


@pytest.mark.seconds
def test_the_agent_of_two_roles_plays_with_the_environments_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk_parts, "LETTERS", walk_parts.LETTERS | {key: key for key in KEYS})
    fake = FakeModelServer(relay_tasks(3, seed=0))
    given = {**os.environ, "SERVER_URL": fake.url, "SCORER_KEY": SCORER_KEY}
    words = [sys.executable, "-m", "env_adapters.relay.server"]
    with subprocess.Popen(words, cwd=ROOT, env=given, stdout=subprocess.PIPE, text=True) as environment:
        assert environment.stdout is not None
        fake.env_address = environment.stdout.readline().split()[1]
        given = {
            **os.environ, "OPENAI_BASE_URL": f"{fake.url}/v1", "OPENAI_API_KEY": WORKER_KEY, "CONCURRENCY": "2",
            "TASKS_URL": f"{fake.url}/v1/tasks",
        }  # fmt: skip
        agent = [sys.executable, str(ROOT / "agents/examples/relay_agent.py"), "runner=policy"]
        subprocess.run(agent, env=given, check=True, timeout=PATIENCE_S)
        environment.terminate()
    fake.close()
    assert fake.outcomes == {f"e{number}": {"score": 1.0} for number in range(3)}, "the last score is the whole's"
    assert {body["model"] for _, body in fake.chats} == {"scout", "policy"} and len(fake.chats) == 3 * 2 * TURNS


def test_an_agent_sees_no_way_before_it_is_the_scouts_turn() -> None:
    (task,) = relay_tasks(1, seed=0)
    assert "seed" not in json.dumps(task.public()) and asdict(task)["ground_truth"]["seed"] >= 0
