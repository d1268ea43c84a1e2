"""Rules of buffers/log_forms.py: what is written in a form is read from it again; anything else is counted, and raises nothing."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers.log_forms import (
    ATIF,
    CHAT,
    SHAREGPT,
    SPANS,
    BadRecord,
    Session,
    checked,
    conversation_of_span,
    conversations,
    form_of,
    spans_of,
    to_atif,
    to_messages,
)
from buffers.tasks.logs import row_of
from buffers.tasks.parquet import BadCell

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAME = st.text("abcdef_", min_size=1, max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(NAME, JSON, max_size=3).map(json.dumps) | TEXT
"""A model writes what it likes."""


@st.composite
def sessions(draw: Any) -> Session:
    """Conversations as a program logs them: turns, calls with all their results, thoughts, some answers as context."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": draw(st.sampled_from(["system", "developer"])), "content": draw(TEXT)})
        messages[0]["role"] = "system"
    for turn in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(TEXT)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(TEXT)}
        if thought := draw(TEXT):
            answer["reasoning_content"] = thought
        calls = [
            {"id": f"c{turn}{n}", "type": "function", "function": {"name": draw(NAME), "arguments": draw(ARGUMENTS)}}
            for n in range(draw(st.integers(0, 2)))
        ]
        if calls:
            answer["tool_calls"] = calls
        if (turn and draw(st.booleans())) or not (answer["content"] or calls):
            answer["weight"] = 0
        messages.append(answer)
        order = draw(st.permutations(calls))
        messages += [{"role": "tool", "content": draw(TEXT), "tool_call_id": call["id"]} for call in order]
    messages.append({"role": "assistant", "content": "done"})
    tools = draw(st.none() | st.lists(st.fixed_dictionaries({"name": NAME}), min_size=1, max_size=2))
    return Session(
        messages=messages,
        tools=None if tools is None else [{"type": "function", "function": tool} for tool in tools],
        score=draw(st.none() | st.floats(-2, 2)),
        source=draw(NAME),
        model=draw(st.sampled_from(["", "m"])),
    )


def read(record: Any) -> Session:
    (found,) = conversations(json.loads(json.dumps(record)), form=form_of(record) or "", source="?")
    return checked(found, causes=Counter())


@pytest.mark.seconds
@given(sessions())
@settings(max_examples=300, deadline=None)
def test_chat_messages_and_atif_give_back_what_was_written(session: Session) -> None:
    assert read(to_messages(session)) == session
    assert read(to_atif(session)) == session


@pytest.mark.seconds
@given(sessions(), st.data())
@settings(deadline=None)
def test_ids_and_log_probabilities_stand_with_the_answer_that_they_are_of(session: Session, data: Any) -> None:
    answers = [message for message in session.messages if message["role"] == "assistant"]
    metrics = [{"completion_token_ids": [n], "logprobs": [-float(n)]} for n, _ in enumerate(answers)]
    steps = [step for step in to_atif(session, metrics=metrics)["steps"] if step["source"] == "agent"]
    assert [step["metrics"]["completion_token_ids"] for step in steps] == [[n] for n in range(len(answers))]
    assert [step["message"] for step in steps] == [answer["content"] for answer in answers]
    assert read(to_atif(session, metrics=metrics)) == session


KEYS = ("messages", "conversations", "steps", "schema_version", "role", "content", "from", "value", "attributes", "context",
        "tool_calls", "function", "observation", "results", "parts", "type", "text", "resourceSpans", "tools", "agent", "extra",
        "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.operation.name", "subagent_trajectories", "weight")  # fmt: skip
WORDS = st.sampled_from(
    ["user", "assistant", "ATIF-v1.6", "agent", "chat", "text", "tool", "function_call", '{"a": 1}', "[{}]"]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=30,
)


@pytest.mark.seconds
@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING, min_size=1))
@settings(max_examples=1500, deadline=None)
def test_a_record_is_a_conversation_or_has_a_cause_whatever_it_holds(record: dict[str, Any]) -> None:
    try:
        form = form_of(record)
        if form == SPANS:
            found = [conversation_of_span(attributes, trace_id=trace) for trace, attributes in spans_of(record)]
        else:
            found = list(conversations(record, form=form, source="?")) if form else []
        for session in found:
            if session is not None:
                row_of(checked(session, causes=Counter()))
    except (BadRecord, BadCell):
        pass


def told(messages: list[dict[str, Any]]) -> tuple[Session | str, dict[str, int]]:
    causes: Counter[str] = Counter()
    try:
        return checked(Session(messages=messages), causes=causes), {k: n for k, n in causes.items() if n}
    except BadRecord as error:
        return str(error), {k: n for k, n in causes.items() if n}


CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}
ASK, SAY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}


@pytest.mark.parametrize(
    ("messages", "kept", "cause"),
    [
        ([ASK, SAY, ASK, CALL, ASK, SAY], 4, "call without its result"),
        ([ASK, SAY, {"role": "tool", "content": "?"}, SAY], 2, "result without its call"),
        ([ASK, SAY, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, SAY], 2, "image"),
        ([ASK, SAY, {"role": "critic", "content": "x"}, SAY], 2, "role 'critic'"),
        ([ASK, SAY, ASK, {**SAY, "finish_reason": "length"}], 4, "answer cut in the middle"),
        ([ASK, SAY, ASK, {"role": "assistant", "content": None}], 4, "empty answer"),
        ([ASK, SAY, ASK, {**CALL, "tool_calls": [{"id": "a"}]}], 3, "call without a name"),
    ],
)
def test_a_conversation_ends_where_no_text_model_could_continue_and_the_cause_is_named(
    messages: list[dict[str, Any]], kept: int, cause: str
) -> None:
    session, causes = told(messages)
    assert isinstance(session, Session) and causes == {cause: 1}
    assert len(session.messages) == kept
    assert session.messages[-1].get("weight", 1) == (0 if cause in ("answer cut in the middle", "empty answer") else 1)


def test_a_conversation_without_an_answer_has_a_cause() -> None:
    assert told([ASK]) == ("no answer", {})
    assert told([{"role": "user", "content": [{"type": "image"}]}, SAY])[0] == "no answer before: image"
    assert told([ASK, {**SAY, "weight": 0}])[0] == "no answer"


def test_sharegpt_in_its_spellings() -> None:
    turns = [
        ("system", "S"),
        ("human", "Q"),
        ("function_call", '{"name": "f", "arguments": {"a": 1}}'),
        ("observation", "R"),
        ("gpt", "A"),
    ]
    record = {"conversations": [{"from": said, "value": value} for said, value in turns], "tools": '[{"name": "f"}]'}
    session = read(record)
    assert form_of(record) == SHAREGPT
    assert [message["role"] for message in session.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert session.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert session.messages[3]["tool_call_id"] == session.messages[2]["tool_calls"][0]["id"]
    assert session.tools == [{"type": "function", "function": {"name": "f"}}]


def test_old_function_calls_and_parts_of_text_are_messages_of_today() -> None:
    record = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "R"},
            SAY,
        ],
        "functions": [{"name": "f"}],
    }
    session = read(record)
    assert form_of(record) == CHAT and session.messages[0]["content"] == "a\nb"
    assert (
        session.messages[2] == {"role": "tool", "content": "R", "tool_call_id": "call_1_0"}
        and session.tools is not None
    )


def test_atif_of_sub_agents_copied_context_and_what_no_call_asked_for() -> None:
    steps = [
        {"step_id": 1, "source": "user", "message": "Q"},
        {"step_id": 2, "source": "agent", "message": "old", "is_copied_context": True},
        {"step_id": 3, "source": "agent", "message": "ls", "observation": {"results": [{"content": "a b"}]}},
        {"step_id": 4, "source": "agent", "message": "", "model_name": "two",
         "tool_calls": [{"tool_call_id": name, "function_name": "f", "arguments": {}} for name in "xy"],
         "observation": {"results": [{"content": "both"}]}},
        {"step_id": 5, "source": "agent", "message": "A"},
    ]  # fmt: skip
    sub = {"schema_version": "ATIF-v1.7", "trajectory_id": "sub", "agent": {}, "steps": [steps[0], steps[4]]}
    record = {"schema_version": "ATIF-v1.7", "agent": {"model_name": "one"}, "steps": steps, "subagent_trajectories": [sub],
              "extra": {"reward": 1}}  # fmt: skip
    assert form_of(record) == ATIF
    main, other = (checked(each, causes=Counter()) for each in conversations(record, form=ATIF, source="file"))
    assert [m["role"] for m in main.messages] == [
        "user",
        "assistant",
        "assistant",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert main.messages[1]["weight"] == 0 and [m["content"] for m in main.messages[5:7]] == ["both", ""]
    assert (main.score, main.model, main.source, other.source, len(other.messages)) == (
        1.0,
        "one, two",
        "file",
        "sub",
        2,
    )
