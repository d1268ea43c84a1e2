"""Reads a model request's body before vLLM's HTTP layer does: bounds what is held, refuses what cannot be served, joins retries,
spells errors.

Pure ASGI, between `Attribution` (which knows the episode) and vLLM's application. Only requests of running episodes come here.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mocked_server.client_retries import Answer, TakenOver
from mocked_server.conversation.live_episodes import LiveEpisode
from mocked_server.http.dialects import (
    FAILURES,
    GENERATE,
    GENERATING,
    MODEL_ROUTES,
    MODELS,
    Failure,
    error_body,
    failure_of,
    message_of,
    models_body,
    respelled,
    spoken,
)
from mocked_server.http.request_fields import refused, servable, tools_need_a_parser
from mocked_server.http.request_limits import (
    MAX_BODY_BYTES,
    MAX_CONTAINERS,
    BodyRoom,
    RequestMemory,
    read_body,
    replaying,
    told_length,
)
from mocked_server.http.roles import Roles
from mocked_server.request_context import Call, current_call

logger = logging.getLogger(__name__)

RETRY_COUNT = b"x-stainless-retry-count"
"""Sent by the OpenAI and Anthropic clients with every request: 0, and 1, 2, ... in automatic retries."""
MAX_RETRY_DIGITS = 6
"""A count with more is none: no client retries that often."""
NO_PARSER = b"--tool-call-parser"
"""Part of vLLM's answer to a request with tools when no parser is set: an option of its own command line."""
REFUSED = frozenset(range(400, 500)) - {403}
"""Statuses that are counted; 403 follows from the end of an episode."""
MAX_REASONS = 32
MAX_REASON_CHARS = 1000
NOT_RECORDED = "of a request that is not recorded"
UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of vLLM's HTTP layer at a request that is not as it expects."""


class Observer(Protocol):
    """Receives every request, for reports on agents (`mocked_server.check.trial`)."""

    def request(self, call: Call, path: str, body: bytes) -> None:
        """Sees each request first, and may put something into its `call`."""
        ...

    def failed(self, path: str, status: int, body: bytes) -> None:
        """Sees each error that an agent is answered with."""
        ...


class Sessions(Protocol):
    """`mocked_server.live_sessions.LiveSessions`."""

    async def watch(self, call: Call, scope: Scope, body: bytes, *, receive: Receive, send: Send) -> bool: ...
    def is_private(self, value: Any) -> bool: ...


class ModelRequests:
    """See the module."""

    def __init__(self, app: ASGIApp, *, roles: Roles | None = None, sessions: Sessions | None = None) -> None:
        """`roles`: of the run; None: it has none. `sessions`: of users; None: there are none."""
        self._app = app
        self._roles = roles
        self._sessions = sessions
        self.observer: Observer | None = None
        self.refused: Counter[str] = Counter()
        """Why requests were refused -> how often; at most `MAX_REASONS`."""
        self.room = BodyRoom()
        self.count = 0
        """Requests of episodes so far."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call.get()
        if scope["path"] in MODEL_ROUTES:
            await self._list_models(scope, receive, send)
        elif call is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
        else:
            self.count += 1
            try:
                with ExitStack() as held:
                    await self._answer(call, scope, receive, send, held)
            except Failure as failure:
                await self._refuse(failure, send, scope["path"])

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send, held: ExitStack) -> None:
        """Raises Failure before anything was sent."""
        path: str = scope["path"]
        body = await self._read(call, scope, receive, held)
        if body is None:
            return
        call.num_bytes = len(body)
        if self.observer is not None:
            self.observer.request(call, path, body)
        if call.by_body is not None:
            asked = await call.apart(_object_of, body)
            chosen = None if asked is None else await call.by_body(asked)
            if isinstance(chosen, LiveEpisode):
                call.join(chosen)
            else:
                call.by_chat = chosen
        if call.live.is_watched and self._sessions is not None:
            reply = _Reply(call, send)
            if await self._sessions.watch(call, scope, body, receive=receive, send=reply.take):
                await self._end(reply, path)
                return
            call.generates = False
        if self._roles is not None:
            body = await call.apart(self._roles.settle, call, body)
            if (upstream := self._roles.upstream_of(call.role)) is not None:
                reply = _Reply(call, send)
                await upstream.answer(call, path, body, receive=receive, send=reply.take)
                await self._end(reply, path)
                return
        if (failure := await call.apart(refused, path, body)) is not None:
            raise failure
        await self._serve(call, scope, await call.apart(servable, path, body), receive, send, held)

    async def _list_models(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers which models there are, or what is known of one, in the dialect of the client."""
        parts: list[bytes] = []

        async def take(message: Message) -> None:
            parts.append(message.get("body", b""))

        inner = {**scope, "path": MODELS, "raw_path": MODELS.encode(), "path_params": {}}
        await self._app(inner, receive, take)
        served = json.loads(b"".join(parts))["data"]
        path, named = spoken(scope["path"], scope["headers"]), scope.get("path_params", {}).get("model")
        models = [model for model in served if named in (None, model["id"])]
        if not models:
            offered = ", ".join(model["id"] for model in served)
            message = f"model must be one of {offered}, got {named[:200]!r}; ask for one of these"
            await Failure(404, message, code="model_not_found", param="model").answer(send, path)
            return
        body = models_body(path, models, one=named is not None)
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _read(self, call: Call, scope: Scope, receive: Receive, held: ExitStack) -> bytes | None:
        """The body, once there is room for it; what it takes is given back when `held` ends."""
        length = told_length(scope, max_bytes=MAX_BODY_BYTES)
        memory = RequestMemory(call.live.memory, self.room)
        held.callback(memory.end)
        await memory.begin(length)
        hold = memory.hold if length is None else lambda _: None
        body = await read_body(scope, receive, max_bytes=MAX_BODY_BYTES, hold=hold, max_containers=MAX_CONTAINERS)
        memory.is_read()
        return body

    async def _serve(
        self, call: Call, scope: Scope, body: bytes, receive: Receive, send: Send, held: ExitStack
    ) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        attempt = _attempt(headers)
        if scope["path"] not in GENERATING or attempt is None:
            await self._ask(call, scope, replaying(body, receive), send)
            return
        where = repr((scope["path"], scope.get("path_params"), scope.get("query_string"), call.role.name)).encode()
        key = await call.apart(_digest, body, hashlib.blake2b(where, digest_size=16).digest())
        answer = call.live.answers.find(key, attempt=attempt)
        if answer is None:
            answer = Answer()
            # The body is held as long as it is answered, also when its client has gone.
            held.callback(call.live.answers.forget)
            ended = held.pop_all().close
            scope = {**scope, "headers": _with_length(headers, body)}
            answer.start(partial(self._ask, call), scope, body, on_ended=ended)
            call.live.answers.keep(key, answer)
        answer.attempt = attempt
        try:
            await answer.deliver(receive, send)
        except TakenOver as error:
            raise Failure(409, str(error), closes=True) from error

    async def _ask(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's application. What it fails at before it generates anything is the request: deeper than Python recurses, or of
        another shape than it took for granted. That is refused, and no failure of the server."""
        reply, path = _Reply(call, send), scope["path"]
        body, why, failure = (await receive())["body"], "", None
        try:
            await self._app(scope, replaying(body, receive), reply.take)
            why = message_of(reply.error_body) if reply.error is not None else ""
        except (RuntimeError, OSError, *FAILURES, *UNREADABLE) as error:
            # Starlette's own, when an application fails that has begun an answer: the reason is its cause.
            cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ is not None else error
            failure, why = failure_of(cause), repr(cause)
            if failure is None and not reply.can_be_text:
                if not isinstance(cause, UNREADABLE):
                    raise
                failure = self._unreadable(call, path, cause, was_served=reply.has_begun)
        if why and reply.can_be_text:
            is_hidden = not call.live.is_recorded or (self._sessions is not None and self._sessions.is_private(why))
            shown = NOT_RECORDED if is_hidden else why[:MAX_REASON_CHARS]
            logger.warning("an answer of episode %s is given as text: %s", call.live.episode_id, shown)
            call.tells_text = True
            await self._ask(call, scope, replaying(body, receive), send)
        elif reply.has_begun and failure is not None:
            await send({"type": "http.response.body", "body": failure.event(path)})
        elif (known := None if reply.has_begun else failure_of(call.failure) or failure) is not None:
            await self._refuse(known, send, path)
        else:
            await self._end(reply, path)

    def _unreadable(self, call: Call, path: str, error: BaseException, *, was_served: bool) -> Failure:
        """The application failed: at the request, if it had not begun to generate; else by itself."""
        what = f"{type(error).__name__}: {str(error)[:200]}"
        shown = call.live.is_recorded
        if was_served or call.generates or path == GENERATE:
            logger.error(
                "an answer of episode %s to %s failed", call.live.episode_id, path, exc_info=error if shown else None
            )
            return Failure(500, f"the server failed on this request ({what})", code="server_error")
        logged = what if shown else NOT_RECORDED
        logger.warning("a request of episode %s to %s was refused (%s)", call.live.episode_id, path, logged)
        return Failure(400, f"the request cannot be read ({what}); check its fields", code="invalid_request")

    def _count(self, message: str) -> None:
        if (call := current_call.get()) is not None and not call.live.is_recorded:
            message = NOT_RECORDED
        why = " ".join(message[:MAX_REASON_CHARS].split())
        self.refused[why if why in self.refused or len(self.refused) < MAX_REASONS else "other reasons"] += 1

    async def _refuse(self, failure: Failure, send: Send, path: str) -> None:
        response = failure.response(path)
        await self._tell(failure.status, response.raw_headers, bytes(response.body), send, path)

    async def _end(self, reply: _Reply, path: str) -> None:
        """The application has ended."""
        await reply.flush()
        if reply.error is not None and reply.is_whole:
            await self._tell(reply.error["status"], reply.error["headers"], reply.error_body, reply.send, path)

    async def _tell(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes, send: Send, path: str) -> None:
        """Send an error in the dialect's form, and count it."""
        if NO_PARSER in body:
            body = error_body(path, status=status, message=tools_need_a_parser(), param="tools")
        if self.observer is not None:
            self.observer.failed(path, status, body)
        if status in REFUSED:
            self._count(message_of(body))
        body = respelled(path, status, body)
        await send({"type": "http.response.start", "status": status, "headers": _with_length(headers, body)})
        await send({"type": "http.response.body", "body": body})


class _Reply:
    """What an application answers `call`, on its way. An error is held back until it is complete, and the beginning of an event
    stream until there is something of it. What is made of a `call.failure` that came before that does not pass: it may hide the
    status, or begin a stream. So what is refused before anything was generated has its status, also on a stream."""

    def __init__(self, call: Call, send: Send) -> None:
        self.send = send
        self.error: Message | None = None
        """The start of one."""
        self.error_body = b""
        self.is_whole = False
        """All of the error is here."""
        self.has_begun = False
        """Some of it has left."""
        self._call = call
        self._held: list[Message] = []
        self._is_stream = False

    @property
    def can_be_text(self) -> bool:
        """An error now would be about what the model said, which is no fault of the agent's."""
        return self._call.is_answered and not self._call.tells_text and not self.has_begun

    async def take(self, message: Message) -> None:
        """What the application says next."""
        is_start = message["type"] == "http.response.start"
        if is_start and message["status"] >= 400 and not self.has_begun:
            self.error = message
        elif self.error is not None:
            self.error_body += message.get("body", b"")
            self.is_whole = not message.get("more_body", False)
        elif self.has_begun or failure_of(self._call.failure) is None:
            if is_start:
                self._is_stream = any(
                    name == b"content-type" and b"event-stream" in value for name, value in message["headers"]
                )
            self._held.append(message)
            if not (self._is_stream and (is_start or not self._call.generates) and message.get("more_body", True)):
                await self.flush()

    async def flush(self) -> None:
        """Pass on what was held back."""
        held, self._held = self._held, []
        self.has_begun = self.has_begun or bool(held)
        for each in held:
            await self.send(each)


def _object_of(body: bytes) -> dict[str, Any] | None:
    """The fields of a body; None: it has none, which is refused where it is read for good."""
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _digest(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, key=key).digest()


def _attempt(headers: list[tuple[bytes, bytes]]) -> int | None:
    """Number of earlier attempts of this request; None when it does not say so."""
    count = next((value for name, value in headers if name == RETRY_COUNT), b"")
    return int(count) if count.isdigit() and len(count) <= MAX_RETRY_DIGITS else None


def _with_length(headers: list[tuple[bytes, bytes]], body: bytes) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name != b"content-length"] + [
        (b"content-length", str(len(body)).encode())
    ]
