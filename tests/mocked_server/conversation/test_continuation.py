"""Rules of mocked_server/conversation/continuation.py: which round a prompt continues, and what its new ids are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from buffers.records import Episode, Task
from mocked_server.conversation.chat_history import ChatOptions, Conversation, ParsedReply, joined_text, reply_of
from mocked_server.conversation.continuation import (
    Continuation,
    continue_tokens,
    diagnose_messages,
    find_parent,
    is_reply,
    longest_prefix,
    parsed_reply,
    stand_in,
)
from mocked_server.conversation.live_episodes import LiveEpisode, LiveRound

ASKED = ChatOptions.of({}, None)
TOOLS = ChatOptions.of({"tools": ["add"]}, None)
USER = {"role": "user", "content": "One."}
NEXT = {"role": "user", "content": "Two."}


def parse(text: str, asked: ChatOptions) -> ParsedReply:
    """As a parser of reasoning would: what is before a bar is reasoning."""
    thought, bar, rest = text.rpartition("|")
    return ParsedReply(rest.strip(), (), thought if bar else "")


def episode() -> LiveEpisode:
    return LiveEpisode(
        episode=Episode(episode_id="1-0-0", task=Task(task_id="t", prompt=[]), group_id=1, sample_index=0)
    )


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def add(live: LiveEpisode, *ids: int, parent: LiveRound | None = None, chat: Any = None, **more: Any) -> LiveRound:
    """A round whose last id was sampled."""
    options: dict[str, Any] = {"num_sampled": 1, "finish_reason": "stop", "text": "ok", "round_index": len(live.rounds)}
    asked = chat.asked if chat is not None else None
    round_ = LiveRound(parent=parent, ids=np.array(ids, np.int32), asked=asked, **{**options, **more})
    live.add_round(round_, chat=chat)
    return round_


def chat(*messages: dict[str, Any], asked: ChatOptions = ASKED) -> Conversation:
    return Conversation.of(messages, asked)


# By messages


def test_a_request_that_repeats_history_and_answer_continues_that_round() -> None:
    live = episode()
    first = add(live, 1, 2, chat=chat(USER))
    second = add(live, 3, 4, parent=first, chat=chat(USER, said("ok"), NEXT), text="fine")
    whole = chat(USER, said("ok"), NEXT, said("fine"), USER)
    assert find_parent(live, whole, parse) == (second, 4)
    assert find_parent(live, chat(USER, said("ok"), USER), parse) == (first, 2)
    assert find_parent(live, chat(USER, said("ok"), NEXT, said("no"), USER), parse) == (first, 2)
    assert find_parent(live, chat(USER, said("ok")), parse) == (first, 2), "the answer may be the last message"
    parrot = {"role": "user", "content": "ok"}
    for other in (
        chat(USER),
        chat(USER, parrot, NEXT),
        chat(USER, NEXT),
        chat(NEXT, said("ok"), USER),
        chat(USER, said("no"), USER),
        chat(),
    ):
        assert find_parent(live, other, parse) is None


def test_of_equal_answers_the_latest_is_continued() -> None:
    live = episode()
    add(live, 1, 2, chat=chat(USER))
    latest = add(live, 1, 5, chat=chat(USER))
    add(live, 1, 6, chat=chat(USER), text="no")
    assert find_parent(live, chat(USER, said("ok"), NEXT), parse) == (latest, 2)


def test_a_round_that_was_asked_with_other_tools_is_not_continued() -> None:
    live = episode()
    plain, tools = add(live, 1, 2, chat=chat(USER)), add(live, 7, 2, chat=chat(USER, asked=TOOLS))
    assert find_parent(live, chat(USER, said("ok"), NEXT), parse) == (plain, 2)
    assert find_parent(live, chat(USER, said("ok"), NEXT, asked=TOOLS), parse) == (tools, 2)
    other = ChatOptions.of({"enable_thinking": False}, "none")  # of these the beginning of a prompt does not depend
    assert find_parent(live, chat(USER, said("ok"), NEXT, asked=other), parse) == (plain, 2)


def test_a_round_of_an_earlier_process_learns_what_it_was_asked_with_from_an_equal_request() -> None:
    live = episode()
    bare = ChatOptions(template_kwargs={}, tool_choice=None, inputs=TOOLS.inputs, identity=TOOLS.identity, num_chars=0)
    restored = LiveRound(
        parent=None, ids=np.array([1, 2], np.int32), num_sampled=1, finish_reason="stop", text="ok", asked=bare
    )
    live.by_history[chat(USER).digests[-1]] = [restored]
    live._asked[TOOLS.identity] = TOOLS
    assert find_parent(live, chat(USER, said("ok"), NEXT, asked=TOOLS), parse) == (restored, 2)
    assert restored.asked is TOOLS
    restored.asked = None
    assert find_parent(live, chat(USER, said("ok"), NEXT), parse) is None, "no chat"


@pytest.mark.parametrize(
    ("message", "stop", "is_it"),
    [
        (said("hm|ok"), "", True),
        (said("ok"), "", True),
        (said("ok", reasoning="hm"), "", True),
        (said("ok", reasoning="oh"), "", False),
        (said("no"), "", False),
        (said("hm|ok</code>"), "", False),
        (said("hm|ok</code>"), "</code>", True),
        (said("hm|ok"), "</code>", True),
        (said("hm|ok</end>"), "</code>", False),
        (said("ok", tool_calls=[{"function": {"name": "f"}}]), "", False),
    ],
)
def test_an_answer_may_come_back_parsed_plain_or_with_the_stop_mark_put_back(
    message: Any, stop: str, is_it: bool
) -> None:
    live = add(episode(), 1, 2, chat=chat(USER), text="hm|ok", stop=stop)
    assert is_reply(reply_of(message), live, parse) is is_it


def test_an_answer_is_parsed_once_and_a_plain_completion_not_at_all() -> None:
    parsed: list[tuple[str, ChatOptions]] = []

    def counted(text: str, asked: ChatOptions) -> ParsedReply:
        parsed.append((text, asked))
        return parse(text, asked)

    live = add(episode(), 1, 2, chat=chat(USER, asked=TOOLS), text="hm|ok")
    assert parsed_reply(live, counted) is parsed_reply(live, counted) and parsed == [("hm|ok", TOOLS)]
    assert parsed_reply(add(episode(), 1, 2, text=" hm|ok "), counted) == ParsedReply("hm|ok") and len(parsed) == 1


def test_one_user_turn_stands_for_the_history_and_one_word_for_the_answer() -> None:
    opening = [{"role": "user", "content": "-"}, said("X")]
    assert stand_in([USER, said("ok"), NEXT, said("fine"), USER], 2, said="X") == (opening, [NEXT, said("fine"), USER])
    assert stand_in([USER, said("ok"), NEXT, said("fine", reasoning="hm")], 4, said="X") == (opening, [])
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    system = {"role": "system", "content": "Be kind."}
    (first, *_, answer), new = stand_in([system, USER, said("", tool_calls=[call])], 3, said="X")
    shown = {**call, "function": {"name": "f", "arguments": '{"a": "X"}'}}
    assert (first, answer, new) == ({"role": "system", "content": "-"}, said("", tool_calls=[shown]), [])


# By ids


def ids(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def test_the_longest_round_that_the_ids_begin_with_is_continued() -> None:
    live = episode()
    root = add(live, 1, 2)
    child = add(live, 3, 4, parent=root)
    add(live, 3, 5, parent=root)
    other = add(live, 9, 8)
    assert longest_prefix(live, ids(1, 2, 3, 4, 6)) is child
    assert longest_prefix(live, ids(1, 2, 3, 4)) is child, "a prompt may add nothing"
    assert longest_prefix(live, ids(1, 2, 3)) is root and longest_prefix(live, ids(1, 2, 7, 7, 7)) is root
    assert longest_prefix(live, ids(9, 8, 3, 4)) is other
    assert longest_prefix(live, ids(1)) is None and longest_prefix(live, ids(2, 1)) is None
    assert longest_prefix(episode(), ids(1, 2)) is None


def test_of_equal_rounds_the_latest_is_continued() -> None:
    live = episode()
    add(live, 1, 2)
    latest = add(live, 1, 2)
    assert longest_prefix(live, ids(1, 2, 3)) is latest
    child = add(live, 3, 4, parent=live.rounds[0])
    assert longest_prefix(live, ids(1, 2, 3, 4)) is child, "longer than the latest"


def test_a_continuation_is_the_parents_exact_ids_and_the_rest() -> None:
    live = episode()
    root = add(live, 1, 2)
    child = add(live, 3, 4, parent=root)
    plan = continue_tokens(live, [1, 2, 3, 4, 5, 6], chat=chat(USER))
    assert plan.parent is child and plan.parent_index == 1 and plan.tail_ids.tolist() == [5, 6]
    assert plan.prompt_ids().tolist() == [1, 2, 3, 4, 5, 6] and plan.tail_ids.dtype == np.int32
    assert plan.chat is not None and plan.chat.messages == [USER] and plan.cause is None
    fresh = continue_tokens(live, ids(5, 6))
    assert (fresh.parent, fresh.parent_index, fresh.chat) == (None, None, None)
    assert fresh.prompt_ids().tolist() == fresh.tail_ids.tolist() == [5, 6]
    assert Continuation(parent=add(live, 7, 7, round_index=None), tail_ids=ids(1)).parent_index is None


def test_an_answer_that_comes_back_is_read_once_however_many_rounds_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    live, read = episode(), []
    for number in range(50):
        add(live, 1, 2, number, chat=chat(USER), text=f"answer {number}")

    def counted(content: Any) -> str:
        read.append(content)
        return joined_text(content)

    monkeypatch.setattr("mocked_server.conversation.chat_history.joined_text", counted)
    again = chat(USER, said("none of them"), USER)
    assert find_parent(live, again, parse) is None
    assert diagnose_messages(live, again, parse) is not None
    assert read.count("none of them") == 1
