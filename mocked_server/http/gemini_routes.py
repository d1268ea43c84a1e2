"""Google's routes in front of vLLM's application: a request becomes a chat request to it, its answer becomes Google's.

Pure ASGI, behind `mocked_server.http.model_requests`, which has read and bounded the body and spells errors. Rendering,
continuation, sampling, recording and streaming are the chat route's. Invariant: a chunk is passed on when it comes; an answer that
fails ends as the dialect's streams do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from buffers.errors import RequestRefused
from mocked_server.conversation.chat_history import arguments_of
from mocked_server.http.dialects import CHAT, GEMINI_COUNT, GEMINI_ROUTES, GEMINI_STREAM, TOKENIZE, error_event
from mocked_server.http.gemini_requests import count_of, generation_of, shows_thoughts
from mocked_server.http.request_limits import replaying
from mocked_server.request_context import current_call

JSON = b"application/json"
DATA, DONE = b"data: ", b"data: [DONE]"
NOT_PASSED_ON = frozenset({b"content-length", b"content-type"})


# Answers of the chat dialect in Google's: whole ones, and streams of events. A function call is sent when it is complete, as
# Google's clients expect; text and thoughts as they come. The last chunk has the finish reasons and what was used. Nothing is
# decided here: ids, texts and reasons are the chat route's.

REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS"}

Answer = dict[str, Any]


def whole_answer(chat: Mapping[str, Any], *, shows_thoughts: bool) -> Answer:
    """The answer of `generateContent` to what the chat route answered."""
    candidates = []
    for choice in chat["choices"]:
        message = choice["message"]
        parts = _said(message, shows_thoughts=shows_thoughts)
        for call in message.get("tool_calls") or ():
            parts.append(_called(call.get("id"), call["function"]["name"], call["function"]["arguments"]))
        candidates.append(_candidate(choice["index"], parts, reason=choice.get("finish_reason")))
    return _response(chat, candidates, usage=chat.get("usage"))


class StreamedAnswer:
    """The chunks of one stream. `take` each chunk of the chat route's, in order."""

    def __init__(self, *, shows_thoughts: bool) -> None:
        self._shows_thoughts = shows_thoughts
        self._reasons: dict[int, str | None] = {}
        """Candidate -> why it ended; None: it has not yet."""
        self._calls: dict[tuple[int, int], tuple[str | None, str, str]] = {}
        """(candidate, number of the call) -> (id, name, arguments) of which parts have come."""

    def take(self, chunk: Mapping[str, Any]) -> Answer | None:
        """Chunk for the client; None: nothing yet."""
        candidates, usage = [], None
        for choice in chunk.get("choices") or ():
            index, delta = choice["index"], choice.get("delta") or {}
            self._reasons[index] = choice.get("finish_reason") or self._reasons.get(index)
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                identity, name, arguments = self._calls.get((index, call["index"]), (None, "", ""))
                self._calls[index, call["index"]] = (
                    call.get("id") or identity,
                    name + (function.get("name") or ""),
                    arguments + (function.get("arguments") or ""),
                )
            if parts := _said(delta, shows_thoughts=self._shows_thoughts):
                candidates.append(_candidate(index, parts, reason=None))
        if not chunk.get("choices") and (usage := chunk.get("usage")) is not None:
            for index, reason in sorted(self._reasons.items()):
                calls = [_called(*call) for (candidate, _), call in self._calls.items() if candidate == index]
                candidates.append(_candidate(index, calls, reason=reason))
        return _response(chunk, candidates, usage=usage) if candidates else None


def _called(identity: str | None, name: str, arguments: str) -> Answer:
    call: Answer = {"name": name, "args": arguments_of(arguments)}
    return {"functionCall": call if identity is None else {"id": identity, **call}}


def _said(message: Mapping[str, Any], *, shows_thoughts: bool) -> list[Answer]:
    parts: list[Answer] = []
    if shows_thoughts and (thought := message.get("reasoning") or message.get("reasoning_content")):
        parts.append({"text": thought, "thought": True})
    if text := message.get("content"):
        parts.append({"text": text})
    return parts


def _candidate(index: int, parts: list[Answer], *, reason: str | None) -> Answer:
    candidate: Answer = {"content": {"role": "model", "parts": parts or [{"text": ""}]}, "index": index}
    return candidate if reason is None else {**candidate, "finishReason": REASONS.get(reason, "OTHER")}


def _response(chat: Mapping[str, Any], candidates: list[Answer], *, usage: Mapping[str, Any] | None) -> Answer:
    answer: Answer = {"candidates": candidates, "modelVersion": chat.get("model"), "responseId": chat.get("id")}
    if usage is not None:
        answer["usageMetadata"] = {
            "promptTokenCount": usage.get("prompt_tokens", 0),
            "candidatesTokenCount": usage.get("completion_tokens") or 0,
            "totalTokenCount": usage.get("total_tokens", 0),
        }
    return answer


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
        fields = await call.apart(_parsed, body)
        if path == GEMINI_COUNT:
            chat = await call.apart(partial(count_of, fields, model=model))
            tell: Callable[[bytes], bytes] = _count
        else:
            chat = await call.apart(partial(generation_of, fields, model=model, streams=sends_events))
            shown = shows_thoughts(fields)
            tell = partial(_whole, shows_thoughts=shown, in_list=path == GEMINI_STREAM)
            if sends_events:
                tell = partial(_event, answer=StreamedAnswer(shows_thoughts=shown))
        answer = _Answer(send, tell, is_stream=sends_events)
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


@dataclass(slots=True)
class _Answer:
    """What the application sends, on its way to the client. `tell`: the client's words for a whole body, or, where it `is_stream`,
    for an event. An error passes as it is: it is spelled further out."""

    send: Send
    tell: Callable[[bytes], bytes]
    is_stream: bool
    start: Message | None = None
    """The start of an answer that is to be changed; None: nothing began, or it is an error."""
    rest: bytes = b""
    """Bytes that have come and were not told yet."""

    async def take(self, message: Message) -> None:
        """What the application sends next."""
        if message["type"] == "http.response.start" and message["status"] < 400:
            self.start = message
            if self.is_stream:
                await self.send(message)
            return
        if self.start is None:
            return await self.send(message)
        self.rest += message.get("body", b"")
        more = message.get("more_body", False)
        if self.is_stream:
            *events, self.rest = self.rest.split(b"\n\n")
            told = b"".join(map(self.tell, events))
            if told or not more:
                await self.send({"type": "http.response.body", "body": told, "more_body": more})
        elif not more:  # it begins when it is complete, with its length
            body = self.tell(self.rest)
            headers = [(name, value) for name, value in self.start["headers"] if name != b"content-length"]
            await self.send({**self.start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
            await self.send({"type": "http.response.body", "body": body})


def _count(body: bytes) -> bytes:
    """Number of tokens of a prompt."""
    return json.dumps({"totalTokens": json.loads(body)["count"]}).encode()


def _whole(body: bytes, *, shows_thoughts: bool, in_list: bool) -> bytes:
    """`in_list`: a stream that was asked for without events is a list of its chunks."""
    answer = whole_answer(json.loads(body), shows_thoughts=shows_thoughts)
    return json.dumps([answer] if in_list else answer).encode()


def _event(event: bytes, *, answer: StreamedAnswer) -> bytes:
    if not event.startswith(DATA) or event == DONE:
        return b""
    chunk = json.loads(event[len(DATA) :])
    if (error := chunk.get("error")) is not None:
        status = error.get("code")
        status = status if isinstance(status, int) else 500
        return error_event(GEMINI_STREAM, status=status, message=str(error.get("message")), code="")
    translated = answer.take(chunk)
    return b"" if translated is None else DATA + json.dumps(translated).encode() + b"\r\n\r\n"


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body must be JSON: {error}") from None
