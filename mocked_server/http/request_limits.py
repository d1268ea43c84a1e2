"""What every request must pass before anything looks at it: which port it came in by, how large its body is, how deep.

Pure ASGI, put by `mocked_server.server` around all that it serves; `model_requests` reads the bodies of model calls by
the same rules. Invariants: a body is read only as far as it may be large; what has shown no key yet is at
most `MAX_HELD_BYTES` in all; a large body is looked at in a thread. It checks no keys: every route does.

Requests to the model API are counted by `RequestMemory`, from before their body is read until their answer has ended: a body is
not read before there is room for it, and an episode holds at most `MAX_EPISODE_BYTES` of bodies in `MAX_EPISODE_REQUESTS` requests.
Answers that are kept for retries bound themselves (`client_retries`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mocked_server.conversation.live_episodes import EpisodeMemory
from mocked_server.http.dialects import Failure
from mocked_server.request_context import LARGE_BYTES

T = TypeVar("T")
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


def body_refused(status: int, message: str) -> Failure:
    """A body that is too large or too deep, or came at a time with too many of them. The rest of it is not read."""
    return Failure(status, message, retry_after_s=1 if status in (429, 503) else None, closes=True)


@dataclass(frozen=True, slots=True)
class PortRouter:
    """Serves `admin` on the listening socket with `admin_port`, and `public` on all others."""

    public: ASGIApp
    admin: ASGIApp
    admin_port: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Of the socket that took the connection, not of a header: it cannot be forged.
        app = self.admin if scope["server"][1] == self.admin_port else self.public
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
                raise body_refused(503, "too many large requests at once; send it again")

        try:
            body = await read_body(scope, receive, max_bytes=self._max_bytes, hold=hold)
            if body is not None:
                await self._app(scope, replaying(body, receive), send)
        except Failure as failure:
            await failure.answer(send, scope["path"])
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
    """The whole body; None when the client went away before it was sent. Raises Failure.

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
    """Length of the body by the head; None when it comes in chunks. Raises Failure."""
    headers = {name: value for name, value in scope["headers"] if name in (b"content-length", b"transfer-encoding")}
    if b"transfer-encoding" in headers:
        return None
    length = int(headers.get(b"content-length", b"0")[:20])
    if length > max_bytes:
        raise _too_large(length, max_bytes=max_bytes)
    return length


def replaying(body: bytes, receive: Receive) -> Receive:
    """`receive` once more from the beginning."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], *, read: asyncio.Event | None = None) -> T | None:
    """The outcome of `work`; None when the client hangs up before: then it is cancelled, as nobody would get it. `read`: set once
    the work has read the body; None: it is read already."""

    async def hung_up() -> None:
        if read is not None:
            await read.wait()
        while (await receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.wait({working, gone})
    return None if working.cancelled() else working.result()


def check_shape(body: bytes, *, max_containers: int | None = None) -> None:
    """Raises Failure for JSON that is nested too deep, or, with `max_containers`, has more values than are read in a moment."""
    few = max_containers is None or body.count(b",") <= MAX_CONTAINERS
    if few and body.count(b"{") + body.count(b"[") <= MAX_DEPTH:
        return
    shape = shape_of(body)
    if shape.depth > MAX_DEPTH:
        message = f"JSON must be nested at most {MAX_DEPTH} deep, got {shape.depth} or more; send it flatter"
        raise body_refused(400, message)
    if max_containers is not None:
        limits = {"objects and lists": max_containers, "strings": MAX_STRINGS, "values": MAX_VALUES}
        counts = (shape.num_containers, shape.num_strings, shape.num_values)
        for (what, limit), number in zip(limits.items(), counts, strict=True):
            if number > limit:
                raise body_refused(413, f"a body may have {limit:,} {what}, got {number:,}; send less")


class Shape(NamedTuple):
    """Counts of a JSON text."""

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


def _too_large(size: int, *, max_bytes: int) -> Failure:
    return body_refused(413, f"a body may have {max_bytes} bytes, got {size} or more; send less")


MAX_EPISODE_BYTES = 32 * 1024 * 1024
"""Most bytes of one episode's bodies that are being read or answered."""
MAX_EPISODE_REQUESTS = 256
"""Most requests of one episode that are being read or answered."""
MAX_BODIES_BYTES = 512 * 1024 * 1024
"""Most bytes of the bodies of all episodes. What would exceed it waits, unread."""
SMALL_BYTES = 64 * 1024
"""A body that is no larger does not wait: its connection may have it in its buffer already."""


class BodyRoom:
    """The room for the bodies of all episodes. One event loop."""

    def __init__(self, max_bytes: int = MAX_BODIES_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Taken now."""
        self._waiting: list[tuple[EpisodeMemory, int, asyncio.Future[None]]] = []

    @property
    def num_waiting(self) -> int:
        """Bodies that wait for room."""
        return len(self._waiting)

    async def take(self, size: int, *, episode: EpisodeMemory) -> None:
        """Returns once there is room for so many bytes, and they are taken."""
        if not self._waiting and self._fits(size):
            self.num_bytes += size
            return
        room = asyncio.get_running_loop().create_future()
        self._waiting.append((episode, size, room))
        try:
            await room
        except asyncio.CancelledError:
            if room.done() and not room.cancelled():
                self.give(size)
            else:
                self._waiting = [each for each in self._waiting if each[2] is not room]
            raise

    def give(self, size: int) -> None:
        """Release `size` bytes, and admit waiting requests: first the one whose episode holds least, so that none gets before
        others by asking for more."""
        self.num_bytes -= size
        self._waiting = [each for each in self._waiting if not each[2].done()]
        while self._waiting:
            at = min(range(len(self._waiting)), key=lambda k: self._waiting[k][0].in_flight_bytes)
            _, wanted, room = self._waiting[at]
            if not self._fits(wanted):
                return
            del self._waiting[at]
            self.num_bytes += wanted
            room.set_result(None)

    def _fits(self, size: int) -> bool:
        return self.num_bytes == 0 or self.num_bytes + size <= self._max_bytes


@dataclass(slots=True, eq=False)
class RequestMemory:
    """Memory of one request. `begin` it before its body is read, `end` it when its answer has ended."""

    _episode: EpisodeMemory
    _room: BodyRoom
    _num_bytes: int = 0
    _taken: int = 0
    _ended: bool = False

    async def begin(self, length: int | None) -> None:
        """Waits until there is room for a body of this length; None: not told beforehand. Raises Failure when the episode
        holds too much already."""
        if self._episode.in_flight_requests >= MAX_EPISODE_REQUESTS:
            self._ended = True
            raise body_refused(
                429,
                f"an episode may have {MAX_EPISODE_REQUESTS} requests under way at once; wait until one is answered",
            )
        self._episode.in_flight_requests += 1
        if length is not None:
            self.hold(length)
        wanted = MAX_BODY_BYTES if length is None else length
        if wanted > SMALL_BYTES:
            await self._room.take(wanted, episode=self._episode)
            self._taken = wanted

    def hold(self, size: int) -> None:
        """So many bytes more of its body. Raises Failure when its episode holds too much then."""
        self._num_bytes += size
        self._episode.in_flight_bytes += size
        if self._episode.in_flight_bytes > MAX_EPISODE_BYTES:
            raise body_refused(
                413,
                f"an episode may have {MAX_EPISODE_BYTES} bytes of requests under way at once, got "
                f"{self._episode.in_flight_bytes}; wait until one is answered, or send less",
            )

    def is_read(self) -> None:
        """The body is here: what was kept free for it and is not needed is free again."""
        if (excess := self._taken - self._num_bytes) > 0:
            self._taken -= excess
            self._room.give(excess)

    def end(self) -> None:
        """Nothing of it is held any more; a second time nothing happens."""
        if self._ended:
            return
        self._ended = True
        self._episode.in_flight_requests -= 1
        self._episode.in_flight_bytes -= self._num_bytes
        if self._taken:
            self._room.give(self._taken)
