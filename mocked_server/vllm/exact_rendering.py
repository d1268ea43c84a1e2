"""The hook in vLLM's chat rendering: a chat that continues an earlier round of its episode becomes that round's ids
plus a tail.

`ExactRendering` replaces `render_chat_async` of vLLM's renderer, which every chat-like dialect passes. What it finds
out is left on the current `Call` for `QueueClient.generate`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from mocked_server.conversation.branch_causes import BranchCause
from mocked_server.conversation.branch_diagnosis import diagnose_messages, diagnose_tokens
from mocked_server.conversation.chat_history import ChatOptions, Conversation
from mocked_server.conversation.continuation import Continuation, Parse, continue_tokens, find_parent, stand_in, tail_of
from mocked_server.conversation.live_episodes import LiveRound
from mocked_server.conversation.message_match import Message, ParsedReply
from mocked_server.request_context import Call, current_call
from mocked_server.vllm.sampling_limits import check_template_inputs

SENTINEL = "TURN"
"""An answer that no template changes: what the template writes after it ends a turn."""

MAX_KINDS = 1024
"""Kinds of messages remembered; an agent may offer other tools in every request."""


class ExactRendering:
    """Installed on vLLM's renderer for the life of the server. `parse` is set once vLLM's HTTP layer exists.

    `strict`: continue only what the template itself would write: its rendering of the whole history must begin with the
    exact ids.
    """

    def __init__(self, renderer: Any, *, strict: bool) -> None:
        self._inner = renderer
        self._render = renderer.render_chat_async
        self._strict = strict
        self._end: int | None = None
        self._end_text = ""
        self._turns_closed: dict[tuple[bytes, bool], int] = {}
        self.parse: Parse = lambda text, _: ParsedReply(text.strip())
        renderer.render_chat_async = self.render_chat_async

    async def render_chat_async(self, conversations: Any, chat_params: Any, *args: Any, **kwargs: Any) -> Any:
        """Renders as vLLM's method; the continuation is left on the current `Call`."""
        call = current_call.get()
        if call is None or len(conversations) != 1:
            return await self._render(conversations, chat_params, *args, **kwargs)
        asked = ChatOptions.of(chat_params.chat_template_kwargs, chat_params.tool_choice)
        check_template_inputs(asked.num_chars)
        asked = call.live.known(asked)
        chat = Conversation.of(conversations[0], asked)
        found = find_parent(call.live, chat, self.parse)
        if found is not None and not self._strict and not asked.template_kwargs.get("continue_final_message"):
            short = await self._render_tail(call, chat, found, chat_params, args, kwargs)
            if short is not None:
                return short
        result = await self._render(conversations, chat_params, *args, **kwargs)
        rendered_ids = result[1][0].get("prompt_token_ids")
        if rendered_ids is not None:  # None: embeddings as a prompt, nothing to continue
            plan = continue_tokens(call.live, rendered_ids, chat=chat)
            cause = self._why_not(call, chat, found, plan, rendered_ids)
            call.continuation = dataclasses.replace(plan, cause=cause)
        return result

    async def _render_tail(
        self, call: Call, chat: Conversation, found: tuple[LiveRound, int], chat_params: Any, args: Any, kwargs: Any
    ) -> Any | None:
        """Render a continued chat without its history; None when the template does not allow to find the tail.

        The serving layer above counts prompt tokens and looks for reasoning marks in the ids that it gets, so these keep the
        exact prompt's length, and show the new turns only.
        """
        parent, covered = found
        end = await self._end_of_turn(chat_params)
        if end is None:
            return None
        short = stand_in(chat.messages, covered)
        result = await self._render([short], chat_params, *args, **kwargs)
        engine_input = result[1][0]
        closed = await self._num_turns_closed(short[:2], chat.asked, chat_params)
        ids = engine_input.get("prompt_token_ids") or []
        tail = tail_of(ids, end=end, num_turns_closed=closed, parent=parent)
        if tail is None:
            return None
        cause = None if chat.last_answer == covered - 1 else diagnose_messages(call.live, chat, self.parse)
        call.continuation = Continuation(parent=parent, tail_ids=tail, chat=chat, cause=cause)
        engine_input["prompt_token_ids"] = [end] * (parent.total + len(tail) - len(ids)) + ids
        return result

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

    async def _end_of_turn(self, chat_params: Any) -> int | None:
        """The token that the template writes after an answer: often, but not always, the tokenizer's end of sequence."""
        if self._end is None:
            opening = [{"role": "user", "content": "-"}, {"role": "assistant", "content": SENTINEL}]
            closing = (await self._text_of(opening, chat_params)).rpartition(SENTINEL)[2]
            tokenizer = self._inner.get_tokenizer()
            ids = tokenizer.encode(closing, add_special_tokens=False)
            self._end = int(ids[0]) if ids else -1
            self._end_text = tokenizer.decode(ids[:1])
        return None if self._end < 0 else self._end

    async def _num_turns_closed(self, opening: list[Message], asked: ChatOptions, chat_params: Any) -> int:
        """End-of-turn tokens in a user turn and this assistant turn, with what the template puts before them.

        It depends on the template's inputs and not on the words, so it is computed once for each kind of message.
        """
        key = (asked.identity, bool(opening[1].get("tool_calls")))
        spoken = self._end_text in json.dumps(opening[1], ensure_ascii=False, default=str)
        if spoken or key not in self._turns_closed:
            closed = (await self._text_of(opening, chat_params)).count(self._end_text)
            if spoken:
                return closed
            if len(self._turns_closed) >= MAX_KINDS:
                self._turns_closed.clear()
            self._turns_closed[key] = closed
        return self._turns_closed[key]

    async def _text_of(self, messages: list[Message], chat_params: Any) -> str:
        """What the template writes for these messages, without an opening for the next answer."""
        kwargs = {**chat_params.chat_template_kwargs, "add_generation_prompt": False, "tokenize": False}
        params = dataclasses.replace(chat_params, chat_template_kwargs=kwargs)
        _, prompt = await self._inner.render_messages_async(messages, params)
        return str(prompt.get("prompt", ""))
