"""How a model calls tools: as its chat template writes it, which one of vLLM's parsers reads.

Used by `mocked_server.vllm.engine_arguments` where `server.tool_parser` is auto, and by `mocked_server.check`, which says calls
in the model's own form. Seam relied on (checked by tests/outside/test_chat_templates.py): `ToolParserManager`, and a parser's
`extract_tool_calls(text, request)`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

FIRST = ("hermes", "qwen3_coder", "glm45", "llama3_json")
"""Parsers that are asked first: several read what one family writes, and these are what its users name."""
USER, WORD = {"role": "user", "content": "Hello."}, "an-answer-f81d4fae"
NAME, ARGUMENTS = "look_up", {"city": "Paris", "days": 3}
TOOL = {
    "type": "function",
    "function": {
        "name": NAME, "description": "Looks up the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": list(ARGUMENTS),
        },
    },
}  # fmt: skip
REFUSES = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)
"""What a chat template raises for messages that it does not take, and what a parser does for a text of another form."""


def parser_of(tokenizer: Any) -> str | None:
    """The name of vLLM's parser that reads a call as the tokenizer's chat template writes it; None where none does."""
    text, _ = said(tokenizer, calls_message([(NAME, ARGUMENTS)]), tools=[TOOL])
    if NAME not in text:
        return None
    from vllm.tool_parsers import ToolParserManager

    names = ToolParserManager.list_registered()
    logger = logging.getLogger("vllm.tool_parsers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it tells of what a parser does not read
    try:
        return next((name for name in (*FIRST, *names) if name in names and _reads(name, tokenizer, text)), None)
    finally:
        logger.setLevel(level)


def calls_message(calls: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The message of a model that makes these calls: names, and arguments."""
    made = [
        {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)  # ids of nine letters and digits, as Mistral's
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def said(tokenizer: Any, message: Mapping[str, Any], *, tools: Sequence[Any] | None = None) -> tuple[str, str]:
    """The text that a model says for this message after a user's words, as its chat template writes it, without reasoning; and the
    text that ends it: what the template writes then. Both empty where it does not show the message."""
    if not getattr(tokenizer, "chat_template", None):  # Mistral's is code, and takes no chat that ends with an answer
        return "", ""
    calls = message.get("tool_calls") or ()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": WORD}
        for call in calls
    ]

    def rendered(*messages: Mapping[str, Any], asks: bool = False) -> str:
        return str(
            tokenizer.apply_chat_template([USER, *messages], tools=tools, add_generation_prompt=asks, tokenize=False)
        )

    try:
        text, prompt = rendered(message), rendered(asks=True)
        closing = rendered({"role": "assistant", "content": WORD}).rpartition(WORD)[2]
        followed = rendered(message, *(results or [USER]))
    except REFUSES:
        return "", ""
    text = text[_num_shared(prompt, text) :].rpartition("</think>")[2].lstrip("\n")
    if not all(part in text for part in (message["content"], *(call["function"]["name"] for call in calls))):
        return "", ""
    if closing and text.endswith(closing):
        return text.removesuffix(closing), closing
    return text, followed.rpartition(text[-len(WORD) :])[2]


def _num_shared(one: str, other: str) -> int:
    """Letters with which both begin."""
    return next((at for at, (left, right) in enumerate(zip(one, other)) if left != right), min(len(one), len(other)))


def _reads(name: str, tokenizer: Any, text: str) -> bool:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager

    tools = [ChatCompletionToolsParam.model_validate(TOOL)]
    request = ChatCompletionRequest.model_construct(
        messages=[], tools=tools, tool_choice="auto", include_reasoning=True
    )
    try:
        read = ToolParserManager.get_tool_parser(name)(tokenizer, tools).extract_tool_calls(text, request).tool_calls
        return [(call.function.name, json.loads(call.function.arguments)) for call in read] == [(NAME, ARGUMENTS)]
    except (*REFUSES, AssertionError, ImportError):
        return False
