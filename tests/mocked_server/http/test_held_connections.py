"""Connections that their clients hold: slow readers, endless heads and trailers, idle ones, floods of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from mocked_server.http.uvicorn_server import MAX_HEAD_BYTES, HttpService, PatientProtocol, bind
from tests.support.patience import PATIENCE_S

MIB = 1 << 20
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
SOON_S = 0.05


@asynccontextmanager
async def serving(app: Callable[..., Awaitable[None]]) -> AsyncIterator[Callable[..., Awaitable[tuple]]]:
    """A server as `mocked_server.server` makes it -> how to connect to it."""
    sock = bind("127.0.0.1", 0)
    server = HttpService(app, sockets=[sock])
    await server.start()
    writers = []

    async def connect(data: bytes = b"", *, limit: int = 4096) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*sock.getsockname(), limit=limit)
        writer.write(data)
        writers.append(writer)
        return reader, writer

    connect.connections = server.server_state.connections
    try:
        yield connect
    finally:
        for writer in writers:
            writer.transport.abort()
        await server.close()


async def answer(scope, receive, send) -> None:
    """200, without a look at the body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes."""
    async with asyncio.timeout(PATIENCE_S):
        parts = []
        try:
            while part := await reader.read(65536):
                parts.append(part)
        except ConnectionResetError:
            pass
        return b"".join(parts)


async def is_ok(connect) -> None:
    reader, _ = await connect(GET)
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")


async def test_a_client_that_reads_nothing_of_its_stream_is_cut_off_and_little_is_held(monkeypatch) -> None:
    monkeypatch.setattr("mocked_server.http.uvicorn_server.SEND_S", SOON_S)
    sent, over = 0, asyncio.Event()

    async def endless(scope, receive, send) -> None:
        nonlocal sent
        hung_up = asyncio.ensure_future(receive_all(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not hung_up.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            sent += 65536
            await asyncio.sleep(0)
        over.set()

    async with serving(endless) as connect:
        _, writer = await connect(GET)
        writer.transport.pause_reading()
        async with asyncio.timeout(PATIENCE_S):
            await over.wait()
        assert 65536 <= sent <= 64 * MIB  # what the kernel takes on both sides, and one part


async def receive_all(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.parametrize("frame", [b"a: " + b"b" * 1000 + b"\r\n", b"c" * 1000], ids=["many", "one that never ends"])
async def test_trailers_that_never_end_are_cut_off(frame) -> None:
    async with serving(answer) as connect:
        _, writer = await connect(POST + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n")
        writer.write(b"a: b")
        num_sent = 0
        try:
            async with asyncio.timeout(PATIENCE_S):
                while num_sent < 64 * MIB:
                    writer.write(frame)
                    await writer.drain()
                    num_sent += len(frame)
        except ConnectionError:
            pass
        assert MAX_HEAD_BYTES // 2 < num_sent < 64 * MIB, "the server must close it"
        await is_ok(connect)


async def test_what_follows_a_body_in_chunks_is_no_header() -> None:
    seen = []

    async def read(scope, receive, send) -> None:
        while (await receive()).get("more_body"):
            pass
        seen.append(dict(scope["headers"]))
        await answer(scope, receive, send)

    async with serving(read) as connect:
        reader, writer = await connect(
            POST + b"transfer-encoding: chunked\r\n\r\n2;a=b\r\nhi\r\n0\r\nx-api-key: forged\r\n\r\n"
        )
        await reader.readuntil(b"ok")
        writer.write(GET)  # the next request has headers again
        await reader.readuntil(b"ok")
    assert [sorted(each) for each in seen] == [[b"host", b"transfer-encoding"], [b"host"]]


async def test_a_body_in_chunks_of_a_byte_is_taken() -> None:
    async def read(scope, receive, send) -> None:
        num_bytes, more = 0, True
        while more:
            event = await receive()
            num_bytes, more = num_bytes + len(event["body"]), event["more_body"]
        assert num_bytes == 200_000
        await answer(scope, receive, send)

    async with serving(read) as connect:
        reader, writer = await connect(POST + b"transfer-encoding: chunked\r\n\r\n")
        writer.write(b"1\r\nx\r\n" * 200_000 + b"0\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("request_", "rest"),
    [
        (GET, b"\r\n"),
        (POST + b"content-length: 2\r\n\r\n", b""),
        (POST + b"content-length: 2\r\n\r\n", b"hi"),
        (POST + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n", b""),
    ],
    ids=["a line after its answer", "no body", "a body after its answer", "a body that nobody asked for"],
)
async def test_a_connection_that_asks_for_nothing_more_is_closed(monkeypatch, request_, rest) -> None:
    monkeypatch.setattr("mocked_server.http.uvicorn_server.RECEIVE_S", 0.5)
    async with serving(answer) as connect:
        reader, writer = await connect(request_)
        await reader.readuntil(b"ok")
        writer.write(rest)
        assert await ended(reader) == b""


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("request_", "rest"),
    [
        (GET, b"\r\n"),
        (GET, GET[:20]),
        (POST + b"expect: 100-continue\r\ncontent-length: 100000\r\n\r\n", b""),
        (POST + b"content-length: 100000\r\n\r\n", b"x" * 90_000),
    ],
    ids=["a line after it", "half a request after it", "a body that is not read yet", "a body that is read in part"],
)
async def test_who_waits_for_its_answer_is_not_cut_off(monkeypatch, request_, rest) -> None:
    monkeypatch.setattr("mocked_server.http.uvicorn_server.RECEIVE_S", SOON_S)
    started, expired, give_up = asyncio.Event(), asyncio.Semaphore(0), PatientProtocol._give_up

    async def slow(scope, receive, send) -> None:
        started.set()
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(4):
                await expired.acquire()
        await answer(scope, receive, send)

    monkeypatch.setattr(PatientProtocol, "_give_up", lambda self: (expired.release(), give_up(self)))
    async with serving(slow) as connect:
        reader, writer = await connect(request_)
        await started.wait()
        writer.write(rest)
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")


async def test_a_flood_of_idle_connections_ends_the_idle_and_nobody_who_is_answered(monkeypatch) -> None:
    monkeypatch.setattr("mocked_server.http.uvicorn_server.max_connections", lambda: 8)
    go = asyncio.Event()

    async def on_go(scope, receive, send) -> None:
        if scope["path"] == "/wait":
            await go.wait()
        await answer(scope, receive, send)

    async with serving(on_go) as connect:
        waiting = [await connect(GET.replace(b"/ ", b"/wait ")) for _ in range(7)]
        async with asyncio.timeout(PATIENCE_S):
            while sum(not each.is_answered for each in connect.connections) < 7:
                await asyncio.sleep(0.005)
        idle = [await connect(GET[:9]) for _ in range(40)]
        for reader, _ in idle[:-1]:
            assert await ended(reader) == b""
        await is_ok(connect)  # the last idle one makes room for it
        assert len(connect.connections) <= 8
        go.set()
        for reader, _ in waiting:
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")


async def test_when_all_are_answered_one_more_is_not_taken(monkeypatch) -> None:
    monkeypatch.setattr("mocked_server.http.uvicorn_server.max_connections", lambda: 2)
    go = asyncio.Event()

    async def on_go(scope, receive, send) -> None:
        await go.wait()
        await answer(scope, receive, send)

    async with serving(on_go) as connect:
        waiting = [await connect(GET) for _ in range(2)]
        async with asyncio.timeout(PATIENCE_S):
            while sum(not each.is_answered for each in connect.connections) < 2:
                await asyncio.sleep(0.005)
        reader, _ = await connect(GET)
        assert await ended(reader) == b""
        go.set()
        for reader, _ in waiting:
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")


async def test_a_closed_connection_whose_client_reads_nothing_ends(monkeypatch, caplog) -> None:
    """Its last bytes never leave, so that closing it alone would never end it."""
    monkeypatch.setattr("mocked_server.http.uvicorn_server.SEND_S", SOON_S)
    caplog.set_level(logging.ERROR)
    size = 0

    async def fill(scope, receive, send) -> None:
        nonlocal size
        protocol = next(iter(connect.connections))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while protocol.transport.get_write_buffer_size() == 0:  # until the kernel takes no more
            await send({"type": "http.response.body", "body": b"x" * 16384, "more_body": True})
            await asyncio.sleep(0)
            size += 16384
        await send({"type": "http.response.body", "body": b""})

    async with serving(fill) as connect:
        _, writer = await connect(b"GET / HTTP/1.0\r\n\r\n")
        writer.transport.pause_reading()
        async with asyncio.timeout(PATIENCE_S):
            while not size or connect.connections:
                await asyncio.sleep(0.005)
