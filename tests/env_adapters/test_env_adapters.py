"""Rules of env_adapters/: adapters play their environment exactly, and whatever goes wrong ends in a reason."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from typing import Any

import pytest

from buffers.errors import EnvError
from buffers.records import Episode
from env_adapters.adapter import ADAPTERS, EnvAdapter, Step, WithDeadlines, adapter_class, make_adapter
from env_adapters.guarded_calls import WorkerThread
from env_adapters.guessing_game import GuessingGame
from env_adapters.gymnasium_env import GymnasiumEnv
from env_adapters.verifiers_env import VerifiersEnv
from env_adapters.walk.game import walk_tasks
from tests.support import env_parts
from tests.support.buffer_parts import make_task
from tests.support.patience import PATIENCE_S

TASK: dict[str, Any] = {"task_id": "t", "prompt": [], "extra_info": {}}


def said(step: Step) -> str:
    (message,) = step.messages
    return message["content"]


# Deadlines and failures


@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [
        ("Hangs", "environment step: deadline", "must answer within 0.05 s"),
        ("HangsInAThread", "environment step: deadline", "must answer within 0.05 s"),
        ("Crashes", "environment step: Strange", "must not raise, got Strange: at line one and two;"),
        ("Exits", "environment step: RuntimeError", "SystemExit(3)"),
        ("GivesNonsense", "environment step: wrong answer", "messages with a role and a text"),
        ("ScoresNaN", "environment score: wrong answer", "a finite number, got nan"),
    ],
)
async def test_whatever_an_environment_does_wrong_is_an_error_with_a_short_reason(
    name: str, reason: str, words: str
) -> None:
    adapter = WithDeadlines(getattr(env_parts, name)(), deadline_s=0.05 if "Hangs" in name else PATIENCE_S)
    await adapter.reset(TASK, seed=1)

    async def play() -> None:
        await adapter.step("go")
        await adapter.score()

    with pytest.raises(EnvError) as failure:
        await play()
    assert failure.value.reason == reason and words in str(failure.value)
    with pytest.raises(EnvError, match="must not follow a failure") as again:
        await adapter.step("go on")
    assert again.value.reason == reason, "the first failure is the one that counts"
    await adapter.close()


async def test_a_call_that_is_cancelled_is_cancelled_inside_and_is_not_a_failure_of_the_environment() -> None:
    adapter = WithDeadlines(env_parts.Hangs(), deadline_s=60.0)
    step = asyncio.create_task(adapter.step("go"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (inside,) = [task for task in asyncio.all_tasks() if task.get_name() == "environment step"]
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await asyncio.wait({inside})
    assert inside.cancelled()


async def test_all_calls_run_in_one_thread_which_ends_with_the_last_one() -> None:
    thread = WorkerThread("one")
    seen = [await thread.call(threading.get_ident) for _ in range(3)]
    last: list[int] = []
    await thread.end(lambda: last.append(threading.get_ident()))
    assert set(seen) == set(last) and seen[0] != threading.get_ident()
    thread._thread.join(PATIENCE_S)
    assert not thread.alive


# By name


def test_an_environment_that_is_not_there_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(EnvError, match=r"got 'gymnasum'; did you mean 'gymnasium'\?"):
        make_adapter("gymnasum", {})
    with pytest.raises(EnvError, match=r"must name a class that can be imported, got 'nowhere\.Env'"):
        make_adapter("nowhere.Env", {})
    with pytest.raises(EnvError, match=r"must be module\.Class, or one of .*, got 'json\.JSONDecoder'"):
        make_adapter("json.JSONDecoder", {})
    with pytest.raises(EnvError, match=r"options of environment 'walk' must be its constructor's, got \{'hight': 1\}"):
        make_adapter("walk", {"hight": 1})
    assert isinstance(make_adapter("tests.support.env_parts.EchoEnv", {"observation": "x"}), env_parts.EchoEnv)


def test_every_name_leads_to_an_adapter() -> None:
    for name in ADAPTERS:
        assert issubclass(adapter_class(name), EnvAdapter)


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1.utils.loaders", None)

    async def reason(adapter: EnvAdapter) -> str:
        with pytest.raises(EnvError, match="pip install") as failure:
            await adapter.reset({**TASK, "extra_info": {"index": 0}}, seed=0)
        await adapter.close()
        return failure.value.reason

    for adapter in (GymnasiumEnv(id="Blackjack-v1"), VerifiersEnv(taskset="sums")):
        assert asyncio.run(reason(adapter)) == "environment reset: not installed"


# Seeds


def test_members_of_a_group_have_one_seed_and_groups_have_different_ones() -> None:
    task = make_task(1)
    seeds = {
        group: {
            Episode(episode_id="e", task=task, group_id=group, sample_index=index, attempt=attempt).seed
            for index in range(3)
            for attempt in range(2)
        }
        for group in range(200)
    }
    assert all(len(found) == 1 for found in seeds.values())
    assert len({seed for found in seeds.values() for seed in found}) == 200
    assert all(0 <= seed < 2**31 for found in seeds.values() for seed in found)
    assert seeds[7] == {1913934647}, "the same on every machine, in every version"
    assert Episode(episode_id="e", task=make_task(2), group_id=7, sample_index=0).seed not in seeds[7]


# The guessing game, the walk


async def test_halving_finds_every_number_and_higher_and_lower_are_true() -> None:
    for seed in range(40):
        game = GuessingGame()
        await game.reset(TASK, seed=seed)
        low, high, done, guesses = 1, 100, False, 0
        while not done:
            middle = (low + high) // 2
            step = await game.step(f"I think it is 3, no: {middle}.")
            guesses, done = guesses + 1, step.done
            low, high = (middle + 1, high) if said(step).startswith("Higher") else (low, middle - 1)
        assert said(step) == "That is it." and await game.score() == 1.0 and guesses <= 7


async def test_a_number_is_lost_after_the_last_guess_and_a_word_costs_one() -> None:
    game = GuessingGame(guesses=2)
    task = {**TASK, "extra_info": {"low": 5, "high": 5}}
    (first,) = await game.reset(task, seed=0)
    assert "between 5 and 5. You have 2 guesses" in first["content"]
    assert said(await game.step("no idea")) == "That is no number. 1 guess left."
    step = await game.step("4")
    assert (said(step), step.done, await game.score()) == ("No guesses left.", True, 0.0)
    with pytest.raises(EnvError, match="low must be <= high"):
        await game.reset({**TASK, "extra_info": {"low": 2, "high": 1}}, seed=0)


async def test_the_same_seed_is_the_same_number() -> None:
    async def transcript(seed: int) -> list[str]:
        game = GuessingGame()
        await game.reset(TASK, seed=seed)
        return [said(await game.step(str(guess))) for guess in (50, 25, 75)]

    assert await transcript(3) == await transcript(3)
    assert len({tuple(await transcript(seed)) for seed in range(10)}) > 1


async def test_following_the_hints_leads_out_of_the_room() -> None:
    (task,) = walk_tasks(1, seed=4)
    walk = WithDeadlines(make_adapter("walk", {}), deadline_s=10.0)
    messages = await walk.reset(task.private(), seed=0)
    assert messages == task.prompt
    keys = {"north": "w", "west": "a", "south": "s", "east": "d"}
    hint, done = messages[-1]["content"], False
    while not done:
        step = await walk.step(keys[hint.rstrip(".").split()[-1]])
        hint, done = said(step), step.done
    assert hint == "You are out." and await walk.score() == 1.0


# Gymnasium, the real one


async def test_a_board_is_rendered_and_its_actions_have_names() -> None:
    options = {"is_slippery": False}
    env = GymnasiumEnv(
        id="FrozenLake-v1", options=options, actions=["left", "down", "right", "up"], render=True, prompt="Cross."
    )
    adapter = WithDeadlines(env, deadline_s=30.0)
    (first,) = await adapter.reset(TASK, seed=1)
    said_first = " ".join(first["content"].split())
    assert said_first == "Cross. Action: one of left, down, right, up. [S]FFF FHFH FFFH HFFG"
    wrong = await adapter.step("jump")
    assert said(wrong) == "Not an action. Answer with one of left, down, right, up." and wrong.reward is None
    for word in ("Down", "I go down, not up: down.", "right", "down", "right"):
        step = await adapter.step(word)
        assert not step.done
    step = await adapter.step("right")
    assert step == Step(messages=step.messages, done=True, reward=1.0) and "[G]" in said(step)
    assert await adapter.score() == 1.0
    await adapter.close()


async def test_numbers_are_observed_and_the_last_ones_are_the_action() -> None:
    env = WithDeadlines(GymnasiumEnv(id="CartPole-v1"), deadline_s=30.0)
    other = WithDeadlines(GymnasiumEnv(id="CartPole-v1", score="last"), deadline_s=30.0)
    first, again = await env.reset(TASK, seed=5), await other.reset(TASK, seed=5)
    assert first == again and first[0]["content"].startswith("Action: a whole number from 0 to 1.\n[")
    assert said(await env.step("0 is wrong, so 1")) == said(await other.step("1"))
    assert said(await env.step("2")) == "Not an action. Answer with a whole number from 0 to 1."
    await env.step("1")
    await other.step("1")
    assert (await env.score(), await other.score()) == (2.0, 1.0)
    await env.close()
    await other.close()


async def test_a_box_takes_as_many_numbers_as_it_has_within_its_bounds() -> None:
    env = WithDeadlines(GymnasiumEnv(id="Pendulum-v1"), deadline_s=30.0)
    (first,) = await env.reset(TASK, seed=0)
    assert "Action: 1 number, from -2 to 2." in first["content"]
    assert (await env.step("torque -1.5e0")).reward is not None
    assert said(await env.step("3")).startswith("Not an action")
    await env.close()


async def test_what_cannot_be_text_is_refused_by_name() -> None:
    for options, words in (
        ({"id": "NoSuch-v9"}, "must be one that can be made"),
        ({"id": "CartPole-v1", "actions": ["left"]}, "must name each of Discrete"),
    ):
        adapter = WithDeadlines(GymnasiumEnv(**options), deadline_s=30.0)
        with pytest.raises(EnvError, match=words):
            await adapter.reset(TASK, seed=0)
        await adapter.close()
    with pytest.raises(EnvError, match="must be return or last, got 'sum'"):
        GymnasiumEnv(id="CartPole-v1", score="sum")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "space", "action"),
    [
        ("2 0", ("MultiDiscrete", [3, 2]), [2, 0]),
        ("2 2", ("MultiDiscrete", [3, 2]), None),
        ("1, 0, 1", ("MultiBinary", 3), [1, 0, 1]),
        ("1", ("MultiBinary", 3), None),
        (" hello ", ("Text", 8), "hello"),
        ("far too long for it", ("Text", 8), None),
        ("9" * 400, ("Discrete", 3), None),
        ("1.5", ("Discrete", 3), None),
    ],
)
def test_a_text_is_an_action_of_its_space_or_none(text: str, space: tuple[str, Any], action: Any) -> None:
    from gymnasium import spaces

    from env_adapters.gymnasium_env import parse

    name, size = space
    found = parse(text, space=getattr(spaces, name)(size))
    assert (found.tolist() if hasattr(found, "tolist") else found) == action


def test_nested_observations_are_json_and_large_ones_are_refused() -> None:
    import numpy as np
    from gymnasium import spaces

    from env_adapters.gymnasium_env import as_text

    space = spaces.Dict(at=spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,))]), word=spaces.Text(5))
    value = {"at": (np.int64(2), np.array([0.123456789, 1.0], dtype=np.float32)), "word": "hi"}
    assert as_text(value, space=space) == '{"at": [2, [0.123457, 1.0]], "word": "hi"}'
    with pytest.raises(EnvError, match="at most 1024 numbers"):
        as_text(np.zeros((64, 64)), space=spaces.Box(0, 1, (64, 64)))


async def test_one_environment_that_hangs_does_not_hold_up_another() -> None:
    hanging = WithDeadlines(env_parts.Hangs(), deadline_s=0.2)
    step = asyncio.create_task(hanging.step("go"))
    env = WithDeadlines(GymnasiumEnv(id="Blackjack-v1"), deadline_s=30.0)
    await env.reset(TASK, seed=random.Random(0).randrange(9))
    await env.step("0")
    with pytest.raises(EnvError, match="must answer within"):
        await step
    await env.close()


async def test_a_call_that_runs_for_ever_is_ended_with_its_adapter() -> None:
    thread, turns = WorkerThread("spins"), list[int]()
    spinning = thread.submit(lambda: [turns.append(0) for _ in iter(int, 1) if len(turns) < 9])
    while not turns:
        await asyncio.sleep(0)
    await thread.end(lambda: turns.append(1))
    thread._thread.join(PATIENCE_S)
    assert not thread.alive and turns[-1] == 1
    with pytest.raises(RuntimeError, match="SystemExit"):
        spinning.result(PATIENCE_S)
