"""Passes requests on to another server process of the run, and its answers back, as they come.

Pure ASGI. `mocked_server.processes` has one for each process that owns episodes, and for the run's own, which has the tasks and the
scores. Invariants: nothing is held back, neither of a body nor of a streamed answer; a client that hangs up ends its request at the
owner too; an answer that breaks off there breaks off here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import httpx
from starlette.types import Receive, Scope, Send

from mocked_server.http.dialects import RETRY_AFTER_S, Failure

logger = logging.getLogger(__name__)

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip
"""Headers of one connection (RFC 9110, section 7.6.1)."""
MAX_IDLE = 64
"""Connections that are kept for the next request."""
_UNAVAILABLE = "the server process of this episode does not answer; send the request again"


class Forward:
    """Passes requests on to `url`. `headers`: added to each, in place of those of the same name."""

    def __init__(self, url: str, *, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._url = httpx.URL(url)
        self._headers = list(headers)
        self._not_sent = HOP_BY_HOP | {b"host"} | {name for name, _ in headers}
        self._transport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=MAX_IDLE)
        )
        self.count = 0
        """Requests passed on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # there are no others
            await send({"type": "websocket.close"})
            return
        self.count += 1
        sent = asyncio.Event()
        relaying = asyncio.create_task(self._relay(scope, _body(receive, sent), send))
        gone = asyncio.create_task(_hung_up(receive, sent))
        try:
            await asyncio.wait({relaying, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            relaying.cancel()
            await asyncio.wait({relaying, gone})
        if not relaying.cancelled():
            relaying.result()

    async def close(self) -> None:
        """End the connections that are kept."""
        await self._transport.aclose()

    async def _relay(self, scope: Scope, body: AsyncGenerator[bytes, None], send: Send) -> None:
        try:
            response = await self._transport.handle_async_request(self._request(scope, body))
        except httpx.TransportError as error:
            logger.warning("a request could not be passed on to %s: %r", self._url, error)
            failure = Failure(503, _UNAVAILABLE, code="server_unavailable", retry_after_s=RETRY_AFTER_S)
            await failure.answer(send, scope["path"])
            return
        finally:
            await body.aclose()
        try:
            headers = [
                (name.lower(), value)
                for name, value in response.headers.raw
                if name.lower() not in HOP_BY_HOP and name.lower() not in (b"date", b"server")  # uvicorn's own
            ]
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            assert isinstance(response.stream, httpx.AsyncByteStream)
            async for part in response.stream:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()

    def _request(self, scope: Scope, body: AsyncIterator[bytes]) -> httpx.Request:
        query: bytes = scope["query_string"]
        target = scope.get("raw_path") or scope["path"].encode()
        url = self._url.copy_with(raw_path=target + (b"?" + query if query else b""))
        headers = [(name, value) for name, value in scope["headers"] if name not in self._not_sent]
        named = {name for name, _ in scope["headers"]}
        has_body = b"content-length" in named or b"transfer-encoding" in named
        host = (b"host", self._url.netloc)
        return httpx.Request(
            scope["method"], url, headers=[host, *headers, *self._headers], content=body if has_body else None
        )


async def _body(receive: Receive, sent: asyncio.Event) -> AsyncGenerator[bytes, None]:
    """The body as it comes; `sent` once all of it was taken."""
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            if part := message.get("body", b""):
                yield part
            if not message.get("more_body", False):
                return
    finally:
        sent.set()


async def _hung_up(receive: Receive, sent: asyncio.Event) -> None:
    """Returns when the client has gone. It reads nothing before the body was taken."""
    await sent.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
