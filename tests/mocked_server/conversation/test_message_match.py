"""Agents send answers back in their own spelling: which of them continue the exact tokens, and why the others do not."""

from __future__ import annotations

import json

import pytest

from tests.support.server_parts import ServerThread, whole_prompt

pytestmark = pytest.mark.slow  # servers of their own

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]
HELLO = [{"role": "user", "content": "What is 12 + 30?"}]
CALL = '<tool_call>\n{"name":"add","arguments":{"a":12,"b":30}}\n</tool_call>'
THOUGHT = "<think>\nTwo numbers.\n</think>\n\n"
TWO_CALLS = CALL + "\n" + CALL.replace("12", "1").replace("30", "2")


@pytest.fixture(scope="module")
def tolerant(tmp_path_factory):
    """Tools and reasoning parsed; the template drops earlier reasoning, as Qwen3's does."""
    thread = make_server(tmp_path_factory.mktemp("models") / "strips")
    yield thread
    thread.stop()


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    thread = make_server(tmp_path_factory.mktemp("models") / "strips", reasoning_parser=None, replay_match="strict")
    yield thread
    thread.stop()


def make_server(folder, *, reasoning_parser="qwen3", **server):
    from configs.schema import RolloutConfig
    from configs.tiny_model import make_tiny_model

    model = make_tiny_model(folder, strip_thinking=True)
    rollout = RolloutConfig(max_tokens=96, max_model_len=1024)
    thread = ServerThread(model, rollout=rollout, tool_parser="hermes", reasoning_parser=reasoning_parser, **server)
    thread.start()
    return thread


def play(served, answers, edit=lambda message: message, *, stream=False, tools=TOOLS, **options):
    """A conversation with tools; `edit` is what the agent does to each answer before it sends it back. -> (rounds, breaks)."""
    served.engine.prompts.clear()
    scripted = iter(answers)
    served.engine.answer = lambda _: served.ids(next(scripted))
    episode, client = served.lease()
    messages = list(HELLO)
    for turn in range(len(answers)):
        message = ask(client, messages, stream=stream, tools=tools, **options)
        if message.get("tool_calls"):
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": f"result {turn}"}
                for call in message["tool_calls"]
            ]
        else:
            results = [{"role": "user", "content": f"And {turn}?"}]
        messages = [*messages, edit(json.loads(json.dumps(message))), *results]
    rounds = served.stored(episode)
    assert [whole_prompt(rounds, r).tolist() for r in rounds] == served.engine.prompts
    return rounds, served.server.episodes.get(episode).branch_causes


def ask(client, messages, *, stream, tools, **options):
    if not stream:
        reply = client.chat.completions.create(model="policy", messages=messages, tools=tools, **options)
        return reply.choices[0].message.model_dump()
    with client.chat.completions.stream(model="policy", messages=messages, tools=tools, **options) as events:
        for _ in events:
            pass
        return events.get_final_completion().choices[0].message.model_dump()


def as_it_came(message):
    return message


def arguments_spelled_anew(message):
    for call in message["tool_calls"] or ():
        call["function"]["arguments"] = json.dumps({"b": 30.0, "a": 12}, indent=2)
    return message


def only_what_is_set(message):
    return {name: value for name, value in message.items() if value not in (None, [], "")} | {"role": "assistant"}


def nulls_and_empty_text(message):
    return {**message, "content": message["content"] or "", "refusal": None, "function_call": None, "name": None}


def text_as_parts(message):
    return {**message, "content": [{"type": "text", "text": message["content"]}] if message["content"] else None}


def without_reasoning(message):
    return {name: value for name, value in message.items() if name != "reasoning"}


def reasoning_in_its_other_name(message):
    return {**without_reasoning(message), "reasoning_content": message.get("reasoning")}


def trimmed(message):
    return {**message, "content": message["content"].strip() if message["content"] else None}


EDITS = [
    as_it_came, arguments_spelled_anew, only_what_is_set, nulls_and_empty_text, text_as_parts, without_reasoning,
    reasoning_in_its_other_name, trimmed,
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("edit", EDITS, ids=[edit.__name__ for edit in EDITS])
def test_an_answer_in_another_spelling_continues_its_exact_tokens(tolerant, edit, stream):
    answers = [THOUGHT + "Let me add. \n" + CALL, THOUGHT + CALL, THOUGHT + "It is 42.\n", THOUGHT + "Bye."]
    rounds, breaks = play(tolerant, answers, edit, stream=stream)
    assert [r.parent for r in rounds] == [None, 0, 1, 2]
    assert breaks == {}
    assert [r.sampled_ids.tolist() for r in rounds] == [tolerant.ids(answer) for answer in answers]


def test_parallel_calls_continue_in_one_branch(tolerant):
    rounds, breaks = play(tolerant, [THOUGHT + TWO_CALLS, THOUGHT + "Done."])
    assert [r.parent for r in rounds] == [None, 0]
    assert breaks == {}
    tail = tolerant.tokenizer.decode(rounds[1].tail_ids)
    assert tail.count("<tool_response>") == 2


def change(field, value):
    def edit(message):
        if field == "arguments":
            for call in message["tool_calls"] or ():
                call["function"]["arguments"] = value
            return message
        return {**message, field: value}

    return edit


@pytest.mark.parametrize(
    ("edit", "cause"),
    [
        (change("content", "Something else."), "content_edited"),
        (change("arguments", '{"a": 12, "b": 31}'), "tool_args_rewritten"),
        (change("tool_calls", None), "tool_calls_changed"),
        (change("reasoning", "I never thought that."), "reasoning_edited"),
    ],
)
def test_an_answer_that_says_something_else_starts_a_branch_with_its_cause(tolerant, edit, cause):
    rounds, breaks = play(tolerant, [THOUGHT + CALL, "It is 42."], edit)
    assert [r.parent for r in rounds] == [None, None]
    assert breaks == {cause: 1}


def conversation(served, requests, answer="ok", **options):
    """Send requests as given -> (parents, breaks)."""
    served.engine.answer = lambda _: served.ids(answer)
    episode, client = served.lease()
    for messages, more in requests:
        client.chat.completions.create(model="policy", messages=messages, **{**options, **more})
    return [r.parent for r in served.stored(episode)], served.server.episodes.get(episode).branch_causes


SYSTEM = [{"role": "system", "content": "Add numbers."}]
USER = {"role": "user", "content": "One."}
NEXT = {"role": "user", "content": "Two."}
OK = {"role": "assistant", "content": "ok"}
LONG = [*SYSTEM, USER, OK, NEXT]


@pytest.mark.parametrize(
    ("requests", "parents", "breaks"),
    [
        ([([USER], {}), ([USER], {})], [None, None], {"resampled": 1}),
        ([([USER], {}), ([USER, OK, NEXT], {}), ([USER, OK, USER], {})], [None, 0, 0], {"forked": 1}),
        ([([USER], {}), ([USER, NEXT], {})], [None, None], {"reply_dropped": 1}),
        ([([*SYSTEM, USER], {}), ([{"role": "user", "content": "Sub-task."}], {})], [None, None], {"new_conversation": 1}),
        (
            [([*SYSTEM, USER], {}), (LONG, {}), ([*SYSTEM, {"role": "user", "content": "Summary."}], {})],
            [None, 0, None],
            {"history_compacted": 1},
        ),
        ([([*SYSTEM, USER], {}), (LONG, {}), ([*SYSTEM, USER, NEXT], {})], [None, 0, None], {"history_compacted": 1}),
        ([([*SYSTEM, USER], {}), ([*SYSTEM, NEXT, OK, NEXT], {})], [None, None], {"history_edited": 1}),
        (
            [([*SYSTEM, USER], {}), ([{"role": "system", "content": "It is noon."}, USER, OK, NEXT], {})],
            [None, None],
            {"system_changed": 1},
        ),
        ([([USER], {}), ([USER, OK, NEXT], {"tools": TOOLS})], [None, None], {"tools_changed": 1}),
        (
            [([USER], {}), ([USER, OK, NEXT], {}), ([USER, OK, NEXT, {**OK, "content": "no"}, NEXT], {})],
            [None, 0, 0],
            {"content_edited": 1},
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_branch_has_a_cause(tolerant, requests, parents, breaks):
    assert conversation(tolerant, requests) == (parents, breaks)


def test_strict_keeps_what_the_template_writes(strict):
    """Text that the template writes back as it was sampled continues; reasoning that it drops starts a branch."""
    rounds, breaks = play(strict, ["One.", "Two."])
    assert ([r.parent for r in rounds], breaks) == ([None, 0], {})
    rounds, breaks = play(strict, [THOUGHT + "One.", "Two."])
    assert ([r.parent for r in rounds], breaks) == ([None, None], {"template_strips_thinking": 1})
    rounds, breaks = play(strict, [CALL, "Two."])
    assert ([r.parent for r in rounds], breaks) == ([None, None], {"template_rewrites_history": 1})


def test_strict_names_tokens_that_a_tokenizer_would_not_give(strict):
    letters = [i for letter in "north" for i in strict.tokenizer.encode(letter)] + [strict.tokenizer.eos_token_id]
    assert letters != strict.ids("north")
    strict.engine.answer = lambda _: letters
    episode, client = strict.lease()
    client.chat.completions.create(model="policy", messages=[USER])
    client.chat.completions.create(model="policy", messages=[USER, {**OK, "content": "north"}, NEXT])
    assert [r.parent for r in strict.stored(episode)] == [None, None]
    assert strict.server.episodes.get(episode).branch_causes == {"retokenized": 1}


@pytest.mark.parametrize(("mark", "breaks"), [("</code>", {}), ("", {}), ("</end>", {"content_edited": 1})])
def test_a_stop_string_may_be_put_back_or_left_out(tolerant, mark, breaks):
    engine, episode_client = tolerant.engine, tolerant.lease()
    engine.stop = "</code>"
    engine.answer = lambda _: tolerant.ids(THOUGHT + "<code>add()</code>", end=False)
    try:
        message = ask(episode_client[1], HELLO, stream=False, tools=None)
        assert message["content"].strip() == "<code>add()"
        reply = {"role": "assistant", "content": message["content"] + mark}
        ask(episode_client[1], [*HELLO, reply, {"role": "user", "content": "Go on."}], stream=False, tools=None)
    finally:
        engine.stop = ""
    live = tolerant.server.episodes.get(episode_client[0])
    assert {cause.value: number for cause, number in live.branch_causes.items()} == breaks
    first, second = tolerant.stored(episode_client[0])
    assert second.parent == (None if breaks else 0)
    if not breaks:
        exact = [*first.tail_ids.tolist(), *first.sampled_ids.tolist()]
        assert engine.prompts[-1][: len(exact)] == exact


def hermes(call):
    return f"<tool_call>\n{call}\n</tool_call>"


SPOKEN = {
    "no arguments": hermes('{"name": "add"}'),
    "cut": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b"',
    "a comma too many": hermes('{"name": "add", "arguments": {"a": 1, "b": 2,}}'),
    "a brace too many": hermes('{"name": "add", "arguments": {"a": 1, "b": 2}}}'),
    "a brace too few": hermes('{"name": "add", "arguments": {"a": 1, "b": 2}'),
    "a quote too few": hermes('{"name": "add", "arguments": {"a: 1, "b": 2}}'),
    "several in one": hermes('[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]'),
    "parameters": hermes('{"name": "add", "parameters": {"a": 1, "b": 2}}'),
    "marks in words": "I write <tool_call> first and </tool_call> last.",
    "words after it": hermes('{"name": "add", "arguments": {"a": 1, "b": 2}}') + "\nThat is it.",
    "a thought": THOUGHT + hermes('{"name": "add", "arguments": {"a": 1, "b": 2}}'),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("spoken", SPOKEN)
def test_what_was_told_is_recognised_as_it_comes_back(tolerant, spoken, stream):
    rounds, breaks = play(tolerant, [SPOKEN[spoken], "Done."], only_what_is_set, stream=stream)
    assert ([r.parent for r in rounds], breaks) == ([None, 0], {})


@pytest.mark.parametrize("stream", [True, False])
def test_of_calls_one_at_a_time_the_first_is_told_and_recognised(tolerant, stream):
    calls = [hermes(json.dumps({"name": "add", "arguments": {"a": 1, "b": n}})) for n in (2, 3)]
    rounds, breaks = play(
        tolerant, ["\n".join(calls), "Done."], only_what_is_set, stream=stream, parallel_tool_calls=False
    )
    assert ([r.parent for r in rounds], breaks) == ([None, 0], {})


FORMS = {
    "a control token after a line break": (
        "### Instruction:\n{}\n",
        "### Response:\n{}\nEND\n",
        "### Response:\n",
        [None, 0, 1],
    ),
    "a line break": ("### Instruction:\n{}\n", "### Response:\n{}\n", "### Response:\n", [None, None, None]),
    "spoken roles": ("USER: {} ", "ASSISTANT: {}END", "ASSISTANT: ", [None, 0, 1]),
    "nothing": ("END user\n{}", "\nanswer\n{}", "\nanswer\n", [None, 0, 1]),
}


@pytest.mark.parametrize("form", FORMS)
def test_no_message_is_lost_however_a_template_ends_turns(tmp_path, form):
    from transformers import AutoTokenizer

    from benchmarks.chat_families import turns
    from configs.schema import RolloutConfig
    from configs.tiny_model import make_tiny_model

    model = make_tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    user, answer, opens, parents = FORMS[form]
    end = tokenizer.eos_token
    family = turns(user.replace("END", end), answer.replace("END", end), end, opens=opens)
    tokenizer.chat_template = family.template
    tokenizer.save_pretrained(model)
    thread = ServerThread(model, rollout=RolloutConfig(max_tokens=96, max_model_len=1024))
    thread.start()
    try:
        scripted = iter(["First.\nSecond.", "Done.", "Yes."])
        thread.engine.answer = lambda _: thread.ids(next(scripted))
        episode, client = thread.lease()
        messages = []
        for words in ("One.\nMore.", "TypeError: unsupported\n\nMend it, and keep sub.", "Go on.\n"):
            messages.append({"role": "user", "content": words})
            reply = client.chat.completions.create(model="policy", messages=messages)
            shown = thread.tokenizer.decode(thread.engine.prompts[-1])
            assert [shown.count(message["content"]) for message in messages] == [1] * len(messages)
            assert shown.endswith(family.render(messages[-1:])), "the new turn, and what opens the answer"
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        assert [round_.parent for round_ in thread.stored(episode)] == parents
        causes = thread.server.episodes.get(episode).branch_causes
        assert sum(causes.values()) == parents[1:].count(None), "branches are counted"
    finally:
        thread.stop()
