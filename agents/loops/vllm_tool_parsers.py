"""vLLM's tool parsers, by name: the one place in `agents/` that imports vllm, when a parser is first made.

Seams relied on (checked by tests/mocked_server/vllm/test_vllm_seams.py): `ToolParserManager.get_tool_parser`, a
parser's `extract_tool_calls(text, request)`, and the attributes that hold the mark of a call.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from buffers.did_you_mean import one_of
from buffers.errors import TaskError

MARKS = ("tool_call_start_token", "tool_calls_start_token", "bot_token", "bot_string", "tool_call_start")
"""Attributes of vLLM's parsers that hold the text with which a call begins."""


class VLLMParser:
    """`parser_cls`: vLLM's class. A parser keeps state of a stream: one is made for each text."""

    def __init__(self, parser_cls: Any, tokenizer: Any) -> None:
        self._parser_cls = parser_cls
        self._tokenizer = tokenizer
        first = parser_cls(tokenizer)
        found = [getattr(first, name, None) for name in MARKS]
        self.marks = [mark for mark in found if isinstance(mark, str) and mark]

    def parse(self, text: str, *, tools: Sequence[dict[str, Any]] | None) -> tuple[str, list[tuple[str, str]]]:
        """(content, [(name, arguments as JSON text)]); a text that cannot be parsed is content."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

        offered = [ChatCompletionToolsParam.model_validate(tool) for tool in tools or ()] or None
        request = ChatCompletionRequest.model_construct(
            messages=[], tools=offered, tool_choice="auto" if offered else "none", include_reasoning=True
        )
        found = self._parser_cls(self._tokenizer, offered).extract_tool_calls(text, request)
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return (found.content or "").strip(), calls


def make_parser(name: str, tokenizer: Any) -> VLLMParser:
    """vLLM's parser of this name; raises TaskError with the nearest name."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # a model's malformed call is no error of ours
    from vllm.tool_parsers import ToolParserManager

    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    names = ToolParserManager.list_registered()
    if name not in names:
        raise TaskError(f"format must be a tool parser of vLLM: {one_of(name, names)}")
    return VLLMParser(ToolParserManager.get_tool_parser(name), tokenizer)
