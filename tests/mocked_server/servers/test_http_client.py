"""The connection to a server: an answer that nobody reads any more is hung up on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from mocked_server.servers import http_client
from mocked_server.servers.http_client import ServerClient, ServerLost
from tests.support.faults.hostile_http import BOMB, ENDLESS, hostile, whole
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


@pytest.mark.parametrize(
    ("answer", "then", "reason"),
    [
        (ENDLESS, b"data: 1", "a line of an engine that runs elsewhere may have 1000 bytes"),
        (ENDLESS + b"data: " + b"[" * 400 + b"\n", b"", "an event that is no"),
        (BOMB, b"", "must not be compressed"),
        (whole(status="600 X"), b"", "a status of HTTP, got 600"),
        (whole(b"", "location: http://127.0.0.1:1/", status="307 X"), b"", "got a redirect"),
    ],
    ids=["a line without end", "no JSON", "compressed", "status 600", "redirect"],
)
async def test_a_hostile_server_is_lost_and_nothing_of_it_is_kept(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, then: bytes, reason: str
) -> None:
    monkeypatch.setattr(http_client, "ENGINE", replace(http_client.ENGINE, max_bytes=1000))
    async with hostile(answer, then=then) as server:
        client = ServerClient(server.url)
        with pytest.raises(ServerLost, match=reason):
            await anext(client.events("/generate", {}))
        await client.close()


async def test_an_answer_of_an_engine_ends_in_the_time_that_it_has() -> None:
    async with hostile(ENDLESS, then=b" ", pause_s=0.01) as server:
        client = ServerClient(server.url)
        with pytest.raises(ServerLost):
            await client.get("/health", timeout_s=0.1)
        await asyncio.wait_for(server.hung_up.wait(), PATIENCE_S)
        await client.close()
