"""How vLLM's HTTP layer shows a sampled text to an agent: parsed by its own tool and reasoning parsers.

Used when an agent sends an answer back with tool calls or split-off reasoning, to recognise it. What the HTTP layer's parser
told is remembered with the round: a streamed answer is not what the same text is as a whole. Only where nothing is remembered
(after a restart, or where the connection ended early) the text is parsed again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from mocked_server.conversation.chat_history import ChatOptions
from mocked_server.conversation.message_match import ParsedReply, canonical_arguments
from mocked_server.request_context import current_call
from mocked_server.vllm.sampling_limits import MAX_CHOICES

logger = logging.getLogger(__name__)


class ReplyParser:
    """`parser_cls`: vLLM's `Parser` class, None when neither a tool nor a reasoning parser is set."""

    def __init__(self, parser_cls: Any, *, tokenizer: Any, model_config: Any) -> None:
        self._parser_cls = parser_cls
        self._tokenizer = tokenizer
        self._model_config = model_config

    def __call__(self, text: str, asked: ChatOptions) -> ParsedReply:
        """`text` as content, reasoning and calls. A text that the parser cannot take is content."""
        if self._parser_cls is None:
            return ParsedReply(text.strip())
        try:
            return self._parsed(text, asked)
        except (ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError, OSError) as error:
            # The agent got no better answer either. What the model says is its own: nested deeper than Python recurses, or
            # such that a pattern's time is up, and the parsers' own faults.
            logger.info("vLLM's parser could not take a sampled text of %d characters: %r", len(text), error)
            return ParsedReply(text.strip())

    def _parsed(self, text: str, asked: ChatOptions) -> ParsedReply:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

        tools = [
            ChatCompletionToolsParam.model_validate(tool) for tool in asked.template_kwargs.get("tools") or ()
        ] or None
        request = ChatCompletionRequest.model_construct(
            messages=[], tools=tools, tool_choice=asked.tool_choice if tools else "none", include_reasoning=True
        )
        parser = self._parser_cls(
            self._tokenizer, tools, chat_template_kwargs=asked.template_kwargs, model_config=self._model_config
        )
        reasoning, content, calls = parser.parse(text, request, enable_auto_tools=True)
        spoken = tuple((call.name, canonical_arguments(call.arguments)) for call in calls or ())
        return ParsedReply((content or "").strip(), spoken, (reasoning or "").strip())


def telling(parser_cls: Any) -> Any:
    """vLLM's class of parsers, whose parsers note with the round of the current call what they told of its text. None stays
    None."""
    if parser_cls is None:
        return None

    class TellingParser(parser_cls):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._text, self._deltas = "", list[Any]()

        def parse(self, model_output: str, request: Any, *args: Any, **kwargs: Any) -> Any:
            told = reasoning, content, calls = super().parse(model_output, request, *args, **kwargs)
            _note(model_output, request, content, reasoning, [(call.name, call.arguments) for call in calls or ()])
            return told

        def parse_delta(
            self, delta_text: str, delta_token_ids: Any, request: Any, prompt_token_ids: Any = None, *, finished: bool
        ) -> Any:
            delta = super().parse_delta(delta_text, delta_token_ids, request, prompt_token_ids, finished=finished)
            self._text += delta_text
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

    return TellingParser


def _note(
    text: str, request: Any, content: str | None, reasoning: str | None, calls: Iterable[tuple[str, str]]
) -> None:
    if (call := current_call.get()) is None:
        return
    told = [(name, canonical_arguments(arguments)) for name, arguments in calls]
    if request.parallel_tool_calls is False:
        del told[1:]  # the HTTP layer shows the first
    for live in call.live.rounds[-MAX_CHOICES:]:
        if live.text == text and live.said is None:
            live.said = ParsedReply((content or "").strip(), tuple(told), (reasoning or "").strip())
