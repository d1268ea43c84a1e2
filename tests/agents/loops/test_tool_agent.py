"""The tool agent: the worked trajectory of verl's documents, id for id, and everything that can go wrong in one."""

from __future__ import annotations

import asyncio
import json

import pytest
from transformers import AutoTokenizer

from agents.loops.tool_agent import ToolAgentLoop
from buffers.errors import AgentError, TaskError
from tests.support.loop_parts import LOGPROB, ScriptedServer, make_loop

TOOLS = """
tools:
  - class_name: tests.agents.loop_tools.SecretTool
    config: {type: native}
  - function: tests.agents.loop_tools.add
  - function: tests.agents.loop_tools.fails
"""
PROMPT = [{"role": "user", "content": "Find the sum of 12 and 30."}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def tools_yaml(tmp_path):
    path = tmp_path / "tools.yaml"
    path.write_text(TOOLS)
    return str(path)


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(tokenizer, text, *, end=True):
    return [*tokenizer.encode(text, add_special_tokens=False), *([tokenizer.eos_token_id] if end else [])]


async def play(tokenizer, answers, tools_yaml, *, extra_info=None, **settings):
    server = ScriptedServer([said(tokenizer, text) for text in answers])
    loop = make_loop(ToolAgentLoop, server=server, tokenizer=tokenizer, tool_config_path=tools_yaml, **settings)
    return server, await loop.run({}, raw_prompt=PROMPT, extra_info=extra_info or {})


def text_of(tokenizer, output, *, mask):
    return tokenizer.decode([i for i, m in zip(output.response_ids, output.response_mask, strict=True) if m == mask])


@pytest.mark.seconds
async def test_the_worked_trajectory_has_the_ids_and_masks_of_prompt_call_result_and_answer(tokenizer, tools_yaml):
    first, last = call("add", a=12, b=30), "The sum is 42."
    server, output = await play(tokenizer, [first, last], tools_yaml)
    result = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    middle = tokenizer.encode(result, add_special_tokens=False)
    expected = [(said(tokenizer, first), 1), (middle, 0), (said(tokenizer, last), 1)]
    assert output.response_ids == [token for ids, _ in expected for token in ids]
    assert output.response_mask == [mask for ids, mask in expected for _ in ids]
    assert output.response_logprobs == [LOGPROB if mask else 0.0 for ids, mask in expected for _ in ids]
    assert output.prompt_ids == server.prompts[0]
    assert server.prompts[1] == output.prompt_ids + said(tokenizer, first) + middle
    assert output.num_turns == 4
    # What a fresh rendering of the whole chat would give: the same text, though not by way of it.
    whole = [
        *PROMPT,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 12, "b": 30}}}],
        },
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": last},
    ]
    schemas = (await tools_of(tools_yaml)).schemas
    rendered = tokenizer.apply_chat_template(whole, tools=schemas, tokenize=False)
    assert tokenizer.decode(output.prompt_ids + output.response_ids) == rendered.removesuffix("\n")


async def tools_of(tools_yaml):
    from pathlib import Path

    from agents.tools.toolbox import Toolbox

    async with Toolbox.load(Path(tools_yaml)).open() as tools:
        return tools


async def test_three_results_of_one_turn_are_one_turn_in_the_order_of_the_calls(tokenizer, tools_yaml):
    calls = "\n".join(call("add", a=1, b=n) for n in (1, 2, 3))
    _, output = await play(tokenizer, [calls, "done"], tools_yaml)
    assert text_of(tokenizer, output, mask=0) == (
        "\n<|im_start|>user"
        "\n<tool_response>\n2\n</tool_response>"
        "\n<tool_response>\n3\n</tool_response>"
        "\n<tool_response>\n4\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert output.num_turns == 4


async def test_an_answer_that_was_cut_short_is_closed_by_the_template(tokenizer, tools_yaml):
    server = ScriptedServer([said(tokenizer, call("add", a=1, b=1), end=False), said(tokenizer, "2")])
    loop = make_loop(ToolAgentLoop, server=server, tokenizer=tokenizer, tool_config_path=tools_yaml)
    output = await loop.run({}, raw_prompt=PROMPT)
    assert text_of(tokenizer, output, mask=0).startswith("<|im_end|>\n<|im_start|>user\n<tool_response>")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("<tool_call>\n{not json}\n</tool_call>", "could not be read"),
        (call("ad", a=1, b=2), "'add'"),
        (call("add", a="one"), "add"),
        (call("fails"), "ValueError: on purpose"),
    ],
)
async def test_what_goes_wrong_with_a_call_is_told_to_the_model(tokenizer, tools_yaml, wrong, says):
    _, output = await play(tokenizer, [wrong, "I see."], tools_yaml)
    assert says in text_of(tokenizer, output, mask=0)
    assert text_of(tokenizer, output, mask=1).endswith("I see.<|im_end|>")
    _, ended = await play(tokenizer, [wrong, "never"], tools_yaml, on_tool_error="end")
    assert text_of(tokenizer, ended, mask=1) == wrong + "<|im_end|>"
    assert ended.extra_fields["tool_error"]


async def test_limits_end_the_episode_with_the_models_token(tokenizer, tools_yaml):
    ask = call("add", a=1, b=1)
    _, output = await play(tokenizer, [ask] * 9, tools_yaml, max_assistant_turns=3)
    assert (output.num_turns, output.response_mask[-1]) == (1 + 3 + 2, 1)
    _, output = await play(tokenizer, [ask] * 9, tools_yaml, max_user_turns=1, max_assistant_turns=None)
    assert output.num_turns == 1 + 2 + 1
    room = len(said(tokenizer, ask)) + 5
    _, output = await play(tokenizer, [ask] * 9, tools_yaml, response_length=room)
    assert len(output.response_ids) <= room
    assert set(output.response_mask) == {1}, "a result that does not fit is not appended"


async def test_an_answer_that_fills_the_response_calls_no_tool(tokenizer, tools_yaml):
    ask = call("fails")
    room = len(said(tokenizer, ask))
    server, output = await play(tokenizer, [ask, "never"], tools_yaml, response_length=room)
    assert output.response_ids == said(tokenizer, ask) and len(server.prompts) == 1
    assert output.extra_fields["tool_error"] is None and output.extra_fields["turn_scores"] == []
    _, output = await play(tokenizer, [ask, "never"], tools_yaml, response_length=room + 1)
    assert output.extra_fields["tool_error"] == "fails: raised", "with room for one token it is called"


async def test_results_that_do_not_fit_end_the_episode(tokenizer, tools_yaml):
    ask = call("add", a=1, b=1)
    room = len(said(tokenizer, ask)) + 5
    server, output = await play(tokenizer, [ask] * 9, tools_yaml, response_length=room)
    assert len(server.prompts) == 1 and output.response_ids == said(tokenizer, ask)
    assert output.num_turns == 1 + 1


async def test_a_model_that_goes_on_asking_is_answered_seven_times(tokenizer, tools_yaml):
    ask = call("add", a=1, b=1)
    server, output = await play(tokenizer, [ask] * 9, tools_yaml)
    assert len(server.prompts) == 8 and output.num_turns == 1 + 8 + 7


async def test_calls_beyond_the_limit_are_answered_with_an_error(tokenizer, tools_yaml):
    calls = "\n".join(call("add", a=1, b=n) for n in (1, 2, 3))
    _, output = await play(tokenizer, [calls, "done"], tools_yaml, max_parallel_calls=2)
    told = text_of(tokenizer, output, mask=0)
    assert told.count("<tool_response>") == 3
    assert "at most 2 calls" in told


async def test_a_long_result_is_cut_on_the_side_asked_for(tokenizer, tools_yaml):
    ask = call("secret", repeat=50)
    kwargs = {"tools_kwargs": {"secret": {"create_kwargs": {"secret": "ab"}}}}
    for side, start, end in (("left", "abab", "(truncated)"), ("right", "(truncated)", "abab")):
        _, output = await play(
            tokenizer, [ask, "x"], tools_yaml, extra_info=kwargs,
            max_tool_response_length=10, tool_response_truncate_side=side,
        )  # fmt: skip
        told = text_of(tokenizer, output, mask=0).split("<tool_response>\n")[1].split("\n</tool_response>")[0]
        assert told.startswith(start), side
        assert told.endswith(end), side


@pytest.mark.seconds
async def test_hundreds_of_episodes_keep_their_secrets_apart(tokenizer, tools_yaml):
    ask = said(tokenizer, call("secret", repeat=1))

    def answer(prompt_ids):
        return ask if "tool_response" not in tokenizer.decode(prompt_ids[-80:]) else said(tokenizer, "ok")

    server = ScriptedServer(answer)
    loop = make_loop(ToolAgentLoop, server=server, tokenizer=tokenizer, tool_config_path=tools_yaml)

    async def one(number):
        kwargs = {"tools_kwargs": {"secret": {"create_kwargs": {"secret": f"s{number}e"}}}}
        return await loop.run({}, raw_prompt=PROMPT, extra_info=kwargs)

    outputs = await asyncio.gather(*(one(number) for number in range(300)))
    for number, output in enumerate(outputs):
        told = text_of(tokenizer, output, mask=0)
        assert told.split("<tool_response>\n")[1].split("\n</tool_response>")[0] == f"s{number}e"
        assert output.extra_fields["tool_rewards"] == {"secret": float(number)}
    assert loop.toolbox._tools["secret"].secrets == {}, "every instance was released"


async def test_rewards_of_calls_are_their_answers_and_tools_see_the_episodes_state(tokenizer, tools_yaml):
    greedy, modest = call("secret", repeat=2), call("secret", repeat=1)
    kwargs = {"secret": {"create_kwargs": {"secret": "ab"}}}
    _, output = await play(
        tokenizer, [greedy + greedy, modest, "done"], tools_yaml, extra_info={"tools_kwargs": kwargs}
    )
    assert output.step_rewards == [-0.5, 0.0, 0.0] and output.extra_fields["turn_scores"] == [-0.25, -0.25, 0.0]
    assert output.extra_fields["asked_in_turn"] == 2


async def test_a_row_says_whether_its_tools_need_arguments(tokenizer, tools_yaml):
    row = {"need_tools_kwargs": False, "tools_kwargs": {"secret": {"create_kwargs": {"secret": "ab"}}}}
    _, output = await play(tokenizer, [call("secret", repeat=1), "x"], tools_yaml, extra_info=row)
    assert "ab" not in text_of(tokenizer, output, mask=0)
    with pytest.raises(AgentError, match="tools_kwargs must hold the tools' arguments, as need_tools_kwargs is true"):
        await play(tokenizer, ["x"], tools_yaml, extra_info={"need_tools_kwargs": True})


async def test_only_the_rows_tools_are_offered(tokenizer, tools_yaml):
    server, _ = await play(tokenizer, ["hi"], tools_yaml, extra_info={"tool_selection": ["add"]})
    prompt = tokenizer.decode(server.prompts[0])
    assert '"add"' in prompt
    assert '"secret"' not in prompt


async def test_a_prompt_without_room_for_an_answer_is_refused(tokenizer, tools_yaml):
    server = ScriptedServer([[1]])
    loop = make_loop(ToolAgentLoop, server=server, tokenizer=tokenizer, room=64, tool_config_path=tools_yaml)
    with pytest.raises(AgentError, match=r"max_model_len=64"):
        await loop.run({}, raw_prompt=PROMPT)


async def test_settings_are_checked_when_the_class_is_set_up(tokenizer, tools_yaml):
    for settings, says in (({"max_user_turn": 3}, "max_user_turn"), ({"format": "hermez"}, "did you mean 'hermes'")):
        with pytest.raises(TaskError, match=says):
            make_loop(
                ToolAgentLoop, server=ScriptedServer([]), tokenizer=tokenizer, tool_config_path=tools_yaml, **settings
            )
