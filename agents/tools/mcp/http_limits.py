"""What an MCP server may answer over HTTP: so many bytes, and nothing compressed.

Used by `agents.tools.mcp.session` as a hook of its HTTP client, before a body is read. Invariant: more than `MAX_BODY_BYTES` of
one answer, be it a stream of events, raise StreamError, which the `mcp` package makes an error of the call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2

MAX_BODY_BYTES = 4 << 20
HEADERS = {"Accept-Encoding": "identity"}
"""Headers of each request: the size of a compressed body is not known before it is read."""


async def bound(response: httpx2.Response) -> None:
    """Let the response's body end with an error where it becomes too long; a compressed one at once."""
    body = response.stream
    assert isinstance(body, httpx2.AsyncByteStream)
    response.stream = _Bounded(body, coding=response.headers.get("content-encoding", "identity"))


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, *, coding: str) -> None:
        self._stream = stream
        self._coding = coding

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._coding.lower() != "identity":
            raise httpx2.StreamError(f"an MCP server's answer must not be compressed, got {self._coding!r:.40}")
        size = 0
        async for part in self._stream:
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise httpx2.StreamError(f"an MCP server's answer must be at most {MAX_BODY_BYTES} bytes, got more")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
