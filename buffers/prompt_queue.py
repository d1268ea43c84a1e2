"""The queue of prompts that wait for a generation, and the records that pass through it.

The server puts (from its event loop), the generate loop takes: blocking in another thread, or awaiting on any loop.
Invariants: first in, first out; each prompt is given out once; the queue is bounded and never blocks the putter; nobody
polls. It does not look into `sampling`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from buffers.errors import UnderstudyError
from buffers.records import Float32, Int32, UInt8, UInt16


class QueueClosed(UnderstudyError):
    """The queue was closed: no prompt will come, none is taken."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Response:
    """The generation for one prompt; arrays of [S] sampled tokens, as in `Round`."""

    request_id: str
    sampled_ids: Int32
    logprobs: Float32
    versions: Int32
    finish_reason: str = "stop"
    text: str | None = None
    """The sampled text without a stop string; None: not decoded."""
    stop: str = ""
    """The stop string that ended it: sampled, and not in `text`."""
    round_index: int | None = None
    """Its round in the buffer; None: it is not stored."""
    experts: UInt16 | None = None
    """[P + S - 1, layers, K] those that the engine used for all tokens but the last, or for as many that end there.
    None: not told."""


class Reply(Protocol):
    """The way back to the request that waits. `push`, `finish` and `fail` are called from any thread and return at once."""

    @property
    def abandoned(self) -> bool:
        """The client hung up."""
        ...

    def push(self, output: Any) -> None:
        """Send one output of the engine; more follow."""
        ...

    def finish(self, *responses: Response, last: Any = None) -> None:
        """The generation is done (and stored, where it belongs to an episode): one response for each completion. `last`: the
        engine's last output; None: nothing was pushed, and the responses are the whole answer."""
        ...

    def fail(self, error: Exception) -> None:
        """End the request with this error. No effect on one that has ended."""
        ...

    def on_abandon(self, callback: Callable[[], object]) -> None:
        """Call `callback()` when the client hangs up; at once if it already has."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample an answer. Only the generator reads it."""

    params: Any
    """vLLM's SamplingParams."""
    extra: Mapping[str, Any]
    """Further arguments of the engine's `generate`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One request that waits for its generation."""

    request_id: str
    """Unique among those that wait."""
    episode_id: str | None
    """None: a plain prompt; it is answered and not recorded."""
    prompt_token_ids: Int32
    """[P]"""
    sampling: Sampling
    reply: Reply
    group_id: int | None = None
    """The group of its episode, whose members share a prompt."""
    parent: int | None = None
    """Index of the stored round that this prompt continues; None: it starts a branch. The buffer verifies it."""
    memo: bytes = b""
    """See `Round`."""
    first_trained: int | None = 0
    """Sampled tokens before this one are not trained: the request changed the distribution that they are sampled from. None: no
    token is."""
    role: str = ""
    """See `Round`."""

    def trained(self, num_sampled: int) -> UInt8 | None:
        """`Round.trained` of a generation of so many tokens for this prompt."""
        if self.first_trained == 0:
            return None
        flags = np.zeros(num_sampled, np.uint8)
        if self.first_trained is not None:
            flags[self.first_trained :] = 1
        return flags


class PromptQueue:
    """See the module."""

    def __init__(self, *, max_size: int = 4096) -> None:
        if max_size < 1:
            raise UnderstudyError(f"prompt queue: max_size must be >= 1, got {max_size}")
        self._max_size = max_size
        self._prompts: deque[Prompt] = deque()
        self._changed = threading.Condition()
        self._awaiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._closed = False

    def qsize(self) -> int:
        """Prompts that wait."""
        return len(self._prompts)

    def put(self, prompt: Prompt) -> None:
        """Add a prompt, from any thread. Raises queue.Full at `max_size`, QueueClosed after `close`."""
        with self._changed:
            if self._closed:
                raise QueueClosed(f"prompt queue must be open, got prompt {prompt.request_id} after it was closed")
            if len(self._prompts) >= self._max_size:
                raise queue.Full(
                    f"prompt queue must hold at most {self._max_size} prompts; answer 503 and try again later"
                )
            self._prompts.append(prompt)
            self._wake()

    def get(self, timeout: float | None = None) -> Prompt:
        """The next prompt, blocking. Raises queue.Empty after `timeout` seconds, QueueClosed when closed."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._prompts or self._closed, timeout):
                raise queue.Empty
            self._check_open()
            return self._prompts.popleft()

    def get_all(self, *, at_most: int | None = None) -> list[Prompt]:
        """Wait for one prompt, blocking, then take what has piled up. Raises QueueClosed when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._prompts or self._closed)
            self._check_open()
            return self._pop(at_most)

    async def take(self, at_most: int | None = None) -> list[Prompt]:
        """Wait for one prompt, then take what has piled up. Raises QueueClosed when closed."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                self._check_open()
                if self._prompts:
                    return self._pop(at_most)
                waiter: asyncio.Future[None] = loop.create_future()
                self._awaiting[waiter] = loop
            try:
                await waiter
            finally:
                with self._changed:
                    self._awaiting.pop(waiter, None)

    def close(self) -> list[Prompt]:
        """End the queue, from any thread; waiters raise QueueClosed. Returns the prompts that were not taken."""
        with self._changed:
            self._closed = True
            left = self._pop(None)
            self._wake()
        return left

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosed("prompt queue was closed: no prompt will come")

    def _pop(self, at_most: int | None) -> list[Prompt]:
        number = len(self._prompts) if at_most is None else min(at_most, len(self._prompts))
        return [self._prompts.popleft() for _ in range(number)]

    def _wake(self) -> None:
        """All waiters look again: one that was cancelled meanwhile must not swallow the only wake-up."""
        self._changed.notify_all()
        for waiter, loop in self._awaiting.items():
            with suppress(RuntimeError):  # that loop has ended, and its waiter with it
                loop.call_soon_threadsafe(_resolve, waiter)
        self._awaiting.clear()


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
