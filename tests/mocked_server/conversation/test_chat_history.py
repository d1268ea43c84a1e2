"""Rules of mocked_server/conversation/chat_history.py: which chats are the same history, however a client spells them."""

from __future__ import annotations

import hashlib
from pathlib import PurePath
from typing import Any

import pytest

from mocked_server.conversation.chat_history import (
    DIGEST_BYTES,
    ChatOptions,
    Conversation,
    ParsedReply,
    difference,
    joined_text,
    reply_of,
    same_text,
)

ASKED = ChatOptions.of({}, None)
USER = {"role": "user", "content": "One."}


def call(name: str = "add", arguments: Any = '{"a": 1}', *, id: str = "1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(content: Any = None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def result(content: Any = "3", *, id: str = "1", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content, **more}


def digest(*messages: dict[str, Any]) -> bytes:
    return Conversation.of(messages, ASKED).digests[-1]


SAME = {
    "parts": ([USER], [{"role": "user", "content": [{"type": "text", "text": "One."}]}]),
    "one part as text": ([USER], [{"role": "user", "content": ["One."]}]),
    "null fields": ([USER, said("ok")], [USER, {"role": "assistant", "content": "ok", "refusal": None}]),
    "no text": ([said(None, call())], [said("", call())]),
    "spaces": ([said("ok")], [said(" ok\n")]),
    "reasoning": ([said("ok", reasoning="I thought.")], [said("ok")]),
    "arguments": ([said(None, call(arguments='{"b": 2, "a": 1.0}'))], [said(None, call(arguments='{"a":1,"b":2}'))]),
    "arguments as object": ([said(None, call(arguments={"a": 1}))], [said(None, call())]),
    "ids of calls": (
        [said(None, call(id="x"), call("sub", id="y")), result(id="y"), result(id="x")],
        [said(None, call(id="1"), call("sub", id="2")), result(id="2"), result(id="1")],
    ),
    "ids as numbers": ([said(None, call(id=7)), result(id=7)], [said(None, call(id="x")), result(id="x")]),  # type: ignore
    "what is no JSON": (
        [{"role": "user", "content": [{"image": PurePath("a")}]}],
        [{"role": "user", "content": [{"image": PurePath("a")}]}],
    ),
    "null content": ([{"role": "user", "content": None}], [{"role": "user", "content": ""}]),
}
OTHER = {
    "words": ([USER], [{"role": "user", "content": "Two."}]),
    "role": ([USER], [{"role": "system", "content": "One."}]),
    "spaces of a user": ([USER], [{"role": "user", "content": "One. "}]),
    "name": ([USER], [{**USER, "name": "Ann"}]),
    "names": ([{**USER, "name": "Bob"}], [{**USER, "name": "Ann"}]),
    "several parts": ([USER], [{"role": "user", "content": [{"text": "One"}, {"text": "."}]}]),
    "image": (
        [{"role": "user", "content": [{"text": "One."}, {"image_url": "a"}]}],
        [{"role": "user", "content": [{"text": "One."}, {"image_url": "b"}]}],
    ),
    "what is no JSON": (
        [{"role": "user", "content": [{"image": PurePath("a")}]}],
        [{"role": "user", "content": [{"image": PurePath("b")}]}],
    ),
    "no call": ([said("ok", call())], [said("ok")]),
    "another call": ([said("ok", call())], [said("ok", call("sub"))]),
    "other arguments": ([said("ok", call())], [said("ok", call(arguments='{"a": 2}'))]),
    "arguments that are no JSON": ([said("ok", call(arguments="{a"))], [said("ok", call(arguments="{b"))]),
    "two calls": ([said("ok", call())], [said("ok", call(), call())]),
    "order of calls": ([said("", call(), call("sub"))], [said("", call("sub"), call())]),
    "which call is answered": (
        [said(None, call(id="x"), call("sub", id="y")), result(id="x")],
        [said(None, call(id="x"), call("sub", id="y")), result(id="y")],
    ),
    "a call nobody made": ([result(id="x")], [result(id="y")]),
    "an answer": ([said("ok")], [said("no")]),
    "who said it": ([said("ok")], [{"role": "user", "content": "ok"}]),
    "where it ends": ([USER, said("ok")], [USER]),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_other_spellings_are_the_same_history(one: list[Any], other: list[Any]) -> None:
    assert digest(*one) == digest(*other)
    assert digest(*one, USER) == digest(*other, USER)


@pytest.mark.parametrize(("one", "other"), OTHER.values(), ids=OTHER)
def test_other_words_calls_and_names_are_another_history(one: list[Any], other: list[Any]) -> None:
    assert digest(*one) != digest(*other)
    assert digest(*one, USER) != digest(*other, USER)


def test_each_prefix_has_its_digest() -> None:
    chat = Conversation.of([USER, said("ok"), USER], ASKED)
    assert len(chat.digests) == 4 and len(set(chat.digests)) == 4 and len(chat) == 3
    assert all(len(each) == DIGEST_BYTES == 16 for each in chat.digests)
    assert chat.digests[0] == hashlib.blake2b(digest_size=16).digest()
    assert [digest(*chat.messages[:length]) for length in range(4)] == list(chat.digests)


def test_objects_are_read_like_what_they_hold() -> None:
    class Message:
        def model_dump(self) -> dict[str, Any]:
            return USER

    chat = Conversation.of([Message()], ASKED)  # type: ignore[list-item]
    assert chat.messages == [USER] and chat.digests[-1] == digest(USER)


@pytest.mark.parametrize(
    ("messages", "last"),
    [([], None), ([USER], None), ([said("a")], 0), ([USER, said("a"), USER], 1), ([said("a"), USER, said("b")], 2)],
)
def test_the_last_answer_is_the_last_assistant_message(messages: list[Any], last: int | None) -> None:
    assert Conversation.of(messages, ASKED).last_answer == last


TOOLS: list[Any] = [{"function": {"name": "add", "parameters": {"a": 1, "b": 2}}}]
BEGINNING = (
    {"tools": TOOLS},
    {"documents": ["d"]},
    {"reasoning_effort": "low"},
    {"reasoning_effort": "high"},
    {"tools": []},
)
REST = ({"enable_thinking": False}, {"enable_thinking": True}, {"other": 1})


def test_what_a_template_may_write_first_is_its_input_and_all_it_is_given_its_identity() -> None:
    asked = [ChatOptions.of(kwargs, None) for kwargs in ({}, *BEGINNING)]
    assert len({one.inputs for one in asked}) == len({one.identity for one in asked}) == 6
    beside = [ChatOptions.of(kwargs, None) for kwargs in ({}, *REST)]
    beside += [ChatOptions.of({}, "auto"), ChatOptions.of({}, {"function": {"name": "add"}})]
    assert len({one.inputs for one in beside}) == 1 and len({one.identity for one in beside}) == 6
    assert all(len(one.inputs) == 16 and len(one.identity) == 32 for one in (*asked, *beside))
    assert all(one.identity.startswith(one.inputs) for one in (*asked, *beside))


def test_options_that_are_spelled_in_another_order_are_the_same() -> None:
    one = ChatOptions.of({"tools": [{"a": 1, "b": 2}], "x": {"c": 1, "d": 2}}, "auto")
    two = ChatOptions.of({"x": {"d": 2, "c": 1}, "tools": [{"b": 2, "a": 1}]}, "auto")
    assert (one.inputs, one.identity, one.num_chars) == (two.inputs, two.identity, two.num_chars)
    assert one.tool_choice == "auto" and two.template_kwargs["x"] == {"d": 2, "c": 1}
    larger = ChatOptions.of({"tools": [{"a": 1, "b": "x" * 1000}], "x": "y" * 500}, "auto")
    assert 1400 < larger.num_chars - one.num_chars < 1500
    assert ChatOptions.of({"tools": [object]}, None).num_chars > 0, "what is no JSON is told as it shows itself"


# One message


def test_a_reply_is_its_trimmed_text_its_calls_and_its_reasoning() -> None:
    message = said(" ok ", call(), call("sub", None), {"id": "3"}, reasoning=" hm ")
    assert reply_of(message) == ParsedReply("ok", (("add", '{"a": 1}'), ("sub", "{}"), ("None", "{}")), "hm")
    assert reply_of({"role": "assistant", "reasoning_content": "hm", "tool_calls": None}) == ParsedReply("", (), "hm")
    assert reply_of(said("x", reasoning="one", reasoning_content="two")).reasoning == "one"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        ([{"text": "a"}, "b", {"text": None}, {"image": 1}], "ab"),
        ([], ""),
    ],
)
def test_the_text_of_a_content_is_that_of_its_parts(content: Any, text: str) -> None:
    assert joined_text(content) == text


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (said("ok", call(), reasoning="hm"), None),
        (said("ok", call()), None),
        (said("no", call()), "content_edited"),
        (said("no"), "content_edited"),
        (said("ok", call(), reasoning="oh"), "reasoning_edited"),
        (said("ok", call(arguments="{}")), "tool_args_rewritten"),
        (said("ok", call("sub")), "tool_calls_changed"),
        (said("ok"), "tool_calls_changed"),
        (said("ok", call(), call()), "tool_calls_changed"),
    ],
)
def test_why_a_message_is_not_the_answer(message: dict[str, Any], cause: str | None) -> None:
    assert difference(reply_of(message), ParsedReply("ok", (("add", '{"a": 1}'),), "hm")) == cause


def test_a_plain_text_is_itself_with_or_without_its_thought_and_never_a_call() -> None:
    text = " <think>hm</think> ok "
    assert same_text(reply_of(said("<think>hm</think> ok")), text) and same_text(reply_of(said("ok")), text)
    assert not same_text(reply_of(said("ok", call())), text) and not same_text(reply_of(said("no")), text)
    assert same_text(reply_of(said("a b")), "a <think>x</think> b") and not same_text(
        reply_of(said("ok")), "<think>hm ok"
    )
    assert same_text(reply_of(said("ok")), "hm</think>ok") and not same_text(reply_of(said("hm")), "hm</think>ok")
