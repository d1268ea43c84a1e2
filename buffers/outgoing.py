"""`Outgoing`: the HTTP client with which this project asks servers of others, and the bounds of what they may answer.

Used wherever a run goes out over HTTP; SECURITY.md has `BOUNDS` as a table. Invariants, whatever a server says: no more than so
many bytes of it are kept, and none is unpacked, as no compression was asked for; an answer ends in so many seconds, however slowly
it comes; no other server is asked in its place, with a key or without; what it wants to be remembered (cookies) is forgotten; its
status is one that HTTP has. What breaks a bound raises AnswerRefused, a time-out httpx2's ReadTimeout: both are its HTTPErrors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx2

CONNECT_S = 10.0
IDENTITY = "identity"
MIB = 1 << 20


class AnswerRefused(httpx2.RequestError, httpx2.StreamError):
    """What a server answered breaks one of its bounds. As a StreamError the `mcp` package makes it an error of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one kind of server may answer."""

    server: str
    """What it is, in words."""
    max_bytes: int
    """Most bytes of an answer."""
    total_s: float | None = None
    """Seconds for an answer in all; None: who asks sets a deadline of its own."""
    silence_s: float | None = None
    """Seconds between two parts of it."""
    is_of_events: bool = False
    """A stream may be longer: `max_bytes` is of each of its lines."""
    is_read_by_a_package: bool = False
    """Which wants its answers as they begin: a compressed one is refused when its body is read, and a redirect is passed on, as the
    package follows those within the server's own origin only."""


ROLE = Bounds(server="a role's `url`", max_bytes=64 * MIB, total_s=3600.0, silence_s=600.0)
SCORER = Bounds(server="a scorer by URL", max_bytes=16 * MIB, total_s=30.0)
MCP = Bounds(server="an MCP server", max_bytes=4 * MIB, is_read_by_a_package=True)
OPENENV = Bounds(server="an OpenEnv server", max_bytes=16 * MIB)
ENGINE = Bounds(server="an engine that runs elsewhere", max_bytes=64 * MIB, is_of_events=True)
RUN = Bounds(server="the run's own server, asked by its workers and environments", max_bytes=64 * MIB)
BOUNDS = (ROLE, SCORER, MCP, OPENENV, ENGINE, RUN)


class Outgoing(httpx2.AsyncClient):
    """httpx2's client within `bounds`; `options` are httpx2's."""

    def __init__(self, bounds: Bounds, **options: Any) -> None:
        options.setdefault("timeout", httpx2.Timeout(bounds.silence_s, connect=CONNECT_S))
        super().__init__(cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())), follow_redirects=False, **options)
        self.headers["Accept-Encoding"] = IDENTITY
        self._bounds = bounds

    async def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """Sends as httpx2 does. Raises AnswerRefused, also while the answer is read."""
        options["follow_redirects"] = False
        total_s = self._bounds.total_s
        clock = _Clock(None if total_s is None else asyncio.get_running_loop().time() + total_s, request)
        response: httpx2.Response = await clock.limit(super().send(request, stream=True, **options))
        try:
            self._check(response)
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Bounded(response.stream, self._bounds, clock, response)
            if not stream:
                await response.aread()
        except (httpx2.HTTPError, asyncio.CancelledError):
            await response.aclose()
            raise
        return response

    def _check(self, response: httpx2.Response) -> None:
        status, request, server = response.status_code, response.request, self._bounds.server
        if not 200 <= status < 600:
            raise AnswerRefused(f"{server} must answer with a status of HTTP, got {status}", request=request)
        if 300 <= status < 400 and not self._bounds.is_read_by_a_package:
            elsewhere = response.headers.get("location", "")
            raise AnswerRefused(
                f"{server} must answer itself, got a redirect ({status}) to {elsewhere!r:.200}; name that URL instead",
                request=request,
            )
        if not self._bounds.is_read_by_a_package:
            _check_coding(response, server)


def _check_coding(response: httpx2.Response, server: str) -> None:
    coding = response.headers.get("content-encoding", IDENTITY)
    if coding.lower() != IDENTITY:
        told = f"the answer of {server} must not be compressed, got {coding!r:.40}"
        raise AnswerRefused(told, request=response.request)


@dataclass(slots=True)
class _Clock:
    """The time that is left for an answer."""

    until: float | None
    request: httpx2.Request

    async def limit(self, work: Any) -> Any:
        try:
            async with asyncio.timeout_at(self.until):
                return await work
        except TimeoutError as error:
            raise httpx2.ReadTimeout("the answer took too long in all", request=self.request) from error


class _Bounded(httpx2.AsyncByteStream):
    def __init__(
        self, stream: httpx2.AsyncByteStream, bounds: Bounds, clock: _Clock, response: httpx2.Response
    ) -> None:
        self._stream = stream
        self._response = response
        self._bounds = bounds
        self._clock = clock

    async def __aiter__(self) -> AsyncIterator[bytes]:
        _check_coding(self._response, self._bounds.server)
        size, parts, limit = 0, aiter(self._stream), self._bounds.max_bytes
        while (part := await self._clock.limit(anext(parts, None))) is not None:
            line_end = part.rfind(b"\n") if self._bounds.is_of_events else -1
            size = len(part) - line_end - 1 if line_end >= 0 else size + len(part)
            if size > limit:
                what = "a line" if self._bounds.is_of_events else "an answer"
                raise AnswerRefused(
                    f"{what} of {self._bounds.server} may have {limit} bytes, got more", request=self._clock.request
                )
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
