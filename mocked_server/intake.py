"""Reads a model request's body before vLLM's HTTP layer does: refuses what cannot be served, joins retries, spells errors.

Pure ASGI, between `Attribution` (which knows the episode) and vLLM's application. Only requests of running episodes come here.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from mocked_server.calls import Call, current_call
from mocked_server.dialects import GENERATING, as_anthropic, error_body, is_anthropic
from mocked_server.door import MAX_BODY_BYTES, BodyRefused, answer_refused, read_body, replaying
from mocked_server.fields import refused, servable
from mocked_server.retries import Answer, App, Event, Receive, Send

RETRY_COUNT = b"x-stainless-retry-count"
"""Sent by the OpenAI and Anthropic clients with every request: 0, and 1, 2, ... in automatic retries."""


class Observer(Protocol):
    """Who reports on agents (`mocked_server.check`)."""

    def request(self, call: Call, path: str, body: bytes) -> None:
        """Sees each request first, and may put something into its `call`."""
        ...

    def failed(self, path: str, status: int, body: bytes) -> None:
        """Sees each error that an agent is answered with."""
        ...


class Intake:
    """See the module."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.observer: Observer | None = None

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        call = current_call.get()
        if call is None or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        if is_anthropic(path) or self.observer is not None:
            send = self._with_errors_seen(path, send)
        try:
            body = await read_body(scope, receive, max_bytes=MAX_BODY_BYTES)
        except BodyRefused as error:
            await answer_refused(send, path, error)
            return
        if body is None:
            return
        if self.observer is not None:
            self.observer.request(call, path, body)
        if (field := refused(path, body)) is not None:
            await _refuse(send, path, code="unsupported_field", message=field.message, param=field.field)
            return
        await self._serve(call, scope, servable(path, body), receive, send)

    async def _serve(self, call: Call, scope: Event, body: bytes, receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        count = next((value for name, value in headers if name == RETRY_COUNT), b"")
        if scope["path"] not in GENERATING or not count.isdigit():
            await self._app(scope, replaying(body, receive), send)
            return
        key = hashlib.blake2b(body, digest_size=16, key=scope["path"].encode()).digest()
        attempt = int(count)
        answer = call.live.answers.find(key, attempt=attempt)
        if answer is None:
            answer = Answer()
            answer.start(self._app, {**scope, "headers": _with_length(headers, body)}, body)
            call.live.answers.keep(key, answer)
        answer.attempt = attempt
        await answer.deliver(receive, send)

    def _with_errors_seen(self, path: str, send: Send) -> Send:
        """Holds back an error until its body is complete, and sends it in the dialect's form."""
        held: list[Event] = []
        parts: list[bytes] = []

        async def translate(message: Event) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                held.append(message)
            elif not held:
                await send(message)
            else:
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    await finish(held[0], b"".join(parts))

        async def finish(start: Event, body: bytes) -> None:
            if self.observer is not None:
                self.observer.failed(path, start["status"], body)
            if is_anthropic(path):
                body = as_anthropic(start["status"], body)
            await send({**start, "headers": _with_length(start["headers"], body)})
            await send({"type": "http.response.body", "body": body})

        return translate


async def _refuse(send: Send, path: str, *, code: str, message: str, param: str | None = None) -> None:
    headers = [(b"content-type", b"application/json"), (b"x-should-retry", b"false")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    body = error_body(path, status=400, message=message, code=code, param=param)
    await send({"type": "http.response.body", "body": body})


def _with_length(headers: list[tuple[bytes, bytes]], body: bytes) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name != b"content-length"] + [
        (b"content-length", str(len(body)).encode())
    ]
