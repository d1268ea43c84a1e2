"""HTTP servers that say what they like, as bytes."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

MIB = 1 << 20


def whole(body: bytes = b"{}", *headers: str, status: str = "200 OK") -> bytes:
    """An answer with its length."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


ENDLESS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
"""The head of an answer that ends with its connection."""
BOMB = whole(gzip.compress(gzip.compress(bytes(64 * MIB))), "content-encoding: gzip, gzip")
"""Some hundred bytes that become 64 MiB."""


@dataclass
class Hostile:
    """A server. `sent`: bytes that it got rid of; `asked`: heads of the requests; `hung_up`: a client left before the end."""

    url: str = ""
    sent: int = 0
    asked: list[bytes] = field(default_factory=list)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def hostile(answer: bytes, *, then: bytes = b"", pause_s: float = 0.0) -> AsyncIterator[Hostile]:
    """Answers each request so; with `then` it goes on with that, after each a pause, until the client hangs up."""
    server, talking = Hostile(), set[asyncio.Task[None]]()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talking.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            server.asked.append(head)
            lines = (line.partition(b":") for line in head.lower().split(b"\r\n"))
            length = next((int(value) for name, _, value in lines if name == b"content-length"), 0)
            await reader.readexactly(length)
            writer.write(answer)
            await writer.drain()
            while then:
                writer.write(then)
                await writer.drain()
                server.sent += len(then)
                await asyncio.sleep(pause_s)
        except (ConnectionError, asyncio.IncompleteReadError):
            server.hung_up.set()
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as listener:
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        yield server
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)
