"""The environment agent: observations are appended as tokens, the reward is the environment's, failures have a reason."""

from __future__ import annotations

import asyncio

import pytest
from transformers import AutoTokenizer

from agents.agent_loop import AgentLoopOutput
from agents.loops.env_agent import EnvAgentLoop
from agents.loops.single_turn_agent import SingleTurnAgentLoop
from agents.workers.config import LoopSpec
from agents.workers.manager import AgentLoopManager
from agents.workers.worker import AgentLoopWorker, LoopResult, WorkerSettings
from buffers.errors import AgentError, EnvError, TaskError
from buffers.records import Task
from env_adapters.walk.game import walk_tasks
from tests.support.loop_parts import LOGPROB, ScriptedServer, make_loop
from tests.support.run_parts import assert_nothing_left, start

ROW = {"raw_prompt": [{"role": "user", "content": "unused"}], "task_id": "t", "extra_info": {}, "seed": 7}
ECHO = "tests.support.env_parts.EchoEnv"


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def said(tokenizer, text, *, end=True):
    return [*tokenizer.encode(text, add_special_tokens=False), *([tokenizer.eos_token_id] if end else [])]


async def play(tokenizer, answers, *, env=ECHO, row=ROW, room=4096, end=True, **settings):
    server = ScriptedServer([said(tokenizer, text, end=end) for text in answers])
    loop = make_loop(EnvAgentLoop, server=server, tokenizer=tokenizer, room=room, env=env, **settings)
    return server, await loop.run({}, **row)


def text_of(tokenizer, output, *, mask):
    return tokenizer.decode([i for i, m in zip(output.response_ids, output.response_mask, strict=True) if m == mask])


async def test_a_trajectory_is_sampled_ids_and_rendered_observations_in_turn(tokenizer):
    server, output = await play(tokenizer, ["hello", "stop"], row={**ROW, "ground_truth": "gold"})
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "seed 7 truth gold"}], add_generation_prompt=True, tokenize=False
    )
    assert output.prompt_ids == tokenizer.encode(rendered, add_special_tokens=False)
    middle = "\n<|im_start|>user\nyou said hello<|im_end|>\n<|im_start|>assistant\n"
    parts = [
        (said(tokenizer, "hello"), 1),
        (tokenizer.encode(middle, add_special_tokens=False), 0),
        (said(tokenizer, "stop"), 1),
    ]
    assert output.response_ids == [token for ids, _ in parts for token in ids]
    assert output.response_mask == [mask for ids, mask in parts for _ in ids]
    assert output.response_logprobs == [LOGPROB if mask else 0.0 for ids, mask in parts for _ in ids]
    assert server.prompts[1] == output.prompt_ids + output.response_ids[: -len(parts[2][0])]
    assert (output.reward_score, output.num_turns) == (2.0, 4)
    assert output.extra_fields == {"turn_scores": [0.5, 0.5], "env_done": True}
    assert output.step_rewards == [0.5, -0.5], "parts of the score: earned at their steps, and counted once"


DUEL = "tests.matrix.letters.env.Duel"


async def test_each_player_has_a_conversation_and_a_score_of_its_own(tokenizer):
    server, (first, second) = await play(tokenizer, ["ab", "mz"], env=DUEL)
    assert [output.reward_score for output in (first, second)] == [0.0, 0.0] and server.models == [""] * 4
    answers = iter(["ab", "yz", "cd", "ax"])
    server = ScriptedServer(lambda _: said(tokenizer, next(answers)))
    loop = make_loop(EnvAgentLoop, server=server, tokenizer=tokenizer, env=DUEL)
    first, second = await loop.run({}, **ROW)
    assert [(output.reward_score, output.num_turns, output.role) for output in (first, second)] == [
        (1.0, 4, ""),
        (-1.0, 4, ""),
    ]
    assert "ab" in text_of(tokenizer, first, mask=1) and "The other said yz" in text_of(tokenizer, first, mask=0)
    assert text_of(tokenizer, second, mask=1) == "yz<|im_end|>ax<|im_end|>"
    assert "You are player 1. The other said ab." in tokenizer.decode(second.prompt_ids)


async def test_roles_of_the_run_play_the_players_and_what_the_policy_does_not_say_is_not_trained(tokenizer):
    server = ScriptedServer(lambda _: said(tokenizer, "ab"))
    server.frozen = frozenset({"old"})
    loop = make_loop(EnvAgentLoop, server=server, tokenizer=tokenizer, env=DUEL, roles=["new", "old"])
    new, old = await loop.run({}, **ROW)
    assert server.models == ["new", "old", "new", "old"] and (new.role, old.role) == ("new", "old")
    assert text_of(tokenizer, new, mask=1) == "ab<|im_end|>" * 2 and set(old.response_mask) == {0}


async def test_an_episodes_score_is_the_mean_over_the_players_that_are_trained():
    outputs = tuple(
        AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[mask], reward_score=score)
        for mask, score in ((1, 1.0), (1, 0.5), (0, -1.0))
    )
    manager, task = AgentLoopManager([], num_workers=1), Task(task_id="t", prompt=[])
    assert await manager._judge(task, LoopResult(outputs=outputs)) == 0.75
    assert await manager._judge(task, LoopResult(outputs=outputs[2:])) == -1.0, "nobody's is trained"


async def test_a_game_that_is_cut_short_is_scored_and_one_turn_is_one_trajectory(tokenizer):
    _, output = await play(tokenizer, ["ab"], env=DUEL, max_steps=1)
    assert (output.reward_score, output.extra_fields["env_done"]) == (0.0, False)


async def test_roles_that_are_too_few_or_named_twice_are_refused(tokenizer):
    with pytest.raises(AgentError, match="more players than roles"):
        await play(tokenizer, ["ab", "cd"], env=DUEL, roles=["new"])
    with pytest.raises(TaskError, match="each role plays one player"):
        await play(tokenizer, [], env=DUEL, roles=["new", "new"])


async def test_an_answer_that_was_cut_short_is_closed_by_the_template(tokenizer):
    _, output = await play(tokenizer, ["hello", "stop"], end=False)
    assert text_of(tokenizer, output, mask=0).startswith("<|im_end|>\n<|im_start|>user\nyou said hello")


async def test_limits_end_the_episode_with_the_models_token_and_the_score_so_far(tokenizer):
    _, output = await play(tokenizer, ["go"] * 9, max_steps=3)
    assert (output.reward_score, output.response_mask[-1], output.extra_fields["env_done"]) == (3.0, 1, False)
    _, output = await play(tokenizer, ["go"] * 9, response_length=len(said(tokenizer, "go")) + 5)
    assert (output.reward_score, set(output.response_mask)) == (1.0, {1}), "what does not fit is not appended"


async def test_a_long_observation_loses_its_middle(tokenizer):
    options = {"observation": "a" * 50 + "b" * 50}
    _, output = await play(tokenizer, ["go", "stop"], options=options, max_observation_chars=20)
    assert "aaaaaaaaaa...(truncated)...bbbbbbbbbb" in text_of(tokenizer, output, mask=0)
    assert "a" * 11 not in text_of(tokenizer, output, mask=0)


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ("Hangs", "environment step: deadline"),
        ("Crashes", "environment step: Strange"),
        ("GivesNonsense", "environment step: wrong answer"),
    ],
)
async def test_an_environment_that_fails_ends_the_episode_with_the_short_reason(tokenizer, env, reason):
    with pytest.raises(AgentError) as failure:
        await play(
            tokenizer, ["go"] * 3, env=f"tests.support.env_parts.{env}", deadline_s=0.1 if env == "Hangs" else 10.0
        )
    assert str(failure.value) == reason


@pytest.mark.seconds
async def test_hundreds_of_episodes_have_an_environment_each(tokenizer):
    """Each looks for the number of its own seed, by halving."""
    names = {"Higher.": 1, "Lower.": -1}

    def answer(prompt_ids):
        text = tokenizer.decode(prompt_ids)
        low, high = 1, 100
        turns = text.split("<|im_start|>assistant\n")[1:]
        for turn in turns[:-1]:
            guess = int(turn.split("<|im_end|>")[0])
            word = turn.split("<|im_start|>user\n")[1].split()[0]
            low, high = (guess + 1, high) if names[word] > 0 else (low, guess - 1)
        return said(tokenizer, str((low + high) // 2))

    server = ScriptedServer(answer)
    loop = make_loop(EnvAgentLoop, server=server, tokenizer=tokenizer, env="guessing_game")
    outputs = await asyncio.gather(*(loop.run({}, **{**ROW, "seed": seed}) for seed in range(200)))
    assert {output.reward_score for output in outputs} == {1.0}
    assert len({output.response_ids[-2] for output in outputs}) > 5, "different seeds, different numbers"


async def test_the_walk_needs_its_ground_truth_and_gets_it(tokenizer):
    (task,) = walk_tasks(1, seed=4)
    row = {**task.public(), "raw_prompt": task.prompt, "ground_truth": task.ground_truth, "seed": 0}
    _, output = await play(tokenizer, ["x"] * 8, env="walk", row=row)
    assert (output.reward_score, output.num_turns, output.extra_fields["env_done"]) == (0.0, 16, True)
    assert "Invalid move. The exit is" in text_of(tokenizer, output, mask=0)


async def test_only_loops_that_play_environments_see_the_ground_truth(tiny_model):
    seen = {}

    class Spy(SingleTurnAgentLoop):
        async def run(self, sampling_params, **kwargs):
            seen[self.sees_ground_truth] = set(kwargs)
            raise AgentError("seen")

    class EnvSpy(Spy):
        sees_ground_truth = True

    settings = WorkerSettings(
        loops=(LoopSpec(name="single_turn_agent", target="agents.loops.single_turn_agent.SingleTurnAgentLoop"),),
        model_path=str(tiny_model), server_url="http://127.0.0.1:1", worker_key="", prompt_length=8, response_length=8,
    )  # fmt: skip
    worker = AgentLoopWorker(settings)
    for spy in (Spy, EnvSpy):
        worker._classes["single_turn_agent"] = spy
        result = await worker.run_agent_loop(
            "single_turn_agent", {**ROW, "ground_truth": "gold"}, sampling_params={}, api_key=""
        )
        assert result.error == "seen"
    assert "ground_truth" not in seen[False] and "raw_prompt" in seen[False]
    assert "ground_truth" in seen[True]
    await worker.close()


async def test_settings_are_checked_when_the_class_is_set_up(tokenizer):
    for settings, kind, says in (
        ({"env": ECHO, "max_step": 3}, TaskError, "max_step"),
        ({"env": "gues_game"}, EnvError, r"did you mean 'guessing_game'\?"),
        ({}, TaskError, "env: Field required"),
    ):
        with pytest.raises(kind, match=says):
            make_loop(EnvAgentLoop, server=ScriptedServer([]), tokenizer=tokenizer, **settings)
    with pytest.raises(AgentError, match="prompt too long"):
        await play(tokenizer, ["x"], room=8)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.long
def test_the_demo_is_played_as_an_adapter(tmp_path):
    small = ("sft.steps=10", "buffer.groups_per_step=4", "buffer.group_size=4")
    run = start(tmp_path, "run.steps=2", *small, config="configs/walk_env.yaml")
    code, output = run.wait()
    assert code == 0, output
    summary = run.summary()
    assert summary["steps"] == 2 and summary["episodes"] == 32 and summary["max_logprob_diff"] < 1e-4
    assert not [name for name in summary["buffer"] if name.startswith("failed/")], summary["buffer"]
    assert_nothing_left(run)
