"""How an answer ended, as each dialect says it, where vLLM's HTTP layer says something else.

Installed by `mocked_server.vllm.serving`. An agent acts on these words, and the policy learns from what comes of it: an answer that
was cut is no call to be run (`finish_reason: tool_calls` with what the parser made of half a call), and no complete response
(`response.completed`, items that say `completed`); an answer without a call has none, also where one was required. Seams relied on:
`chat_completion_full_generator`, `responses_full_generator`, `responses_stream_generator`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal


def install(*, chat: Any, responses: Any, messages: Any) -> None:
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

        told = await answer(request, noted(), *args, **kwargs)
        for choice in getattr(told, "choices", ()):  # an error has none
            if reasons.get(choice.index) == "length":
                choice.finish_reason = "length"
            elif choice.finish_reason == "tool_calls" and not choice.message.tool_calls:
                choice.finish_reason = "stop"
        return told

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
