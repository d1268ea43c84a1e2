"""Google's routes in front of vLLM's application: a request becomes a chat request to it, its answer becomes Google's.

Pure ASGI, behind `mocked_server.http.model_requests`, which has read and bounded the body and spells errors. Rendering,
continuation, sampling, recording and streaming are the chat route's. Invariant: a chunk is passed on when it comes; an answer that
fails ends as the dialect's streams do.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from buffers.errors import RequestRefused
from mocked_server.gemini.answers import StreamedAnswer, whole_answer
from mocked_server.gemini.chat_request import count_of, generation_of, shows_thoughts
from mocked_server.http.dialects import CHAT, GEMINI_COUNT, GEMINI_ROUTES, GEMINI_STREAM, TOKENIZE, error_event
from mocked_server.http.failures import request_refused
from mocked_server.http.request_limits import replaying
from mocked_server.request_context import current_call

JSON = b"application/json"
DATA, DONE = b"data: ", b"data: [DONE]"
NOT_PASSED_ON = frozenset({b"content-length", b"content-type"})


class GeminiRoutes:
    """`app`: vLLM's application, which gets all other paths as they come."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in GEMINI_ROUTES or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        path, model = scope["path"], str(scope["path_params"]["model"])
        body, call = (await receive())["body"], current_call.get()
        assert call is not None
        sends_events = path == GEMINI_STREAM and parse_qs(scope["query_string"].decode("latin-1")).get("alt") == ["sse"]
        answer: _Answer = _Counted(send)
        try:
            fields = await call.apart(_parsed, body)
            if path == GEMINI_COUNT:
                chat = await call.apart(partial(count_of, fields, model=model))
            else:
                chat = await call.apart(partial(generation_of, fields, model=model, streams=sends_events))
                shown = shows_thoughts(fields)
                answer = _Streamed(send, shown) if sends_events else _Whole(send, shown, in_list=path == GEMINI_STREAM)
        except RequestRefused as error:
            await request_refused(error).answer(send, path)
            return
        sent = (await call.apart(json.dumps, chat)).encode()
        route = TOKENIZE if path == GEMINI_COUNT else CHAT
        headers = [(name, value) for name, value in scope["headers"] if name not in NOT_PASSED_ON]
        headers += [(b"content-type", JSON), (b"content-length", str(len(sent)).encode())]
        inner = {
            **scope,
            "path": route,
            "raw_path": route.encode(),
            "query_string": b"",
            "path_params": {},
            "headers": headers,
        }
        await self.app(inner, replaying(sent, receive), answer.take)


class _Answer(ABC):
    """What the application sends, on its way to the client. An error passes as it is: it is spelled further out."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        """The start of an answer that is to be changed; None: nothing began, or it is an error."""

    async def take(self, message: Message) -> None:
        """What the application sends next."""
        if message["type"] == "http.response.start" and message["status"] < 400:
            self._start = message
            await self._begin(message)
        elif self._start is None:
            await self._send(message)
        else:
            await self._go_on(message.get("body", b""), more=message.get("more_body", False))

    @abstractmethod
    async def _begin(self, start: Message) -> None:
        """Status and headers of an answer that is to be changed."""

    @abstractmethod
    async def _go_on(self, part: bytes, *, more: bool) -> None:
        """The next part of the answer's body; `more`: it is not the last."""


class _Whole(_Answer):
    """An answer that is one JSON value; `in_list`: a stream that was asked for without events is a list of its chunks."""

    def __init__(self, send: Send, shows_thoughts: bool = False, *, in_list: bool = False) -> None:
        super().__init__(send)
        self._shows_thoughts = shows_thoughts
        self._in_list = in_list
        self._parts: list[bytes] = []

    async def _begin(self, start: Message) -> None:
        """Nothing: it begins when it is complete, with its length."""

    async def _go_on(self, part: bytes, *, more: bool) -> None:
        self._parts.append(part)
        if more:
            return
        assert self._start is not None
        answer = self._told(json.loads(b"".join(self._parts)))
        body = json.dumps([answer] if self._in_list else answer).encode()
        headers = [(name, value) for name, value in self._start["headers"] if name != b"content-length"]
        await self._send({**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})

    def _told(self, chat: Any) -> dict[str, Any]:
        return whole_answer(chat, shows_thoughts=self._shows_thoughts)


class _Counted(_Whole):
    """How many tokens a prompt has."""

    def _told(self, chat: Any) -> dict[str, Any]:
        return {"totalTokens": chat["count"]}


class _Streamed(_Answer):
    """A stream of events."""

    def __init__(self, send: Send, shows_thoughts: bool) -> None:
        super().__init__(send)
        self._answer = StreamedAnswer(shows_thoughts=shows_thoughts)
        self._rest = b""

    async def _begin(self, start: Message) -> None:
        await self._send(start)

    async def _go_on(self, part: bytes, *, more: bool) -> None:
        *events, self._rest = (self._rest + part).split(b"\n\n")
        told = b"".join(self._told(event) for event in events)
        if told or not more:
            await self._send({"type": "http.response.body", "body": told, "more_body": more})

    def _told(self, event: bytes) -> bytes:
        if not event.startswith(DATA) or event == DONE:
            return b""
        chunk = json.loads(event[len(DATA) :])
        if (error := chunk.get("error")) is not None:
            status = error.get("code")
            return error_event(
                GEMINI_STREAM,
                status=status if isinstance(status, int) else 500,
                message=str(error.get("message")),
                code="",
            )
        answer = self._answer.take(chunk)
        return b"" if answer is None else DATA + json.dumps(answer).encode() + b"\r\n\r\n"


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body must be JSON: {error}") from None
