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
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from buffers.errors import RequestRefused
from mocked_server.client_retries import Answer, TakenOver
from mocked_server.http.dialects import (
    GENERATE,
    GENERATING,
    MODEL_ROUTES,
    MODELS,
    error_body,
    message_of,
    models_body,
    respelled,
    spoken,
)
from mocked_server.http.failures import Failure, StreamStart, failure_of
from mocked_server.http.request_fields import refused, servable
from mocked_server.http.request_limits import (
    MAX_BODY_BYTES,
    MAX_CONTAINERS,
    BodyRefused,
    read_body,
    replaying,
    told_length,
)
from mocked_server.http.request_memory import BodyRoom, RequestMemory
from mocked_server.parser_names import tools_need_a_parser
from mocked_server.request_context import Call, current_call
from mocked_server.roles import Roles

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
UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What vLLM's HTTP layer raises at a request that is not as it expects."""


class Observer(Protocol):
    """Receives every request, for reports on agents (`mocked_server.check.trial`)."""

    def request(self, call: Call, path: str, body: bytes) -> None:
        """Sees each request first, and may put something into its `call`."""
        ...

    def failed(self, path: str, status: int, body: bytes) -> None:
        """Sees each error that an agent is answered with."""
        ...


class ModelRequests:
    """See the module."""

    def __init__(self, app: ASGIApp, *, roles: Roles | None = None) -> None:
        """`roles`: of the run; None: it has none."""
        self._app = app
        self._roles = roles
        self.observer: Observer | None = None
        self.refused: Counter[str] = Counter()
        """Why requests were refused -> how often; at most `MAX_REASONS`."""
        self.room = BodyRoom()
        self.count = 0
        """Requests of episodes so far."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call.get()
        if scope["type"] == "http" and scope["path"] in MODEL_ROUTES:
            await self._list_models(scope, receive, send)
            return
        if call is None or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self.count += 1
        path: str = scope["path"]
        send = self._with_errors_seen(path, send)
        with ExitStack() as held:
            try:
                body = await self._read(call, scope, receive, held)
            except BodyRefused as error:
                await error.failure.answer(send, path)
                return
            if body is None:
                return
            call.num_bytes = len(body)
            if self.observer is not None:
                self.observer.request(call, path, body)
            if self._roles is not None:
                try:
                    body = await call.apart(self._roles.settle, call, body)
                except RequestRefused as error:
                    await _no_model(str(error)).answer(send, path)
                    return
                if (elsewhere := self._roles.elsewhere(call.role)) is not None:
                    await elsewhere.answer(call, path, body, send=send)
                    return
            if (field := await call.apart(refused, path, body)) is not None:
                failure = Failure(status=400, code="unsupported_field", message=field.message, param=field.field)
                await failure.answer(send, path)
                return
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
            await _no_model(message).answer(send, path)
            return
        body = models_body(path, models, one=named is not None)
        headers = _with_length([(b"content-type", b"application/json")], body)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

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
            await Failure(status=409, message=str(error), closes=True).answer(send, scope["path"])

    async def _ask(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's application. What it fails at before it generates anything is the request: deeper than Python recurses, or of
        another shape than it took for granted. That is refused, and no failure of the server."""
        failure: list[Message] = []
        answer = StreamStart(call, path=scope["path"], send=send)
        body = (await receive())["body"]

        async def unless_it_fails(message: Message) -> None:
            status = message["status"] if message["type"] == "http.response.start" else 0
            is_unknown = call.failure is None and not call.generates and scope["path"] != GENERATE
            if failure or (status == 500 and is_unknown) or (status >= 400 and self._can_be_text(call, answer)):
                failure.append(message)
            else:
                await answer.send(message)

        try:
            await self._app(scope, replaying(body, receive), unless_it_fails)
        except (RuntimeError, OSError, *UNREADABLE) as error:
            # Starlette's own, when an application fails that has begun an answer: the reason is its cause.
            cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ is not None else error
            known = failure_of(cause)
            if not self._can_be_text(call, answer):
                if known is None and not isinstance(cause, UNREADABLE):
                    raise
                await answer.fail(known or self._unreadable(call, scope["path"], cause, was_served=answer.has_begun))
                return
            failure.append({"body": repr(cause).encode()})
        if failure and self._can_be_text(call, answer):
            why = message_of(failure[-1].get("body", b""))[:MAX_REASON_CHARS]
            logger.warning("an answer of episode %s is given as text: %s", call.live.episode_id, why)
            call.tells_text = True
            await self._ask(call, scope, replaying(body, receive), send)
            return
        for each in failure:
            await send(each)

    def _can_be_text(self, call: Call, answer: StreamStart) -> bool:
        """An error now would be about what the model said, which is no fault of the agent's."""
        return call.is_answered and not call.tells_text and not answer.has_begun

    def _unreadable(self, call: Call, path: str, error: BaseException, *, was_served: bool) -> Failure:
        """The application failed: at the request, if it had not begun to generate; else by itself."""
        what = f"{type(error).__name__}: {str(error)[:200]}"
        if was_served or call.generates or path == GENERATE:
            logger.error("an answer of episode %s to %s failed", call.live.episode_id, path, exc_info=error)
            return Failure(status=500, code="server_error", message=f"the server failed on this request ({what})")
        logger.warning("a request of episode %s to %s was refused (%s)", call.live.episode_id, path, what)
        return Failure(
            status=400, code="invalid_request", message=f"the request cannot be read ({what}); check its fields"
        )

    def _count(self, message: str) -> None:
        why = " ".join(message[:MAX_REASON_CHARS].split())
        self.refused[why if why in self.refused or len(self.refused) < MAX_REASONS else "other reasons"] += 1

    def _with_errors_seen(self, path: str, send: Send) -> Send:
        """Holds back an error until its body is complete, and sends it in the dialect's form."""
        held: list[Message] = []
        parts: list[bytes] = []

        async def translate(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                held.append(message)
            elif not held:
                await send(message)
            else:
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    await finish(held[0], b"".join(parts))

        async def finish(start: Message, body: bytes) -> None:
            if NO_PARSER in body:
                body = error_body(path, status=start["status"], message=tools_need_a_parser(), param="tools")
            if self.observer is not None:
                self.observer.failed(path, start["status"], body)
            if start["status"] in REFUSED:
                self._count(message_of(body))
            body = respelled(path, start["status"], body)
            await send({**start, "headers": _with_length(start["headers"], body)})
            await send({"type": "http.response.body", "body": body})

        return translate


def _digest(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, key=key).digest()


def _attempt(headers: list[tuple[bytes, bytes]]) -> int | None:
    """How often the client sent this request before; None when it does not say so."""
    count = next((value for name, value in headers if name == RETRY_COUNT), b"")
    return int(count) if count.isdigit() and len(count) <= MAX_RETRY_DIGITS else None


def _no_model(message: str) -> Failure:
    return Failure(status=404, code="model_not_found", message=message, param="model")


def _with_length(headers: list[tuple[bytes, bytes]], body: bytes) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name != b"content-length"] + [
        (b"content-length", str(len(body)).encode())
    ]
