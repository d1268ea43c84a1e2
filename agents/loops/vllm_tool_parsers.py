"""Tool calls in a sampled text, read by vLLM's parsers, by their names there (hermes, llama3_json, qwen3_xml, mistral, ...).

`ToolParser.get_tool_parser(name, tokenizer)` and `extract_tool_calls(ids)` are verl's names. The one place in `agents/` that
imports vllm, when a parser is first made. A malformed call is distinguished from an answer without calls: the model shall learn
of it.

Seams relied on (checked by tests/mocked_server/vllm/test_vllm_seams.py): `ToolParserManager.get_tool_parser`, a
parser's `extract_tool_calls(text, request)`, and the attributes that hold the mark of a call.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from buffers.did_you_mean import one_of
from buffers.errors import TaskError

MARKS = ("tool_call_start_token", "tool_calls_start_token", "bot_token", "bot_string", "tool_call_start")
"""Attributes of vLLM's parsers that hold the text with which a call begins."""


class FunctionCall(BaseModel):
    """A call as the model wrote it."""

    name: str
    arguments: str
    """JSON text."""


class ToolParser:
    """One model family's way to write calls. `parser_cls`: vLLM's class, whose objects keep the state of one text."""

    def __init__(self, parser_cls: Any, tokenizer: Any) -> None:
        self._parser_cls = parser_cls
        self._tokenizer = tokenizer
        parser = parser_cls(tokenizer)
        marks = [getattr(parser, name, None) for name in MARKS]
        self._marks = [mark for mark in marks if isinstance(mark, str) and mark]

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """Raises TaskError, with the nearest name, for one that vLLM does not have."""
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # a model's malformed call is no error of ours
        from vllm.tool_parsers import ToolParserManager

        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        names = ToolParserManager.list_registered()
        if name not in names:
            raise TaskError(f"format must be a tool parser of vLLM: {one_of(name, names)}")
        return cls(ToolParserManager.get_tool_parser(name), tokenizer)

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[dict[str, Any]] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """(content beside the calls, the calls) of sampled ids; a text that cannot be parsed is content."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

        offered = [ChatCompletionToolsParam.model_validate(tool) for tool in tools or ()] or None
        request = ChatCompletionRequest.model_construct(
            messages=[], tools=offered, tool_choice="auto" if offered else "none", include_reasoning=True
        )
        parser = self._parser_cls(self._tokenizer, offered)
        parsed = parser.extract_tool_calls(self._text(responses_ids), request)
        calls = [FunctionCall(name=call.function.name, arguments=call.function.arguments) for call in parsed.tool_calls]
        return (parsed.content or "").strip(), calls

    def is_malformed(self, responses_ids: Sequence[int]) -> bool:
        """Does an answer without calls hold the mark that begins one?"""
        text = self._text(responses_ids)
        return any(mark in text for mark in self._marks)

    def _text(self, ids: Sequence[int]) -> str:
        """The text without the end of the turn; other control tokens stay, as some models begin a call with one."""
        ids = list(ids)
        return str(self._tokenizer.decode(ids[:-1] if ids and ids[-1] == self._tokenizer.eos_token_id else ids))
