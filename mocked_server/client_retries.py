"""Automatic retries of clients: one generation, however often it is asked for.

The OpenAI and Anthropic clients send a request again when their connection breaks or times out. An `Answer` runs the application
once, in a task of its own; connections attach to it. A retry attaches to the answer of the attempt before it: while that runs, or
after it ended. An answer that no client waits for is given up after a moment (`GRACE_S`), which aborts its generation.

What is kept is small: the last few complete answers of a running episode, as bytes, and few bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from buffers.errors import UnderstudyError

logger = logging.getLogger(__name__)

GRACE_S = 0.75
"""Seconds that a generation continues without a client. The clients' first retry comes within 0.5 s."""
KEPT_S = 30.0
"""Seconds in which a complete answer can be replayed; the clients wait at most 8 s between attempts."""
KEPT_ANSWERS = 16
"""Complete answers kept for one episode, the latest."""
KEPT_DELIVERED = 1
"""Answers among them that may have been delivered already: their client asks again only if it gave up in that moment."""
KEPT_BYTES = 4 * 1024 * 1024
"""Bytes of an episode's latest complete answers together. A larger one is not kept."""


class TakenOver(UnderstudyError):
    """Another connection asked for the same answer later, and gets it."""


class Answer:
    """One answer, from the request to the last byte."""

    def __init__(self) -> None:
        self.attempt = 0
        """Number of the last connection that asked for it."""
        self.ended_at: float | None = None
        self.delivered = False
        self.replayable = True
        """False once it cannot be given to another connection: an error, a stream that has begun, or given up."""
        self.num_bytes = 0
        """Bytes that are kept of it."""
        self._messages: list[Message] = []
        self._streams = False
        self._body: bytes | None = None
        self._send: Send | None = None
        self._hung_up: asyncio.Future[Any] | None = None
        self._taken_over: asyncio.Future[None] | None = None
        self._given_up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp, scope: Scope, body: bytes, *, on_ended: Callable[[], object] = lambda: None) -> None:
        """Run the application for this request; `on_ended` is called when it has ended, however it did."""
        self._body = body
        self._task = asyncio.create_task(_run(app, scope, self._receive, self._take), name="answer")
        self._task.add_done_callback(self._ended)
        self._task.add_done_callback(lambda _: on_ended())

    async def deliver(self, receive: Receive, send: Send) -> None:
        """Send the answer on this connection, from its beginning; returns when all is sent or the client went away.

        A later connection takes over from an earlier one, whose client has given up. Raises TakenOver on the earlier one,
        unless something was sent on it.
        """
        num_sent, messages = 0, self._messages
        while num_sent < len(messages):  # more may come while these are sent
            await send(messages[num_sent])
            num_sent += 1
        if self._task is None:
            self.delivered = True
            return
        if num_sent and self._streams:
            self._pass_on_only()
        task = self._task
        if self._taken_over is not None and not self._taken_over.done():
            self._taken_over.set_result(None)
        self._taken_over = taken_over = asyncio.get_running_loop().create_future()
        self._send = send
        self._hung_up = hung_up = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({task, hung_up, taken_over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hung_up.cancel()
            if self._send is send:
                self._send = None
                self._lost()
        if taken_over.done() and not task.done() and not self._messages:
            raise TakenOver("a later attempt of this request gets the answer; wait for that one")
        if task.done():
            task.result()  # an application that failed fails this connection too

    async def _receive(self) -> Message:
        """Message that the application reads: the request, then nothing until the answer is given up."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._given_up.wait()
        return {"type": "http.disconnect"}

    async def _take(self, message: Message) -> None:
        """What the application sends."""
        if message["type"] == "http.response.start":
            self._streams = any(
                name == b"content-type" and b"event-stream" in value for name, value in message["headers"]
            )
            if message["status"] >= 400 or self._given_up.is_set() or (self._streams and self._send is not None):
                self._pass_on_only()
        if self.replayable:
            self._messages.append(message)
            self.num_bytes += len(message.get("body", b""))
            if self.num_bytes > KEPT_BYTES:
                self._pass_on_only()
        if self._send is not None:
            await self._send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self.delivered = self._hung_up is not None and not self._hung_up.done()

    def _pass_on_only(self) -> None:
        self.replayable = False
        self._messages = []  # who is being sent what was there has a hold on it
        self.num_bytes = 0

    def _lost(self) -> None:
        """The connection ended. No other connection can continue a stream that has begun; for all else a retry may come."""
        if self._task is None or self._task.done():
            return
        if self.replayable:
            asyncio.get_running_loop().call_later(GRACE_S, self._give_up)
        else:
            self._given_up.set()

    def _give_up(self) -> None:
        if self._send is None and self._task is not None:
            self._pass_on_only()
            self._given_up.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        self.ended_at = time.monotonic()
        if task.cancelled() or task.exception() is not None:
            self._pass_on_only()
            if self._send is None and not task.cancelled():
                logger.error("a request without a client failed: %s", task.exception())


class Answers:
    """The answers of one episode that a retry may ask for."""

    def __init__(self) -> None:
        self._answers: list[tuple[bytes, Answer]] = []

    def find(self, key: bytes, *, attempt: int) -> Answer | None:
        """The answer that this attempt asks for again: first one that did not reach its client, then the latest."""
        if attempt == 0:
            return None
        answers = [a for k, a in reversed(self._answers) if k == key and a.attempt < attempt and a.replayable]
        return max(answers, key=lambda answer: not answer.delivered, default=None)

    def keep(self, key: bytes, answer: Answer) -> None:
        """Remember an answer that was started; forget those that will not be asked for any more."""
        self._answers.append((key, answer))
        self.forget()

    def forget(self) -> None:
        """Drop answers that are too old, too many or too large; called whenever one was started or has ended."""
        now = time.monotonic()
        kept, num_complete, num_delivered, num_bytes = [], 0, 0, 0
        for key, answer in reversed(self._answers):
            if not answer.replayable:
                continue
            if answer.ended_at is not None:
                num_complete += 1
                num_delivered += answer.delivered
                num_bytes += answer.num_bytes
                is_old = now - answer.ended_at >= KEPT_S
                if is_old or num_complete > KEPT_ANSWERS or num_bytes > KEPT_BYTES:
                    continue
                if answer.delivered and num_delivered > KEPT_DELIVERED:
                    continue
            kept.append((key, answer))
        self._answers = kept[::-1]


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)
