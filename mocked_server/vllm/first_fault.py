"""A list in a request is read up to its first item that is not as it should be.

Called by `mocked_server.vllm.serving` before vLLM's application is built. pydantic tries each item as every kind of item, and
keeps what is wrong with each: 233 errors for one item of a Responses input, so that 4,096 of them, which are 40 KB, take some 12 s
of the event loop and gigabytes. The first says as much. Seam relied on (tests/mocked_server/test_event_loop.py): the requests are
pydantic models, whose core schema is a tree of mappings and lists.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import SchemaValidator


def stop_at_the_first_fault() -> None:
    """Changes how vLLM's requests are validated; a second time nothing happens."""
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    requests: tuple[Any, ...] = (
        ChatCompletionRequest, CompletionRequest, ResponsesRequest, AnthropicMessagesRequest, AnthropicCountTokensRequest,
    )  # fmt: skip
    for model in requests:
        _mark_lists(model.__pydantic_core_schema__, seen=set())
        model.__pydantic_validator__ = SchemaValidator(model.__pydantic_core_schema__)


def _mark_lists(schema: Any, *, seen: set[int]) -> None:
    if id(schema) in seen:
        return
    seen.add(id(schema))
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for each in schema.values():
            _mark_lists(each, seen=seen)
    elif isinstance(schema, list | tuple):
        for each in schema:
            _mark_lists(each, seen=seen)
