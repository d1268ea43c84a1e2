"""Which HTTP answer an error of ours is, before and after an answer has begun.

`Failure.answer` is the one way to refuse a model request. `failure_of` is used by vLLM's application (`serving`) and by
`model_requests`, which passes every answer through a `StreamStart`. Invariant: what is refused before anything was generated has
its status, also on a stream; what fails later ends the stream with the dialect's error event, never with a broken connection.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Message, Send

from buffers.errors import EngineError, EpisodeError, RequestFailed, RequestRefused
from buffers.prompt_queue import QueueClosed
from mocked_server.http.dialects import error_body, error_event
from mocked_server.request_context import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An answer that says why there is none."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    closes: bool = False
    """The connection ends: the rest of the request is not read."""

    def headers(self, body: bytes) -> list[tuple[bytes, bytes]]:
        """Headers of the answer with this body."""
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if self.closes:
            headers.append((b"connection", b"close"))
        if self.retry_after_s is not None:
            return [*headers, (b"retry-after", str(self.retry_after_s).encode())]
        return headers if self.status >= 500 else [*headers, (b"x-should-retry", b"false")]

    def body(self, path: str) -> bytes:
        """The error's body in the dialect of `path`."""
        return error_body(path, status=self.status, message=self.message, code=self.code, param=self.param)

    def response(self, path: str) -> Response:
        """The same for an application that returns its answers."""
        body = self.body(path)
        headers = {name.decode(): value.decode() for name, value in self.headers(body)}
        return Response(body, status_code=self.status, headers=headers)

    async def answer(self, send: Send, path: str) -> None:
        """Sends all of it."""
        body = self.body(path)
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers(body)})
        await send({"type": "http.response.body", "body": body})


FAILURES = (EngineError, EpisodeError, QueueClosed, RequestFailed, RequestRefused, queue.Full)
"""What `failure_of` knows."""


def failure_of(error: BaseException | None) -> Failure | None:
    """None: it is none of `FAILURES`."""
    message = str(error)
    match error:
        case RequestRefused():
            return request_refused(error)
        case RequestFailed():
            return Failure(status=500, code="server_error", message=message)
        case EpisodeError():
            return Failure(status=403, code="episode_closed", message=message)
        case EngineError() | QueueClosed() | queue.Full():
            return Failure(status=503, code="engine_unavailable", message=message, retry_after_s=1)
        case _:
            return None


def request_refused(error: RequestRefused) -> Failure:
    """The answer to a request that is not served."""
    return Failure(status=error.status, code="invalid_request", message=str(error), param=error.field)


class StreamStart:
    """Passes an answer of `call` on to `send`; the beginning of an event stream waits until there is something of it. What an
    application makes of a `call.failure` that came before that does not pass: it may hide the status, or begin a stream."""

    def __init__(self, call: Call, *, path: str, send: Send) -> None:
        self._call = call
        self._path = path
        self._send = send
        self._held: list[Message] = []
        self._is_stream = False
        self._is_over = False
        self.has_begun = False
        """Some of it has left."""

    async def send(self, message: Message) -> None:
        """What the application says next."""
        if self._is_over:
            return
        if not self.has_begun and (known := failure_of(self._call.failure)) is not None:
            await self.fail(known)
            return
        is_start = message["type"] == "http.response.start"
        if is_start:
            self._is_stream = any(
                name == b"content-type" and b"event-stream" in value for name, value in message["headers"]
            )
        self._held.append(message)
        if self._is_stream and (is_start or not self._call.generates) and message.get("more_body", True):
            return
        held, self._held = self._held, []
        self.has_begun = True
        for each in held:
            await self._send(each)

    async def fail(self, failure: Failure) -> None:
        """The answer is complete."""
        if self._is_over:
            return
        self._is_over = True
        if not self.has_begun:
            await failure.answer(self._send, self._path)
            return
        body = error_event(
            self._path, status=failure.status, message=failure.message, code=failure.code, param=failure.param
        )
        await self._send({"type": "http.response.body", "body": body})
