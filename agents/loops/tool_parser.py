"""Tool calls in a sampled text, read by vLLM's parsers, by their names there (hermes, llama3_json, qwen3_xml, mistral, ...).

`ToolParser.get_tool_parser(name, tokenizer)` and `extract_tool_calls(ids)` are verl's names. vLLM is imported when the
first parser is made. A malformed call is distinguished from an answer without calls: the model shall
learn of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from agents.loops.vllm_tool_parsers import VLLMParser, make_parser


class FunctionCall(BaseModel):
    """A call as the model wrote it."""

    name: str
    arguments: str
    """JSON text."""


class ToolParser:
    """One model family's way to write calls."""

    def __init__(self, parser: VLLMParser, tokenizer: Any) -> None:
        self._parser = parser
        self._tokenizer = tokenizer

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """Raises TaskError for a name that vLLM does not have."""
        return cls(make_parser(name, tokenizer), tokenizer)

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[dict[str, Any]] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """(content beside the calls, the calls) of sampled ids."""
        content, calls = self._parser.parse(self._text(responses_ids), tools=tools)
        return content, [FunctionCall(name=name, arguments=arguments) for name, arguments in calls]

    def is_malformed(self, responses_ids: Sequence[int]) -> bool:
        """Does an answer without calls hold the mark that begins one?"""
        text = self._text(responses_ids)
        return any(mark in text for mark in self._parser.marks)

    def _text(self, ids: Sequence[int]) -> str:
        """The text without the end of the turn; other control tokens stay, as some models begin a call with one."""
        ids = list(ids)
        return str(self._tokenizer.decode(ids[:-1] if ids and ids[-1] == self._tokenizer.eos_token_id else ids))
