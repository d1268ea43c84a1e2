"""Rules of mocked_server/vllm/exact_rendering.py, on a renderer and a template that can be read here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from buffers.errors import RequestRefused
from mocked_server.conversation.chat_history import reply_of
from mocked_server.conversation.live_episodes import LiveEpisode
from mocked_server.request_context import Call, current_call
from mocked_server.vllm.exact_rendering import SENTINEL, ExactRendering
from tests.mocked_server.conversation.test_continuation import NEXT, USER, add, chat, episode, said

END = "$"


@dataclass
class Params:
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    tool_choice: Any = None


class Renderer:
    """One id for each letter. The template: `u:One.$a:ok$`, and `a:` where an answer is asked for; a call is two more turns.
    `drops`: it writes earlier answers in capitals; `without`: it leaves out messages of these roles."""

    def __init__(self, *, drops: bool = False, opening: str = "a:", without: Sequence[str] = ()) -> None:
        self.rendered: list[list[Any]] = []
        self.num_texts = 0
        self._drops = drops
        self._opening = opening
        self._without = without

    def get_tokenizer(self) -> Any:
        return self

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]

    def get_added_vocab(self) -> dict[str, int]:
        return {END: ord(END)}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def template(self, messages: list[Any], kwargs: dict[str, Any]) -> str:
        text = ""
        for message in messages:
            content = message.get("content") or ""
            if message["role"] == "assistant":
                text += (
                    "c$" * len(message.get("tool_calls") or ())
                    + f"a:{content.upper() if self._drops else content}{END}"
                )
            elif message["role"] not in self._without:
                text += f"u:{content}{END}"
        return text + (self._opening if kwargs.get("add_generation_prompt", True) else "")

    async def render_chat_async(self, conversations: Any, params: Any) -> Any:
        self.rendered.append(conversations[0])
        ids = self.encode(self.template(conversations[0], params.chat_template_kwargs))
        return None, [{"prompt_token_ids": ids}]

    async def render_messages_async(self, messages: Any, params: Any) -> Any:
        self.num_texts += 1
        assert params.chat_template_kwargs["tokenize"] is False
        return None, {"prompt": self.template(messages, params.chat_template_kwargs)}


async def render(rendering: ExactRendering, live: LiveEpisode, *messages: Any, **kwargs: Any) -> tuple[Call, str]:
    """The call with its continuation, and the ids that the layer above gets, as text."""
    call = Call(live)
    token = current_call.set(call)
    try:
        _, (engine_input,) = await rendering.render_chat_async([list(messages)], Params(kwargs))
    finally:
        current_call.reset(token)
    return call, "".join(map(chr, engine_input["prompt_token_ids"]))


def first_round(sampled: str = "ok$", *, prompt: str = "u:One.$a:") -> LiveEpisode:
    live = episode()
    ids = [ord(letter) for letter in prompt + sampled]
    add(live, *ids, num_sampled=len(sampled), text=sampled.removesuffix(END), chat=chat(USER))
    return live


async def tail_after(live: LiveEpisode, *messages: Any, renderer: Renderer | None = None, strict: bool = False) -> Any:
    call, shown = await render(ExactRendering(renderer or Renderer(), strict=strict), live, *messages)
    plan = call.continuation
    assert plan is not None
    assert len(shown) == len(plan.prompt_ids()), "the layer above counts the exact prompt's length"
    return plan.parent, "".join(map(chr, plan.tail_ids)), plan.cause


async def test_a_continued_chat_is_the_exact_ids_and_what_the_template_writes_after_the_answer() -> None:
    live, renderer = first_round(), Renderer()
    assert await tail_after(live, USER, said("ok"), NEXT, renderer=renderer) == (live.rounds[0], "u:Two.$a:", None)
    assert renderer.rendered == [[{"role": "user", "content": "-"}, said(SENTINEL), NEXT]], "never the history"


async def test_what_opens_the_next_answer_closes_no_turn() -> None:
    live, renderer = first_round(), Renderer(opening="$a:")
    assert await tail_after(live, USER, said("ok"), NEXT, renderer=renderer) == (live.rounds[0], "u:Two.$$a:", None)


async def test_an_answer_that_was_cut_short_is_closed_first() -> None:
    live = first_round("ok")
    assert await tail_after(live, USER, said("ok"), NEXT) == (live.rounds[0], "$u:Two.$a:", None)


async def test_the_end_of_an_answer_is_proved_for_each_kind_of_message_and_once() -> None:
    renderer = Renderer()
    rendering = ExactRendering(renderer, strict=False)
    calls = said("ok", tool_calls=[{"id": "1", "function": {"name": "f"}}])

    async def tail(message: Any) -> str:
        live = first_round()
        live.rounds[0].said = None
        if message.get("tool_calls"):
            rendering.parse = lambda *_: reply_of(calls)
        call, _ = await render(rendering, live, USER, message, NEXT)
        assert call.continuation is not None and call.continuation.parent is live.rounds[0]
        return "".join(map(chr, call.continuation.tail_ids))

    assert [await tail(message) for message in (said("ok"), calls, said("ok"), calls)] == ["u:Two.$a:"] * 4
    assert renderer.num_texts == 4 + 5, "two kinds; of calls also how the template ends an answer in words"


async def test_calls_that_the_template_does_not_show_are_continued_as_they_were_sampled() -> None:
    """It would leave an empty answer in the history: the model would not see what it did."""
    call = said("", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{}"}}])
    result = {"role": "tool", "tool_call_id": "1", "content": "42"}
    rendering = ExactRendering(Renderer(), strict=False)
    rendering.parse = lambda *_: reply_of(call)
    for sampled, tail in (("f()$", "u:42$a:"), ("f()", "$u:42$a:")):
        live = first_round(sampled)
        called, _ = await render(rendering, live, USER, call, result)
        assert called.continuation is not None and called.continuation.parent is live.rounds[0]
        assert "".join(map(chr, called.continuation.tail_ids)) == tail


async def test_a_template_that_leaves_out_what_tools_say_is_refused_and_of_other_roles_it_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    call = said("", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{}"}}])
    result = {"role": "tool", "tool_call_id": "1", "content": "42"}
    told = {"role": "developer", "content": "Be short."}
    rendering = ExactRendering(Renderer(without=("tool", "developer")), strict=False)
    for _ in range(2):
        await render(rendering, episode(), told, USER)
        with pytest.raises(
            RequestRefused,
            match="must show messages of the role tool, and leaves them out: put one that does into its folder",
        ):
            await render(rendering, episode(), USER, call, result)
    assert [record.args for record in caplog.records] == [("developer",), ("tool",)]


async def test_an_answer_that_speaks_of_the_end_of_a_turn_is_counted_by_itself() -> None:
    renderer = Renderer()
    rendering = ExactRendering(renderer, strict=False)
    for text, tail in (("o$k", "u:Two.$a:"), ("ok", "u:Two.$a:"), ("$$", "u:Two.$a:")):
        live = first_round(text + END)
        live.rounds[0].text = text
        call, _ = await render(rendering, live, USER, said(text), NEXT)
        assert call.continuation is not None and "".join(map(chr, call.continuation.tail_ids)) == tail


@pytest.mark.parametrize(
    ("messages", "cause"),
    [([USER, said("no"), NEXT], "content_edited"), ([USER], "resampled"), ([NEXT], "new_conversation")],
)
async def test_what_is_not_proved_is_rendered_whole_with_its_cause(messages: list[Any], cause: str) -> None:
    parent, tail, found = await tail_after(first_round("ok$"), *messages)
    assert (parent, found) == (None, cause) and tail == Renderer().template(messages, {})


async def test_the_first_round_has_no_cause() -> None:
    assert await tail_after(episode(), USER) == (None, "u:One.$a:", None)


async def test_strict_continues_what_the_template_itself_writes_and_says_what_it_does_not() -> None:
    live = first_round()
    again = (USER, said("ok"), NEXT)
    assert await tail_after(live, *again, strict=True) == (live.rounds[0], "u:Two.$a:", None)
    parent, tail, cause = await tail_after(first_round(), *again, strict=True, renderer=Renderer(drops=True))
    assert (parent, cause) == (None, "template_rewrites_history") and tail == "u:One.$a:OK$u:Two.$a:"


async def test_an_answer_after_the_continued_one_that_is_not_known_has_a_cause() -> None:
    for strict in (False, True):
        live = first_round()
        messages = (USER, said("ok"), NEXT, said("never said"), USER)
        parent, tail, cause = await tail_after(live, *messages, strict=strict)
        assert parent is live.rounds[0] and tail == "u:Two.$a:never said$u:One.$a:" and cause == "history_edited"


async def test_a_template_that_refuses_the_stand_in_renders_the_conversation_whole() -> None:
    class Strict(Renderer):
        def template(self, messages: list[Any], kwargs: dict[str, Any]) -> str:
            if messages[0]["content"] == "-":
                raise ValueError("say something")
            return super().template(messages, kwargs)

    live = first_round()
    assert await tail_after(live, USER, said("ok"), NEXT, renderer=Strict()) == (live.rounds[0], "u:Two.$a:", None)
    live = first_round("OK$")
    live.rounds[0].text = "ok"
    parent, tail, cause = await tail_after(live, USER, said("ok"), NEXT, renderer=Strict())
    assert (parent, tail, cause) == (None, "u:One.$a:ok$u:Two.$a:", "template_rewrites_history")


async def test_what_is_no_agents_request_is_rendered_as_it_is() -> None:
    renderer = Renderer()
    rendering = ExactRendering(renderer, strict=False)
    _, (engine_input,) = await rendering.render_chat_async([[USER]], Params())
    assert renderer.decode(engine_input["prompt_token_ids"]) == "u:One.$a:"
    assert renderer.render_chat_async == rendering.render_chat_async, "it is installed on the renderer"
