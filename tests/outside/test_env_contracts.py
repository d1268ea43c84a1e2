"""Adapters against the packages that they are for, as their users install them, in environments of their own."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from buffers.errors import EnvError
from env_adapters.adapter import WithDeadlines
from env_adapters.openenv import OpenEnv
from tests.outside.agent_environments import python_with
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.outside, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "outside" / "environments"
VERIFIERS = ("verifiers==0.4.0", "pyarrow==26.0.1")
REASONING_GYM = ("reasoning-gym==0.1.25",)
TEXTARENA = ("textarena==0.7.4", "numpy==2.3.5")
OPENENV = ("openenv-core==0.3.0",)


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_verifiers_environment_is_played_as_its_authors_wrote_it() -> None:
    path = f"{ROOT}{os.pathsep}{PROGRAMS}"
    command = [str(python_with("verifiers", *VERIFIERS)), str(PROGRAMS / "play_verifiers.py")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    first = [{"role": "system", "content": "Say a number."}, {"role": "user", "content": "0 + 3 ="}]
    assert report["rows"][0] == [first, {"index": 0, "name": ""}] and len(report["rows"]) == 4
    assert report["right"] == {"said": [first, []], "done": True, "score": 2.0}
    assert report["wrong"]["score"] == 0.0
    found = report["found"]
    assert found["said"] == [says("Guess."), says("Higher."), says("Lower."), []] and found["done"]
    assert found["score"] == pytest.approx(1.0 - 0.3)
    assert not report["cut"]["done"] and report["cut"]["score"] == pytest.approx(-0.1)
    assert report["stopped"]["done"] and report["stopped"]["score"] == pytest.approx(-0.4)
    assert report["crashed"]["reason"] == "environment step: LookupError"
    assert report["missing"]["reason"] == "environment reset: make"
    assert report["beyond"]["reason"] == "environment reset: bad task"


NO_TEXT = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Generators whose tasks have no answer of one text."""


def test_every_generator_of_reasoning_gym_gives_tasks_and_its_own_scores() -> None:
    command = [str(python_with("reasoning_gym", *REASONING_GYM)), str(PROGRAMS / "play_reasoning_gym.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(report["refused"]) == {"composite"} and len(report["own"]) == 105 and report["prompts"] == 315
    assert {name for name, score in report["own"].items() if score < 0.99} == NO_TEXT
    assert sum(report["none"].values()) / 105 < 0.05
    assert report["levels"][0] < report["levels"][1] and report["system"] == "system" and report["again"]
    assert report["plus"], "of an address is one"
    words = [
        "chain_sum are some",
        "got terms",
        "max_digits must be >= min_digits",
        "whole number from 0",
        "one of DeepSeek",
    ]
    assert all(word in told for word, told in zip(words, report["told"], strict=True)), report["told"]


BROKEN = {"PublicGoodsGame-v0", "MarketEntryGame-v0"}
"""Games that never end a move once all players have made too many invalid ones."""
SLOW = {"Sudoku-v0-hard", "Sokoban-v0", "Sokoban-v0-medium"}
"""Games that look for a puzzle for as long as it takes."""
MISSING = (
    "needs NLTK's words",
    "needs a newer Python",
    "OPENROUTER_API_KEY",
    "FileNotFoundError",
    "ModuleNotFoundError",
)


def test_every_game_of_textarena_is_played_to_a_score_for_each_player_or_refused() -> None:
    """Twice: alone, and eight at once beside somebody who draws random numbers; another hash seed orders sets in another way."""
    python, program = str(python_with("textarena", *TEXTARENA)), str(PROGRAMS / "play_textarena.py")
    with ThreadPoolExecutor() as both:
        environments = [{**os.environ, "PYTHONHASHSEED": at_once, "PYTHONPATH": ""} for at_once in ("1", "8")]
        alone, together = both.map(
            lambda env: subprocess.run(
                [python, program, env["PYTHONHASHSEED"]], env=env, capture_output=True, text=True, timeout=600
            ),
            environments,
        )
    assert alone.returncode == together.returncode == 0, alone.stderr[-2000:] + together.stderr[-2000:]
    games, again = (
        {game["name"]: game for game in map(json.loads, done.stdout.splitlines())} for done in (alone, together)
    )
    refused = {name: game["refused"] for name, game in games.items() if "refused" in game and name not in SLOW}
    played = {name: game for name, game in games.items() if "scores" in game}
    assert len(games) == 238 and len(played) >= 170 and games.keys() == again.keys()
    wrong = {name: why for name, why in refused.items() if not any(word in why for word in MISSING)}
    assert {name.partition("-")[0] for name in wrong} <= {"CharacterConclave"}, wrong
    assert all("\n" not in why for why in refused.values())
    assert games.keys() - played.keys() - refused.keys() <= BROKEN | SLOW
    for name, game in played.items():
        assert game["players"] == game["checked"] == len(game["scores"]), name
        assert again[name].get("heard", game["heard"]) == game["heard"], f"{name}: the same seed is the same game"
    two = [game for game in played.values() if game["players"] == 2]
    assert sum(game["done"] for game in played.values()) >= 165 and len(two) >= 100
    assert sum(game["turns"] == [0, 1] for game in two) >= 70, "both had a turn"
    assert sum(any(game["scores"]) for game in played.values()) >= 120


@pytest.fixture(scope="module")
def openenv_url() -> Iterator[str]:
    command = [str(python_with("openenv", *OPENENV)), str(PROGRAMS / "openenv_guess.py")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    yield "http://" + process.stdout.readline().split()[1]
    process.terminate()
    process.wait()
    process.stdout.close()


async def search(adapter: WithDeadlines, *, seed: int) -> float:
    """Find the number by halving."""
    (first,) = await adapter.reset({"task_id": "t", "extra_info": {"reset": {"high": 64}}}, seed=seed)
    assert "Action: the number (integer)." in first["content"] and first["content"].endswith("Guess, below 64.")
    low, high, done = 0, 63, False
    while not done:
        middle = (low + high) // 2
        step = await adapter.step(f"{middle}")
        low, high = (middle + 1, high) if step.messages == says("Higher.") else (low, middle)
        done = step.done
    assert middle == random.Random(seed).randrange(64)
    return await adapter.score()


async def test_an_openenv_server_is_played_in_sessions_of_its_own(openenv_url: str) -> None:
    adapters = [WithDeadlines(OpenEnv(url=openenv_url), deadline_s=20.0) for _ in range(4)]
    scores = await asyncio.gather(*(search(adapter, seed=seed) for seed, adapter in enumerate(adapters)))
    assert all(0.0 < score <= 1.0 for score in scores)
    for adapter in adapters:
        await adapter.close()


async def test_what_an_openenv_server_refuses_is_told_and_what_breaks_it_ends_the_episode(openenv_url: str) -> None:
    server = OpenEnv(url=openenv_url)
    adapter = WithDeadlines(server, deadline_s=20.0)
    await adapter.reset({"task_id": "t", "extra_info": {}}, seed=3)
    refused = await adapter.step("-1")
    assert refused.messages[0]["content"].startswith("Not an action: Input should be greater than or equal to 0")
    assert (await adapter.step('{"number": 100}')).messages == says("Lower.")
    assert (await server.state())["step_count"] == 1
    with pytest.raises(EnvError, match="no such guess") as failure:
        await adapter.step("666")
    assert failure.value.reason == "environment step: EXECUTION_ERROR"
    await adapter.close()
