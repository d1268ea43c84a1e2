"""One HTTP request to the model API, as the parts of the server see it while it is being answered.

The attribution middleware puts a `Call` into a context variable; the renderer hook adds the continuation; the engine
client takes it from there. Nothing is kept after the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from buffers.errors import RequestRefused
from buffers.prompt_queue import Response
from mocked_server.conversation.continuation import Continuation
from mocked_server.conversation.live_episodes import LiveEpisode

END = object()


@dataclass(slots=True)
class Call:
    """A request of `live`'s agent. `continuation` is set once a chat was rendered."""

    live: LiveEpisode
    continuation: Continuation | None = None
    generates: bool = False
    """A generation was begun for it."""
    extra_args: dict[str, Any] = field(default_factory=dict)
    """For the engine, in `SamplingParams.extra_args`: what an observer of requests has to tell it."""
    failure: Exception | None = None
    """Why nothing was generated for it: a dialect's route may make an answer of its own of that."""
    num_choices: int = 0
    """Answers asked for, over all its prompts."""

    def count_choices(self, number: int, *, limit: int) -> None:
        """Raises RequestRefused when the request asks for more than `limit` answers in all."""
        self.num_choices += number
        if self.num_choices > limit:
            raise RequestRefused(
                f"n x prompts must be at most {limit}, got {self.num_choices} or more; send several requests", field="n"
            )


current_call: ContextVar[Call | None] = ContextVar("current_call", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What a `Prompt` carries in `sampling`: vLLM's SamplingParams, and the further arguments of `generate`."""

    params: Any
    extra: dict[str, Any]


class PendingReply:
    """Carries an answer from whoever generates to the connection that waits. Made on the server's event loop.

    Any thread: `push` (engine outputs as they come, then `finish()`), or `finish(response)` with all tokens at once, or `fail`.
    On the server's loop: `outputs`, and `abandon` when the client went away.
    """

    def __init__(self, output_of: Callable[[Response], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._output_of = output_of
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._on_abandon: list[Callable[[], object]] = []
        self.abandoned = False

    def push(self, output: Any) -> None:
        """Hand one engine output to the waiting connection."""
        self._put(output)

    def finish(self, response: Response | None = None) -> None:
        """The answer is complete; `response` holds it when nothing was pushed."""
        if response is not None:
            self._put(self._output_of(response))
        self._put(END)

    def fail(self, error: Exception) -> None:
        """End the answer with an error that the HTTP layer turns into the dialect's error body."""
        self._put(error)

    def on_abandon(self, callback: Callable[[], object]) -> None:
        """Call `callback()` (from the server's loop) when the client hangs up; at once if it already has."""
        if self.abandoned:
            callback()
        else:
            self._on_abandon.append(callback)

    def abandon(self) -> None:
        """The client went away: whoever generates is told to stop."""
        if not self.abandoned:
            self.abandoned = True
            for callback in self._on_abandon:
                callback()

    async def outputs(self) -> AsyncIterator[Any]:
        """Yield outputs until `finish`; raise what `fail` was given."""
        while (item := await self._outputs.get()) is not END:
            if isinstance(item, Exception):
                raise item
            yield item

    def _put(self, item: Any) -> None:
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._outputs.put_nowait(item)
        else:
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, item)
