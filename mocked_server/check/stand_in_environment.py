"""An environment that says yes to everything, for an agent that is tried out: what `ENV_ADDRESS` names in `mocked_server.check`.

The real one (`env.command`) is not started there: its scores mean nothing for a model that says made-up words. Each HTTP request is
answered with 200 and `ANSWER`, each other line with `ANSWER` as a line. Used by `mocked_server.check.trial`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

ANSWER = {"done": True, "score": 0.0, "reward": 0.0, "observation": "", "messages": [{"role": "user", "content": "Hi"}]}
METHODS = (b"GET ", b"POST ", b"PUT ", b"PATCH ", b"DELETE ", b"HEAD ", b"OPTIONS ")
MAX_BODY_BYTES = 1 << 24


class StandInEnvironment:
    """`num_messages`: how many it has answered."""

    def __init__(self) -> None:
        self.address = ""
        self.num_messages = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[StandInEnvironment]:
        """Serve on a free port of loopback until the context ends."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MAX_BODY_BYTES)
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, EOFError):  # the agent left, or speaks something else
            while line := await reader.readline():
                self.num_messages += 1
                body = json.dumps(ANSWER).encode()
                if line.startswith(METHODS):
                    await _read_request(reader)
                    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                    writer.write(head.encode() + body)
                else:
                    writer.write(body + b"\n")
                await writer.drain()
        writer.close()


async def _read_request(reader: asyncio.StreamReader) -> None:
    """The rest of its head, and its body."""
    length = 0
    while (header := (await reader.readline()).strip()) != b"":
        name, _, value = header.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    if length:
        await reader.readexactly(min(length, MAX_BODY_BYTES))
