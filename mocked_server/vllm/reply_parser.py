"""How vLLM's HTTP layer shows a sampled text to an agent: parsed by its own tool and reasoning parsers.

Used when an agent sends an answer back with tool calls or split-off reasoning, to recognise it. The class of parser is
the one that the HTTP layer uses (`build_serving_app` hands it over), so both always agree.
"""

from __future__ import annotations

import logging
from typing import Any

from mocked_server.conversation.chat_history import ChatOptions
from mocked_server.conversation.message_match import ParsedReply, canonical_arguments

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
