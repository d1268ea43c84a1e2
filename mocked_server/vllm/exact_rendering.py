"""The hook in vLLM's chat rendering: a chat that continues an earlier round of its episode becomes that round's ids and a tail.

`ExactRendering` replaces `render_chat_async` of vLLM's renderer, which every chat-like dialect passes. What it finds out is left
on the current `Call` for `QueueClient.generate`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np

from buffers.errors import RequestRefused
from buffers.records import Int32
from buffers.training_rows import digest_of
from mocked_server.conversation.chat_history import (
    BranchCause,
    ChatOptions,
    Conversation,
    Message,
    ParsedReply,
    arguments_of,
)
from mocked_server.conversation.continuation import (
    Continuation,
    Parse,
    continue_tokens,
    diagnose_messages,
    diagnose_tokens,
    find_parent,
    stand_in,
)
from mocked_server.conversation.live_episodes import LiveRound
from mocked_server.request_context import Call, current_call
from mocked_server.vllm.sampling_rules import check_template_inputs

SENTINEL = "0answer0"
"""An answer that no template changes."""

ROLES = ("system", "developer", "tool")
"""Whose words some templates leave out."""
LEFT_OUT = "the model's chat template must show messages of the role %s, and leaves them out: put one that does into its folder"
NO_TOOLS = "the model's chat template does not show the tools that an agent offers: the model does not know of them"
logger = logging.getLogger(__name__)

MAX_KINDS = 1024
"""Kinds of messages remembered; an agent may offer other tools in every request."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnd:
    """The place where the tail of a continued chat begins in the rendering of its stand-in."""

    at: int
    """Number of tokens before the control token that ends the answer."""
    digest: bytes
    """Digest of those tokens."""
    num_closing: int
    """Number of tokens from there on with which the template closes an answer; 0: the next turn begins there."""
    is_direct: bool
    """Nothing stands between the answer and that token."""

    def is_in(self, ids: Int32) -> bool:
        """Does this rendering begin as the one that was proved?"""
        return len(ids) > self.at and digest_of(ids[: self.at]) == self.digest

    def tail_of(self, ids: Int32, parent: LiveRound, *, marks: frozenset[int]) -> Int32 | None:
        """The prompt ids after the parent's sampled ones. They begin with the token at the cut when the model did not sample it
        (its answer was cut short, or it stopped at another token). None: they would not follow what was sampled."""
        last = int(parent.ids[-1])
        if last in marks and last in (closing := ids[self.at : self.at + max(1, self.num_closing)]):
            return ids[self.at + closing.tolist().index(last) + 1 :]
        is_another_turns = not self.num_closing and last in marks and last in ids[: self.at]
        return ids[self.at :] if self.is_direct and not is_another_turns else None


class ExactRendering:
    """Installed on vLLM's renderer for the life of the server. `parse` is set once vLLM's HTTP layer exists.

    `strict`: continue only what the template itself would write: its rendering of the whole history must begin with the
    exact ids.
    """

    def __init__(self, renderer: Any, *, strict: bool, refusal: type[Exception] = ValueError) -> None:
        """`refusal`: what the renderer raises where a template refuses messages."""
        self._inner = renderer
        self._render = renderer.render_chat_async
        self._strict = strict
        self._refusal = refusal
        self._ends: dict[int, AnswerEnd] = {}
        self._shows: dict[tuple[str, bool], bool] = {}
        """Role, and whether tools are offered -> does the template?"""
        self._looked_for_tools = False
        self.parse: Parse = lambda text, _: ParsedReply(text.strip())
        renderer.render_chat_async = self.render_chat_async

    async def render_chat_async(self, conversations: Any, chat_params: Any, *args: Any, **kwargs: Any) -> Any:
        """Renders as vLLM's method; the continuation is left on the current `Call`."""
        call = current_call.get()
        if call is None or len(conversations) != 1:
            return await self._render(conversations, chat_params, *args, **kwargs)
        asked = await call.apart(ChatOptions.of, chat_params.chat_template_kwargs, chat_params.tool_choice)
        check_template_inputs(asked.num_chars)
        if call.by_chat is not None:
            by_chat, call.by_chat = call.by_chat, None
            call.join(await by_chat(await call.apart(Conversation.of, conversations[0], asked), self.parse))
        asked = call.live.known(asked)
        chat = await call.apart(Conversation.of, conversations[0], asked)
        _make_writable(chat.messages)
        await self._check_roles(chat, chat_params)
        parent = find_parent(call.live, chat, self.parse)
        if parent is not None and not self._strict and not asked.template_kwargs.get("continue_final_message"):
            short = await self._render_tail(call, chat, parent, chat_params, args, kwargs)
            if short is not None:
                return short
        result = await self._render(conversations, chat_params, *args, **kwargs)
        rendered_ids = result[1][0].get("prompt_token_ids")
        if rendered_ids is not None:  # None: embeddings as a prompt, nothing to continue
            plan = continue_tokens(call.live, rendered_ids, chat=chat)
            cause = self._why_not(call, chat, parent, plan, rendered_ids)
            call.continuation = dataclasses.replace(plan, cause=cause)
        return result

    async def _check_roles(self, chat: Conversation, chat_params: Any) -> None:
        """Raises RequestRefused where the template writes nothing of what tools say. That it leaves out what others say, or which
        tools are offered, is logged, once."""
        kwargs = chat_params.chat_template_kwargs
        if kwargs.get("tools") and not self._looked_for_tools:
            self._looked_for_tools = True  # before others look, too
            bare = dataclasses.replace(chat_params, chat_template_kwargs={**kwargs, "tools": None})
            try:
                offered, without = [await self._text_of(list(chat.messages), each) for each in (chat_params, bare)]
            except self._refusal:
                self._looked_for_tools = False
            else:
                if offered == without != "":
                    logger.warning(NO_TOOLS)
        for role in ROLES:
            key = (role, bool(chat.asked.template_kwargs.get("tools")))
            at = max((at for at, message in enumerate(chat.messages) if message.get("role") == role), default=None)
            if at is not None and key not in self._shows:
                after = () if role == "tool" else chat.messages[at + 1 :]  # a system's words may be in the user's turn
                told = [*chat.messages[:at], {**chat.messages[at], "content": SENTINEL}, *after]
                with suppress(self._refusal):  # as it refuses the whole, or takes it
                    text = await self._text_of(told, chat_params)
                    self._shows[key] = not text or SENTINEL in text  # vLLM's own renderers may give ids only
                if not self._shows.get(key, True):
                    logger.warning(LEFT_OUT, role)
            if role == "tool" and at is not None and not self._shows.get(key, True):
                raise RequestRefused(LEFT_OUT % role)

    async def _render_tail(
        self, call: Call, chat: Conversation, found: tuple[LiveRound, int], chat_params: Any, args: Any, kwargs: Any
    ) -> Any | None:
        """Render a continued chat without its history; None when the template does not allow to find the tail.

        The serving layer above counts prompt tokens and looks for reasoning marks in the ids that it gets, so these keep the
        exact prompt's length, and show the new turns only.
        """
        parent, covered = found
        opening, new = stand_in(chat.messages, covered, said=SENTINEL)
        try:
            kind, answer = _kind_of(chat.asked, opening, new), opening[-1]
            if not (answer["content"] or kind in self._ends or SENTINEL in await self._text_of(opening, chat_params)):
                answer["content"] = SENTINEL  # the template shows no calls
                kind = _kind_of(chat.asked, opening, new)
            result = await self._render([[*opening, *new]], chat_params, *args, **kwargs)
            engine_input = result[1][0]
            ids = np.array(engine_input.get("prompt_token_ids") or (), np.int32)
            end = self._ends.get(kind)
            if end is None or not end.is_in(ids):
                end = await self._answer_end(opening, new, chat_params, ids)
        except self._refusal:
            return None  # a template may refuse the stand-in, and take the conversation
        if end is None:
            return None
        if len(self._ends) >= MAX_KINDS:
            self._ends.clear()
        self._ends[kind] = end
        tail = end.tail_of(ids, parent, marks=self._marks)
        if tail is None:
            return None
        cause = None if chat.last_answer == covered - 1 else diagnose_messages(call.live, chat, self.parse)
        call.continuation = Continuation(parent=parent, tail_ids=tail, chat=chat, cause=cause)
        shown = ids.tolist()
        exact_len = parent.total + len(tail)
        engine_input["prompt_token_ids"] = ([shown[end.at]] * (exact_len - len(shown)) + shown)[-exact_len:]
        return result

    async def _answer_end(
        self, opening: list[Message], new: list[Message], chat_params: Any, ids: Int32
    ) -> AnswerEnd | None:
        """The end of the answer in the stand-in's rendering `ids`; None: it cannot be proved.

        Proved is that the template writes what comes before the answer as it writes it alone, what comes after it as it ends an
        answer, then as it does after a longer history; and that a control token, which joins no other, stands at the cut.
        """
        text = await self._text_of([*opening, *new], chat_params, asks=True)
        answered = await self._text_of(opening, chat_params)
        history, answer = opening[:-1], {"role": "assistant", "content": SENTINEL}
        plain = answered
        if opening[-1] != answer:
            plain = await self._text_of([*history, answer], chat_params)
        longer = await self._text_of([*history, answer, history[-1], opening[-1], *new], chat_params, asks=True)
        after, ending, closing = (each.rpartition(SENTINEL)[2] for each in (text, answered, plain))
        is_local = (
            text.count(SENTINEL) == answered.count(SENTINEL) > 0
            and text.startswith(await self._text_of(history, chat_params))
            and after.startswith(ending)
            and longer.rpartition(SENTINEL)[2] == after
        )
        mark = self._mark.search(closing)
        closed, is_direct = closing[mark.start() :] if mark else "", mark is None or mark.start() == 0
        if calls_end := None if ending.endswith(closed) else self._last_marks.search(ending):
            closed, is_direct = calls_end[0], False  # calls have an end of their own: Gemma 4's
        if not is_local or not ending.endswith(closed) or (mark is None and closing):
            return None
        at = len(text) - len(after) + len(ending) - len(closed)
        if not self._mark.match(text, at):
            return None
        before, closing_ids = (
            self._inner.get_tokenizer().encode(part, add_special_tokens=False) for part in (text[:at], closed)
        )
        end = AnswerEnd(
            at=len(before),
            digest=digest_of(np.array(before, np.int32)),
            num_closing=len(closing_ids),
            is_direct=is_direct,
        )
        return end if end.is_in(ids) and int(ids[end.at]) in self._marks else None

    def _why_not(
        self,
        call: Call,
        chat: Conversation,
        found: tuple[LiveRound, int] | None,
        plan: Continuation,
        rendered_ids: Sequence[int],
    ) -> BranchCause | None:
        """Why the answer before this request was not continued; None when it was."""
        if found is None:
            return None if plan.parent is not None else diagnose_messages(call.live, chat, self.parse)
        parent, covered = found
        if plan.parent is not None and plan.parent.total >= parent.total:
            return None if chat.last_answer == covered - 1 else diagnose_messages(call.live, chat, self.parse)
        return diagnose_tokens(parent, rendered_ids, parse=self.parse, decode=self._inner.get_tokenizer().decode)

    @cached_property
    def _marks(self) -> frozenset[int]:
        """Tokens that stand for themselves in any text."""
        return frozenset(token for text, token in self._inner.get_tokenizer().get_added_vocab().items() if text.strip())

    @cached_property
    def _mark(self) -> re.Pattern[str]:
        """A text that becomes one of them."""
        texts = [text for text in self._inner.get_tokenizer().get_added_vocab() if text.strip()]
        return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)")

    @cached_property
    def _last_marks(self) -> re.Pattern[str]:
        """Those with which a text ends."""
        return re.compile(f"(?:{self._mark.pattern})+$")

    async def _text_of(self, messages: list[Message], chat_params: Any, *, asks: bool = False) -> str:
        """Text of the template for these messages. `asks`: with what opens the next answer."""
        kwargs = {**chat_params.chat_template_kwargs, "tokenize": False}
        if not asks:
            kwargs["add_generation_prompt"] = False
        params = dataclasses.replace(chat_params, chat_template_kwargs=kwargs)
        _, prompt = await self._inner.render_messages_async(messages, params)
        return str(prompt.get("prompt", ""))


def _make_writable(messages: Sequence[Message]) -> None:
    """Gives arguments with half of a surrogate pair, which no tokenizer takes, as text; they are compared as the same."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                continue
            text = function.get("arguments")
            if isinstance(text, str) and "\\ud" in text.lower():
                function["arguments"] = json.dumps(arguments_of(text))


def _kind_of(asked: ChatOptions, opening: list[Message], new: list[Message]) -> int:
    """Equal for stand-ins whose answers end at the same token, as far as one can tell before they are rendered."""
    names = tuple(str(call["function"].get("name")) for call in opening[-1].get("tool_calls", ()))
    roles = tuple(str(message.get("role")) for message in (*opening, *new))
    return hash((asked.identity, opening[-1]["content"], names, roles))
