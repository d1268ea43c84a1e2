"""Rules of mocked_server/conversation/continuation.py: why a request does not continue the answer before it."""

from __future__ import annotations

from typing import Any

import pytest

from mocked_server.conversation.chat_history import ParsedReply
from mocked_server.conversation.continuation import diagnose_messages, diagnose_tokens
from mocked_server.conversation.live_episodes import LiveEpisode
from tests.mocked_server.conversation.test_continuation import (
    ASKED,
    NEXT,
    TOOLS,
    USER,
    add,
    chat,
    episode,
    parse,
    said,
)

SYSTEM = {"role": "system", "content": "Add."}
NOON = {"role": "system", "content": "It is noon."}
OK = said("ok")
LONG = [SYSTEM, USER, OK, NEXT]


def played(*requests: Any, text: str = "ok") -> LiveEpisode:
    """An episode in which these chats were asked, and answered with `text`."""
    live = episode()
    for messages in requests:
        add(live, len(live.rounds), 99, chat=chat(*messages), text=text)
    return live


@pytest.mark.parametrize(
    ("before", "now", "cause"),
    [
        ([], [USER], None),
        ([[USER]], [], None),
        ([[USER]], [USER], "resampled"),
        ([[USER]], [USER, NEXT], "reply_dropped"),
        ([[USER], [USER, OK, NEXT, OK]], [USER, NEXT], "history_compacted"),
        ([[USER], [USER, OK, NEXT, OK]], [USER, NEXT, USER, NEXT], "reply_dropped"),
        ([[USER]], [USER, said("no"), NEXT], "content_edited"),
        ([[USER]], [USER, said("ok", tool_calls=[{"function": {"name": "f"}}]), NEXT], "tool_calls_changed"),
        ([[USER]], [USER, OK, NEXT], "history_edited"),
        ([[USER], [USER, OK, NEXT]], [USER, OK, USER, OK], "history_edited"),
        ([[SYSTEM, USER]], [NEXT], "new_conversation"),
        ([[SYSTEM, USER]], [NOON, USER, OK, NEXT], "system_changed"),
        ([[SYSTEM, USER]], [{**NOON, "role": "developer"}, USER, OK, NEXT], "system_changed"),
        ([[USER]], [NEXT, OK, NEXT], "history_edited"),
        ([[SYSTEM, USER]], [SYSTEM, NEXT, OK, NEXT], "history_edited"),
        ([[SYSTEM, USER]], [SYSTEM, NEXT], "new_conversation"),
        ([[SYSTEM, USER], LONG], [SYSTEM, {"role": "user", "content": "Summary."}], "history_compacted"),
        ([[SYSTEM, USER], LONG], [NOON, {"role": "user", "content": "Summary."}], "new_conversation"),
        ([LONG], [SYSTEM, NEXT, OK], "history_compacted"),
        ([LONG], [SYSTEM, NEXT, OK, NEXT], "history_edited"),
        ([LONG[:3]], [SYSTEM, NEXT], "new_conversation"),
        ([LONG], [SYSTEM, NEXT, said("never said"), NEXT, NEXT], "new_conversation"),
    ],
)
def test_messages_that_do_not_go_on_have_a_cause(before: Any, now: Any, cause: str | None) -> None:
    assert diagnose_messages(played(*before), chat(*now), parse) == cause


def test_an_answer_that_is_known_by_its_text_or_as_it_was_parsed_is_an_answer_of_this_episode() -> None:
    live = played([USER], text="hm|ok")
    for known in (said("hm|ok"), OK):
        assert diagnose_messages(live, chat(NEXT, known, NEXT), parse) == "history_edited"
    calls = said("ok", tool_calls=[{"function": {"name": "f"}}])
    assert diagnose_messages(live, chat(NEXT, calls, NEXT), parse) == "new_conversation"


def test_other_tools_are_told_from_another_history() -> None:
    live = played([USER])
    assert diagnose_messages(live, chat(USER, OK, NEXT, asked=TOOLS), parse) == "tools_changed"
    add(live, 5, 6, chat=chat(USER, asked=TOOLS))
    assert diagnose_messages(live, chat(USER, OK, NEXT, asked=TOOLS), parse) == "history_edited"


def test_the_latest_answer_is_compared() -> None:
    live = played([USER])
    add(live, 5, 6, chat=chat(USER), text="hm|fine")
    assert diagnose_messages(live, chat(USER, said("fine", reasoning="oh"), NEXT), parse) == "reasoning_edited"


# By tokens: ids below 100 are their own letter


def decode(ids: list[int]) -> str:
    return "".join(WORDS.get(number, chr(number)) for number in ids)


WORDS = {1: "<think>", 2: "</think>", 3: "ok"}


def text_ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def diagnosed(sampled: list[int], rendered: list[int], *, text: str = "", calls: Any = (), reasoning: str = "") -> str:
    live = episode()
    asked = chat(USER)
    root = add(live, *text_ids("ab"), *sampled, num_sampled=len(sampled), text=text or decode(sampled), chat=asked)
    child = add(live, *text_ids("cd"), *text_ids("ef"), num_sampled=2, parent=root, text="ef", chat=asked)
    said = ParsedReply("", calls, reasoning)
    return diagnose_tokens(child, rendered, parse=lambda *_: said, decode=decode)


def test_thought_that_the_template_drops_is_told() -> None:
    sampled = [1, *text_ids("hm"), 2, *text_ids("ok")]
    assert diagnosed(sampled, text_ids("abokcdef")) == "template_strips_thinking"
    assert diagnosed(text_ids("ok"), text_ids("abokXXXX"), text="ok", reasoning="hm") == "template_strips_thinking"
    shown = [*text_ids("ab"), 1, *text_ids("hm"), 2, *text_ids(" ok"), *text_ids("cdef")]
    assert diagnosed(sampled, shown) == "template_rewrites_history", "it is there"


def test_the_same_text_in_other_tokens_is_told() -> None:
    assert diagnosed([3], text_ids("abokcdef")) == "retokenized"
    assert diagnosed([3], text_ids("abokcdef"), calls=(("f", "{}"),)) == "retokenized"
    assert diagnosed([3], text_ids("aXokcdef")) == "template_rewrites_history", "it differs before the answer"


def test_all_else_is_the_template() -> None:
    assert diagnosed(text_ids("ok"), text_ids("abnocdef")) == "template_rewrites_history"
    assert diagnosed(text_ids("ok"), text_ids("abnocdef"), calls=(("f", "{}"),)) == "template_rewrites_history"
    assert diagnosed(text_ids("ok"), text_ids("ab"), calls=(("f", "{}"),)) == "template_rewrites_history"
    assert diagnosed(text_ids("ok"), text_ids("abokcdXX")) == "template_rewrites_history"
    assert ASKED.inputs != TOOLS.inputs
