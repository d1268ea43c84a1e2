"""What every request must pass before anything looks at it: which port it came in by, how large its body is, how deep.

Pure ASGI, put by `mocked_server.server` around all that it serves; `model_requests` reads the bodies of model calls by
the same rules. Invariants: a body is read only as far as it may be large; what has shown no key yet is at
most `MAX_HELD_BYTES` in all; a large body is looked at in a thread. It checks no keys: every route does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from buffers.errors import UnderstudyError
from mocked_server.http.failures import Failure
from mocked_server.request_context import LARGE_BYTES

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Most bytes of a model call, or of tasks that are added."""
MAX_EPISODE_ROUTE_BYTES = 1024 * 1024
"""Most bytes of every other request: scores are small."""
MAX_HELD_BYTES = 32 * 1024 * 1024
MAX_DEPTH = 128
"""Most nested brackets in a JSON body."""
MAX_CONTAINERS = 16_384
"""Most objects and lists in the body of a model call. pydantic and vLLM take the event loop's time for each, and its memory: up to
7 KB for one that is not as it should be."""
MAX_STRINGS = 8 * MAX_CONTAINERS
"""Most strings in it, names of fields among them."""
MAX_VALUES = 2**21
"""Most values in it: a prompt may be token ids."""
_MARKS = bytes.maketrans(b"{}", b"[]")
_NO_MARKS = bytes(set(range(256)) - set(b'"[]{},'))


class BodyRefused(UnderstudyError):
    """A body that is too large or too deep, or came at a time with too many of them."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        retry_after_s = 1 if status in (429, 503) else None
        self.failure = Failure(status=status, message=message, retry_after_s=retry_after_s, closes=True)


class PortRouter:
    """`admin_port`: of the listening socket on which `admin` is served; all others serve `public`."""

    def __init__(self, public: ASGIApp, *, admin: ASGIApp, admin_port: int) -> None:
        self._public = public
        self._admin = admin
        self._admin_port = admin_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Of the socket that took the connection, not of a header: it cannot be forged.
        app = self._admin if scope["server"][1] == self._admin_port else self._public
        await app(scope, receive, send)


class BodyLimit:
    """Reads bodies for `app`, which is not called with one that is refused."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            held += size
            self._held += size
            if self._held > MAX_HELD_BYTES:
                raise BodyRefused(503, "too many large requests at once; send it again")

        try:
            body = await read_body(scope, receive, max_bytes=self._max_bytes, hold=hold)
            if body is not None:
                await self._app(scope, replaying(body, receive), send)
        except BodyRefused as refused:
            await refused.failure.answer(send, scope["path"])
        finally:
            self._held -= held


async def read_body(
    scope: Scope,
    receive: Receive,
    *,
    max_bytes: int,
    hold: Callable[[int], None] = lambda _: None,
    max_containers: int | None = None,
) -> bytes | None:
    """The whole body; None when the client went away before it was sent. Raises BodyRefused.

    `hold` is called with the size of each part before it is kept; `max_containers`: as MAX_CONTAINERS, of who is not trusted."""
    told_length(scope, max_bytes=max_bytes)
    parts, size = [], 0
    more = True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            return None
        part = event.get("body", b"")
        hold(len(part))
        parts.append(part)
        more = event.get("more_body", False)
        if (size := size + len(part)) > max_bytes:
            raise _too_large(size, max_bytes=max_bytes)
    body = b"".join(parts)
    if size <= LARGE_BYTES:
        check_shape(body, max_containers=max_containers)
    else:
        await asyncio.to_thread(check_shape, body, max_containers=max_containers)
    return body


def told_length(scope: Scope, *, max_bytes: int) -> int | None:
    """How long the head says that the body is; None when it comes in chunks. Raises BodyRefused."""
    told = {name: value for name, value in scope["headers"] if name in (b"content-length", b"transfer-encoding")}
    if b"transfer-encoding" in told:
        return None
    length = int(told.get(b"content-length", b"0")[:20])
    if length > max_bytes:
        raise _too_large(length, max_bytes=max_bytes)
    return length


def replaying(body: bytes, receive: Receive) -> Receive:
    """`receive` once more from the beginning."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def check_shape(body: bytes, *, max_containers: int | None = None) -> None:
    """Raises BodyRefused for JSON that is nested too deep, or, with `max_containers`, has more values than are read in a moment."""
    few = max_containers is None or body.count(b",") <= MAX_CONTAINERS
    if few and body.count(b"{") + body.count(b"[") <= MAX_DEPTH:
        return
    shape = shape_of(body)
    if shape.depth > MAX_DEPTH:
        told = f"JSON must be nested at most {MAX_DEPTH} deep, got {shape.depth} or more; send it flatter"
        raise BodyRefused(400, told)
    if max_containers is not None:
        limits = {"objects and lists": max_containers, "strings": MAX_STRINGS, "values": MAX_VALUES}
        counts = (shape.num_containers, shape.num_strings, shape.num_values)
        for (what, limit), number in zip(limits.items(), counts, strict=True):
            if number > limit:
                raise BodyRefused(413, f"a body may have {limit:,} {what}, got {number:,}; send less")


class Shape(NamedTuple):
    """What a JSON text has to be read."""

    num_containers: int
    """Objects and lists."""
    num_strings: int
    """Names of fields among them."""
    num_values: int
    """Members of them all, and they themselves."""
    depth: int
    """Most of them within each other, exact up to MAX_DEPTH."""


def shape_of(text: bytes) -> Shape:
    """Exact for valid JSON; a few passes over the bytes, none of which takes long. With more than MAX_STRINGS strings, which are
    too many already, the rest is not counted."""
    # Without what is escaped a quote begins or ends a string.
    marks = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_MARKS, delete=_NO_MARKS)
    if (num_strings := marks.count(b'"') // 2) > MAX_STRINGS:
        return Shape(0, num_strings, 0, 0)
    outside = b"".join(marks.split(b'"')[::2])
    brackets = outside.translate(None, delete=b",")
    num_containers, depth = brackets.count(b"["), 0
    while depth <= MAX_DEPTH and b"[]" in brackets:
        brackets, depth = brackets.replace(b"[]", b""), depth + 1
    return Shape(num_containers, num_strings, outside.count(b",") + num_containers, depth + brackets.count(b"["))


def _too_large(size: int, *, max_bytes: int) -> BodyRefused:
    return BodyRefused(413, f"a body may have {max_bytes} bytes, got {size} or more; send less")
