"""What a model is shown in a continued chat is what its template writes with the sampled tokens in the answers' place, or another
branch begins: for chat templates of many families, and for messages and answers that hold their marks."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.chat_families import FAMILIES, Family, Refused
from buffers.errors import RequestRefused
from mocked_server.conversation.chat_history import ParsedReply
from mocked_server.conversation.live_episodes import LiveEpisode, LiveRound
from mocked_server.vllm.exact_rendering import ExactRendering
from tests.mocked_server.conversation.test_continuation import episode
from tests.mocked_server.vllm.test_exact_rendering import render

WORDS = re.compile(r"\s+|\w+|[^\w\s]+")


class Renderer:
    """A family's template and a tokenizer whose tokens join across turns: runs of spaces, of letters, of signs."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._marks = re.compile("(" + "|".join(map(re.escape, sorted(family.marks, key=len, reverse=True))) + ")")
        self._ids: dict[str, int] = {}
        self._texts: list[str] = []

    def get_tokenizer(self) -> Any:
        return self

    def id_of(self, text: str) -> int:
        if text not in self._ids:
            self._ids[text] = len(self._texts)
            self._texts.append(text)
        return self._ids[text]

    def get_added_vocab(self) -> dict[str, int]:
        return {mark: self.id_of(mark) for mark in self._family.marks}

    def encode(self, text: str, **_: Any) -> list[int]:
        pieces = self._marks.split(text)
        return [self.id_of(t) for k, piece in enumerate(pieces) for t in ([piece] if k % 2 else WORDS.findall(piece))]

    def decode(self, ids: Any) -> str:
        return "".join(self._texts[int(each)] for each in ids)

    async def render_chat_async(self, conversations: Any, params: Any) -> Any:
        ids = self.encode(self._family.render(conversations[0], **params.chat_template_kwargs))
        return None, [{"prompt_token_ids": ids}]

    async def render_messages_async(self, messages: Any, params: Any) -> Any:
        return None, {"prompt": self._family.render(messages, **params.chat_template_kwargs)}


@dataclass(frozen=True)
class Turn:
    """What the user says, or what a tool gives back, and what the model answers to it. `stop`: its last token; "": it was cut."""

    words: str
    answer: str
    calls: bool
    stop: str


@dataclass
class Answered:
    """A round that was played: where its answer stands in the conversation."""

    round: LiveRound
    at: int
    stop: str


class Play:
    """One episode against one family, checked at each round."""

    def __init__(self, family: Family) -> None:
        self.family, self.renderer, self.live = family, Renderer(family), episode()
        self.rendering = ExactRendering(self.renderer, strict=False, refusal=Refused)
        self.said: dict[str, ParsedReply] = {}
        self.rendering.parse = lambda text, _: self.said.get(text, ParsedReply(text.strip()))
        self.answered: list[Answered] = []

    async def ask(self, messages: list[Any]) -> Any:
        call, _ = await render(self.rendering, self.live, *messages)
        plan = call.continuation
        assert plan is not None
        if self.renderer.decode(plan.prompt_ids()) != self.family.render(messages):
            self.check_tail(messages, plan)
        elif plan.parent is None and self.answered:
            assert plan.cause is not None, "a branch is counted"
        return plan

    def check_tail(self, messages: list[Any], plan: Any) -> None:
        """The parent's exact ids, then what the template writes after that answer: nothing lost, nothing twice."""
        parent = next(each for each in self.answered if each.round is plan.parent)
        after = self.family.behind(messages, parent.at, stop=parent.stop)
        assert self.renderer.decode(plan.tail_ids) == after
        assert plan.tail_ids.tolist() == self.renderer.encode(after), "in the template's own tokens"

    def sample(self, messages: list[Any], plan: Any, turn: Turn) -> None:
        """The answer, in tokens that no tokenizer would make of its text."""
        text = turn.answer
        message: Any = {"role": "assistant", "content": text}
        if turn.calls:
            function = {"name": "look", "arguments": json.dumps({"a": text, "b": "c"})}
            message |= {
                "content": "",
                "tool_calls": [{"id": f"call{len(messages):05}", "type": "function", "function": function}],
            }
            text = f"call of look: {text}"
            self.said[text] = ParsedReply("", (("look", json.dumps({"a": turn.answer, "b": "c"}, ensure_ascii=False)),))
        ids = [self.renderer.id_of(letter) for letter in text or " "] + [self.renderer.id_of(turn.stop)] * bool(
            turn.stop
        )
        round_ = LiveRound(
            parent=plan.parent,
            ids=np.array([*plan.tail_ids, *ids], np.int32),
            num_sampled=len(ids),
            finish_reason="stop" if turn.stop else "length",
            text=text,
            asked=plan.chat.asked,
            cause=plan.cause,
            round_index=len(self.live.rounds),
        )
        self.live.add_round(round_, chat=plan.chat)
        self.answered.append(Answered(round_, len(messages), turn.stop))
        messages.append(message)


async def play(family: Family, system: str | None, turns: list[Turn]) -> tuple[LiveEpisode, list[Any]]:
    """The episode, and each round's plan."""
    game, plans = Play(family), []
    messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns:
        calls = messages[-1].get("tool_calls") if messages else None
        reply = {"role": "tool", "tool_call_id": calls[0]["id"], "content": turn.words} if calls else {}
        messages.append(reply or {"role": "user", "content": turn.words})
        try:
            plan = await game.ask(messages)
        except Refused:
            break  # by the template itself: the agent gets 400
        plans.append(plan)
        game.sample(messages, plan, turn)
    return game.live, plans


@st.composite
def conversations_of(draw: st.DrawFn, families: Mapping[str, Family]) -> tuple[str, str | None, list[Turn]]:
    """The name of a family, and what is said."""
    name = draw(st.sampled_from(sorted(families)))
    family = families[name]
    pieces = [
        *family.marks,
        "\n",
        " ",
        "\n\n",
        "a",
        "Sum:",
        "###",
        "USER: ",
        "\nUSER: ",
        "ASSISTANT: ",
        "</think>",
        "<think>",
        "[Round 2]",
    ]
    text = st.lists(st.sampled_from(pieces), min_size=1, max_size=5).map("".join)
    stops = st.sampled_from([family.stop, family.stop, "", *family.marks])
    turn = st.builds(Turn, words=text, answer=text, calls=st.booleans() if family.calls else st.just(False), stop=stops)
    return name, draw(st.none() | text), draw(st.lists(turn, min_size=2, max_size=4))


@pytest.mark.seconds
@settings(max_examples=800, deadline=None)
@given(conversations_of(FAMILIES))
def test_no_message_is_lost_and_nothing_is_repeated(drawn: tuple[str, str | None, list[Turn]]) -> None:
    name, system, turns = drawn
    asyncio.run(play(FAMILIES[name], system, turns))


@pytest.mark.parametrize("name", sorted(FAMILIES))
async def test_a_family_is_continued_where_its_answers_end_in_a_control_token(name: str) -> None:
    family = FAMILIES[name]
    turns = [
        Turn(words, answer, False, family.stop)
        for words, answer in (("One.", "First."), ("Two.", "Second."), ("Three.", "Third."))
    ]
    live, (_, second, third) = await play(family, None, turns)
    if family.continued:
        assert (second.parent, third.parent) == (live.rounds[0], live.rounds[1]) and not live.branch_causes
    else:
        assert second.parent is None and third.parent is None and sum(live.branch_causes.values()) == 2


async def test_a_template_that_ends_turns_with_a_line_break_loses_no_message() -> None:
    question = "TypeError: unsupported operand\n\nMend it, and keep sub."
    for name in ("deepseek-coder-text", "nemotron-mini", "vicuna-without-end"):
        turns = [
            Turn("One.\nMore.", "First.\nSecond.", False, "</s>"),
            Turn(question, "Done.", False, "</s>"),
            Turn("Go on.", "Yes.", False, ""),
        ]
        live, plans = await play(FAMILIES[name], None, turns)
        assert (
            len(plans) == 3 and [plan.parent for plan in plans] == [None] * 3 and sum(live.branch_causes.values()) == 2
        )


async def test_calls_are_continued_with_their_results() -> None:
    for name, family in FAMILIES.items():
        if not family.calls:
            continue
        stop = "<|observation|>" if family.stop == "<|user|>" else family.stop
        turns = [
            Turn("One.", "x", True, stop),
            Turn("Result.", "y", True, stop),
            Turn("Other.", "Done.", False, family.stop),
        ]
        _, plans = await play(family, "Be kind.", [*turns, Turn("Two.", "Yes.", False, family.stop)])
        continued = [plan.parent is not None for plan in plans]
        assert continued == ([False, False, False, True] if name == "functionary-3" else [False, True, True, True]), (
            name
        )


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
async def test_what_a_familys_template_writes_of_a_system_and_a_tool_is_not_taken_for_left_out(
    family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    spoken = {"system": [{"role": "system", "content": "a rule"}, {"role": "user", "content": "Hello."}], "tool": [
        {"role": "user", "content": "Hello."}, call, {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "a fact"}
    ]}  # fmt: skip
    for role, messages in spoken.items():
        rendering = ExactRendering(Renderer(family), strict=False, refusal=Refused)
        words = messages[0 if role == "system" else -1]["content"]
        try:
            is_shown = words in family.render(messages)
        except Refused:
            continue
        if is_shown or role != "tool":
            await render(rendering, episode(), *messages)
        else:
            with pytest.raises(RequestRefused, match="of the role tool"):
                await render(rendering, episode(), *messages)
        assert (rendering._shows[(role, False)], [record.args for record in caplog.records]) == (
            is_shown, [] if is_shown else [(role,)]
        )  # fmt: skip
        caplog.clear()
