"""The demo game: its rules, its traces, and that following the hints always wins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from buffers.records import Task
from buffers.tasks.parquet import read_demonstrations, read_tasks
from env_adapters.walk.game import INVALID, KEYS, MAX_MOVES, RULES, WalkGame, walk_tasks, walk_traces


def corner_task(*, hint_seed: int = 3) -> Task:
    return Task(
        task_id="corner",
        prompt=[],
        ground_truth={"exit": [0, 0], "hint_seed": hint_seed},
        extra_info={"start": [1, 1]},
    )


def test_transcript_of_a_won_game() -> None:
    game = WalkGame(corner_task())
    assert game.reset() == [
        {"role": "system", "content": "Find the exit. Move with w, a, s or d."},
        {"role": "user", "content": "The exit is west."},
    ]
    assert game.step("a") == ("The exit is north.", False, None)
    assert game.step(" W\n") == ("You are out.", True, 1.0)


def test_transcript_of_a_lost_game_with_walls_and_invalid_moves() -> None:
    game = WalkGame(corner_task())
    observations = [game.step(answer)[0] for answer in ("s", "s", "s", "s", "up", "", "wd")]
    assert observations == [
        "The exit is west.",
        "The exit is north.",
        "The exit is north.",
        "The exit is west.",
        "Invalid move. The exit is west.",
        "Invalid move. The exit is north.",
        "Invalid move. The exit is north.",
    ]
    assert game.step("d") == ("No moves left.", True, 0.0)


def test_a_wall_stops_and_costs_the_move() -> None:
    game = WalkGame(corner_task())
    assert game.step("w") == ("The exit is west.", False, None)
    assert game.step("w") == ("The exit is west.", False, None)  # the wall: only one way is left
    assert game.step("a") == ("You are out.", True, 1.0)


def test_a_finished_game_takes_no_move() -> None:
    game = WalkGame(corner_task())
    for answer in "wa":
        game.step(answer)
    with pytest.raises(ValueError, match=r"a finished game takes no move, got 'w' for corner; call reset\(\) first"):
        game.step("w")


def test_reset_replays_the_same_game() -> None:
    game = WalkGame(walk_tasks(1, seed=5)[0])
    first = [game.reset()[1], *[game.step(answer) for answer in "wasd"]]
    assert [game.reset()[1], *[game.step(answer) for answer in "wasd"]] == first


def test_following_the_hints_wins_every_task() -> None:
    for task in walk_tasks(4000, seed=0):
        game = WalkGame(task)
        score = None
        while score is None:
            _, _, score = game.step(game.hinted_key)
        assert score == 1.0, task.task_id


def test_the_first_prompt_is_the_games_and_hides_the_exit() -> None:
    tasks = walk_tasks(200, seed=1)
    assert len({task.task_id for task in tasks}) == 200
    for task in tasks:
        assert task.prompt == WalkGame(task).reset()
        assert task.extra_info["start"] != task.ground_truth["exit"]
        assert set(task.public()) == {"task_id", "data_source", "prompt", "agent_name", "extra_info"}
        assert list(task.extra_info) == ["start"]


def test_traces_are_what_an_agent_would_have_said_in_play() -> None:
    by_prompt_length = set()
    for messages in walk_traces(50, seed=2):
        roles = [message["role"] for message in messages]
        assert roles == ["system", *["user", "assistant"] * (len(messages) // 2)]
        assert messages[0]["content"] == RULES
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        assert set(answers) <= set(KEYS) and 1 <= len(answers) <= MAX_MOVES
        assert all(not message["content"].startswith(INVALID) for message in messages)
        assert all(set(message) == {"role", "content"} for message in messages)
        by_prompt_length.add(len(messages))
    assert max(by_prompt_length) == 1 + 2 * MAX_MOVES


def test_helpful_share_of_the_traces() -> None:
    names = {"The exit is north.": "w", "The exit is west.": "a", "The exit is south.": "s", "The exit is east.": "d"}

    def share(helpful: float) -> float:
        pairs = [
            (names[before["content"]], after["content"])
            for messages in walk_traces(400, seed=0, helpful=helpful)
            for before, after in zip(messages[1::2], messages[2::2], strict=True)
        ]
        return sum(hint == answer for hint, answer in pairs) / len(pairs)

    assert share(1.0) == 1.0
    assert share(0.1) == pytest.approx(0.1 + 0.9 / 4, abs=0.03)


@pytest.mark.seconds
def test_data_files_are_the_same_on_every_run(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        command = [sys.executable, "-m", "env_adapters.walk.make_data", "--num-tasks", "20", "--num-traces", "10"]
        paths = ["--tasks", str(tmp_path / folder / "t.parquet"), "--traces", str(tmp_path / folder / "traces.parquet")]
        done = subprocess.run([*command, *paths], check=True, capture_output=True, text=True)
        assert done.stdout.startswith("wrote 20 tasks to ")
    assert (tmp_path / "one/t.parquet").read_bytes() == (tmp_path / "two/t.parquet").read_bytes()
    assert list(read_tasks(tmp_path / "one/t.parquet")) == walk_tasks(20, seed=0)
    traces = read_demonstrations(tmp_path / "one/traces.parquet")
    assert [trace.messages for trace in traces] == list(walk_traces(10, seed=0))


def test_a_task_survives_the_way_over_http() -> None:
    task = walk_tasks(1, seed=0)[0]
    assert Task(**json.loads(json.dumps(task.private()))) == task
