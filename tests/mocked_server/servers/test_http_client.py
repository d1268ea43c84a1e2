"""The connection to a server: an answer that nobody reads any more is hung up on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from mocked_server.servers.http_client import ServerClient
from tests.support.patience import PATIENCE_S

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"number": 1}\n\n'


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("when", ["it reads", "it hangs up"])
async def test_a_reader_that_is_cancelled_leaves_no_connection(when: str, turns: int) -> None:
    """`turns`: of the event loop, between its event and its end."""
    hung_up = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(HEAD + f"{len(EVENT):x}\r\n".encode() + EVENT + b"\r\n")
        await reader.read()  # until the client hangs up
        writer.close()
        hung_up.set()

    async def read() -> None:
        async with aclosing(client.events("/generate", {})) as events:
            async for event in events:
                assert event == {"number": 1}
                begun.set()
                if when == "it hangs up":
                    break

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        client, begun = ServerClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), asyncio.Event()
        reading = asyncio.create_task(read())
        await begun.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading})
        await asyncio.wait_for(hung_up.wait(), PATIENCE_S)
        await client.close()
