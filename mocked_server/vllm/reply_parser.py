"""How vLLM's HTTP layer shows a sampled text to an agent: parsed by its own tool and reasoning parsers.

Used when an agent sends an answer back with tool calls or split-off reasoning, to recognise it. What the HTTP layer's parser
told is remembered with the round: a streamed answer is not what the same text is as a whole. Only where nothing is remembered
(after a restart, or where the connection ended early) the text is parsed again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

from mocked_server.conversation.chat_history import (
    ChatOptions,
    ParsedReply,
    arguments_of,
    canonical_arguments,
    sendable,
)
from mocked_server.request_context import current_call
from mocked_server.vllm.sampling_rules import MAX_CHOICES

logger = logging.getLogger(__name__)

FAULTS = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError, OSError)
"""Errors of parsers at what a model says (too deep for Python, too slow for a pattern), and at their own faults."""
FAILED = "vLLM's parser could not take a sampled text of %d characters: %r"


@dataclass(frozen=True, slots=True)
class ReplyParser:
    """`parser_cls`: vLLM's `Parser` class, None when neither a tool nor a reasoning parser is set."""

    parser_cls: Any
    tokenizer: Any
    model_config: Any

    def __call__(self, text: str, asked: ChatOptions) -> ParsedReply:
        """`text` as content, reasoning and calls. A text that the parser cannot take is content."""
        if self.parser_cls is None:
            return ParsedReply(text.strip())
        try:
            return self._parsed(text, asked)
        except FAULTS as error:
            logger.info(FAILED, len(text), error)
            return ParsedReply(text.strip())

    def _parsed(self, text: str, asked: ChatOptions) -> ParsedReply:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

        tools = [
            ChatCompletionToolsParam.model_validate(tool) for tool in asked.template_kwargs.get("tools") or ()
        ] or None
        request = ChatCompletionRequest.model_construct(
            messages=[], tools=tools, tool_choice=asked.tool_choice if tools else "none", include_reasoning=True
        )
        parser = self.parser_cls(
            self.tokenizer, tools, chat_template_kwargs=asked.template_kwargs, model_config=self.model_config
        )
        reasoning, content, calls = parser.parse(text, request, enable_auto_tools=True)
        spoken = tuple((call.name, canonical_arguments(call.arguments)) for call in calls or ())
        return ParsedReply((content or "").strip(), spoken, (reasoning or "").strip())


def telling(parser_cls: Any, *, in_objects: bool = False) -> Any:
    """vLLM's class of parsers, as a `TellingParser`. None stays None. `in_objects`: Anthropic's dialect has no other arguments."""
    if parser_cls is None:
        return None
    return type(TellingParser.__name__, (TellingParser, parser_cls), {"in_objects": in_objects})


class TellingParser:
    """Comes before vLLM's class of parsers: tells whatever was sampled in a form that can be sent, and notes with the round of the
    current call what was told of its text."""

    in_objects = False
    """Arguments of calls are sent when they are complete, as objects."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._text, self._failed, self._deltas = "", False, list[Any]()
        self._held: dict[int, str] = {}
        """Arguments of calls that are not told yet."""

    def parse(self, model_output: str, request: Any, *args: Any, **kwargs: Any) -> Any:
        reasoning, content, calls = None, model_output, None
        if (call := current_call.get()) is None or not call.tells_text:
            try:
                reasoning, content, calls = cast(Any, super()).parse(model_output, request, *args, **kwargs)
            except FAULTS as error:
                logger.info(FAILED, len(model_output), error)
        if not (content or reasoning or calls):
            content = model_output  # an agent that gets nothing has nothing to send back
        for each in calls or ():
            each.name, each.arguments = sendable(each.name), sendable(each.arguments)
            if self.in_objects:
                each.arguments = _as_object(each.arguments)
        _note(model_output, request, content, reasoning, [(each.name, each.arguments) for each in calls or ()])
        return reasoning, content, calls

    def parse_delta(
        self, delta_text: str, delta_token_ids: Any, request: Any, prompt_token_ids: Any = None, *, finished: bool
    ) -> Any:
        delta, parser = None, cast(Any, super())
        try:
            if not self._failed:
                delta = parser.parse_delta(delta_text, delta_token_ids, request, prompt_token_ids, finished=finished)
        except FAULTS as error:
            logger.info(FAILED, len(self._text + delta_text), error)
            self._failed = True
        if self._failed:
            delta = _delta(content=delta_text)
        self._text += delta_text
        delta = self._told(delta, finished=finished)
        if (
            finished
            and self._text
            and not any(each.content or each.reasoning or each.tool_calls for each in [*self._deltas, delta] if each)
        ):
            delta = _delta(content=self._text)  # an agent that gets nothing has nothing to send back
        self._deltas += [] if delta is None else [delta]
        if finished:
            calls: dict[int, tuple[str, str]] = {}
            for part in (part for each in self._deltas for part in each.tool_calls or () if part.function):
                name, arguments = calls.get(part.index, ("", ""))
                calls[part.index] = name + (part.function.name or ""), arguments + (part.function.arguments or "")
            content, reasoning = (
                "".join(getattr(each, name) or "" for each in self._deltas) for name in ("content", "reasoning")
            )
            _note(self._text, request, content, reasoning, calls.values())
        return delta

    def _told(self, delta: Any, *, finished: bool) -> Any:
        """Part of an answer that can be sent now."""
        parts = []
        for part in [] if delta is None else delta.tool_calls or ():
            if (said := part.function) is None:
                continue
            said.name, said.arguments = (said.name and sendable(said.name)), sendable(said.arguments or "")
            if self.in_objects:
                parts += [self._completed(index) for index in [*self._held] if index != part.index]
                self._held[part.index] = self._held.get(part.index, "") + said.arguments
                said.arguments = None
            if part.id is not None or said.name or said.arguments:
                parts.append(part)
        parts += [self._completed(index) for index in [*self._held]] if finished else []
        if delta is None:
            return _delta(tool_calls=parts) if parts else None
        delta.tool_calls = parts
        return delta if finished or parts or delta.content or delta.reasoning else None

    def _completed(self, index: int) -> Any:
        from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaToolCall

        return DeltaToolCall(index=index, function=DeltaFunctionCall(arguments=_as_object(self._held.pop(index))))


def _delta(**said: Any) -> Any:
    from vllm.entrypoints.generate.base.protocol import DeltaMessage

    return DeltaMessage(**said)


def _as_object(text: str) -> str:
    arguments = arguments_of(text)
    return text if arguments and "arguments" not in arguments else json.dumps(arguments)


def _note(
    text: str, request: Any, content: str | None, reasoning: str | None, calls: Iterable[tuple[str, str]]
) -> None:
    if (call := current_call.get()) is None:
        return
    shown = [(name, canonical_arguments(arguments)) for name, arguments in calls]
    if request.parallel_tool_calls is False:
        del shown[1:]  # the HTTP layer shows the first
    for live in call.live.rounds[-MAX_CHOICES:]:
        if live.text == text and (live.said is None or call.tells_text):
            live.said = ParsedReply((content or "").strip(), tuple(shown), (reasoning or "").strip())


def send_any_input() -> None:
    """Lets the input of a custom tool, which is a text and no JSON, be half of a surrogate pair."""
    from vllm.entrypoints.openai.responses import streaming_events, utils

    for module, name in (
        (utils, "decode_custom_tool_input"),
        (streaming_events, "decode_custom_tool_input"),
        (streaming_events, "decode_custom_tool_input_prefix"),
    ):
        original = getattr(module, name)
        if getattr(original, "__name__", "") == name:
            setattr(module, name, lambda arguments, original=original: sendable(original(arguments)))


# How an answer ended, as each dialect says it, where vLLM's HTTP layer says something else. An agent acts on these words, and
# the policy learns from what comes of it: an answer that was cut is no call to be run (`finish_reason: tool_calls` with what
# the parser made of half a call), and no complete response (`response.completed`, items that say `completed`); an answer
# without a call has none, also where one was required. Seams relied on: `chat_completion_full_generator`,
# `responses_full_generator`, `responses_stream_generator`.


def tell_true_ends(*, chat: Any, responses: Any, messages: Any) -> None:
    """`chat`, `responses`, `messages`: vLLM's serving objects."""
    from pydantic import create_model
    from vllm.entrypoints.openai.responses.protocol import ResponseCompletedEvent

    kind: Any = Literal["response.incomplete"]
    incomplete = create_model(
        "ResponseIncompleteEvent", __base__=ResponseCompletedEvent, type=(kind, "response.incomplete")
    )
    for part in (chat, messages):
        part.chat_completion_full_generator = _with_true_reasons(part.chat_completion_full_generator)
    responses.responses_full_generator = _with_cut_items(responses.responses_full_generator)
    responses.responses_stream_generator = _with_true_ends(responses.responses_stream_generator, incomplete=incomplete)


def _with_true_reasons(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def answering(request: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        reasons: dict[int, str | None] = {}

        async def noted() -> AsyncIterator[Any]:
            async for output in outputs:
                reasons.update({completion.index: completion.finish_reason for completion in output.outputs})
                yield output

        response = await answer(request, noted(), *args, **kwargs)
        for choice in getattr(response, "choices", ()):  # an error has none
            if reasons.get(choice.index) == "length":
                choice.finish_reason = "length"
            elif choice.finish_reason == "tool_calls" and not choice.message.tool_calls:
                choice.finish_reason = "stop"
        return response

    return answering


def _with_cut_items(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def answering(*args: Any, **kwargs: Any) -> Any:
        told = await answer(*args, **kwargs)
        if getattr(told, "status", None) == "incomplete" and told.output:
            last = told.output[-1]
            if getattr(last, "status", None) == "completed":
                last.status = "incomplete"
        return told

    return answering


def _with_true_ends(
    stream: Callable[..., AsyncIterator[Any]], *, incomplete: Callable[..., Any]
) -> Callable[..., AsyncIterator[Any]]:
    async def streaming(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        done: Any = None  # an item that has ended is sent with the next event: only that one says whether it was cut
        async for event in stream(*args, **kwargs):
            if done is not None:
                yield done
            done = event if event.type == "response.output_item.done" else None
            if event.type == "response.completed" and event.response.status == "incomplete":
                yield incomplete(response=event.response, sequence_number=event.sequence_number)
            elif done is None:
                yield event
        if done is not None:
            yield done

    return streaming
