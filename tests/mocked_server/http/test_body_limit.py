"""Rules of mocked_server/http/request_limits.py without a server: how large, how deep, how many, and who hung up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mocked_server.http import request_limits
from mocked_server.http.request_limits import (
    MAX_BODY_BYTES,
    MAX_DEPTH,
    MAX_EPISODE_ROUTE_BYTES,
    MAX_HELD_BYTES,
    BodyLimit,
    told_length,
)
from tests.support.patience import PATIENCE_S

LIMIT = 100


class Application:
    """What it was called with; `hold` requests to it stay until `let_go` is set."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.let_go = asyncio.Event()
        self.let_go.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        first = await receive()
        assert first["more_body"] is False
        self.bodies.append(first["body"])
        await self.let_go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def parts(*bodies: bytes, ends: bool = True) -> Any:
    """`receive` of a body in these parts; without `ends` the client goes away before the last one."""
    events: list[Any] = [{"type": "http.request", "body": body, "more_body": True} for body in bodies]
    if ends:
        events[-1]["more_body"] = False
    else:
        events.append({"type": "http.disconnect"})

    async def receive() -> Any:
        return events.pop(0)

    return receive


async def ask(app: BodyLimit, receive: Any, *headers: tuple[bytes, bytes]) -> int | None:
    """The status; None: nothing was answered."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "path": "/scores", "headers": list(headers)}, receive, send)
    if sent and sent[0]["status"] != 200:
        assert json.loads(sent[1]["body"])["error"]["message"]
        told = dict(sent[0]["headers"])
        assert told[b"connection"] == b"close" and (b"retry-after" in told) == (sent[0]["status"] == 503)
        assert (told.get(b"x-should-retry") == b"false") == (sent[0]["status"] != 503)
    return sent[0]["status"] if sent else None


@pytest.mark.parametrize(("size", "status"), [(LIMIT - 1, 200), (LIMIT, 200), (LIMIT + 1, 413)])
@pytest.mark.parametrize("told", [True, False])
async def test_a_body_of_just_the_limit_is_taken_and_of_one_byte_more_is_not(
    size: int, status: int, told: bool
) -> None:
    application = Application()
    app = BodyLimit(application, max_bytes=LIMIT)
    kind = (b"content-length", str(size).encode()) if told else (b"transfer-encoding", b"chunked")
    half = size // 2
    assert await ask(app, parts(b" " * half, b" " * (size - half)), kind) == status
    assert application.bodies == ([b" " * size] if status == 200 else []) and app._held == 0


async def test_a_body_that_is_told_to_be_too_large_is_not_read() -> None:
    app = BodyLimit(Application(), max_bytes=LIMIT)
    assert await ask(app, None, (b"content-length", str(LIMIT + 1).encode())) == 413
    assert await ask(app, None, (b"content-length", b"9" * 5000)) == 413


@pytest.mark.parametrize(
    ("headers", "length"),
    [
        ([], 0),
        ([(b"content-length", b"7")], 7),
        ([(b"content-length", b"7"), (b"transfer-encoding", b"chunked")], None),
        ([(b"transfer-encoding", b"chunked")], None),
    ],
)
def test_the_length_is_what_the_head_says(headers: Any, length: int | None) -> None:
    assert told_length({"headers": headers}, max_bytes=LIMIT) == length


async def test_a_body_whose_client_goes_away_reaches_nobody() -> None:
    application = Application()
    app = BodyLimit(application, max_bytes=LIMIT)
    assert await ask(app, parts(b'{"score": 1', ends=False)) is None
    assert application.bodies == [] and app._held == 0


@pytest.mark.parametrize(("depth", "status"), [(MAX_DEPTH, 200), (MAX_DEPTH + 1, 400)])
async def test_a_body_of_just_the_depth_is_taken(depth: int, status: int) -> None:
    assert await ask(BodyLimit(Application(), max_bytes=10_000), parts(b"[" * depth + b"]" * depth)) == status


async def test_all_bodies_that_are_held_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "MAX_HELD_BYTES", 2 * LIMIT)
    application = Application()
    application.let_go.clear()
    app = BodyLimit(application, max_bytes=LIMIT)
    held = [asyncio.create_task(ask(app, parts(b" " * LIMIT))) for _ in range(2)]
    while len(application.bodies) < 2:
        await asyncio.sleep(0)
    assert app._held == 2 * LIMIT
    assert await asyncio.wait_for(ask(app, parts(b" ")), PATIENCE_S) == 503
    assert app._held == 2 * LIMIT, "what was refused is held no longer"
    application.let_go.set()
    assert await asyncio.gather(*held) == [200, 200]
    assert app._held == 0 and await ask(app, parts(b" " * LIMIT)) == 200


def test_the_limits_are_those_of_the_documents() -> None:
    assert (MAX_BODY_BYTES, MAX_EPISODE_ROUTE_BYTES, MAX_HELD_BYTES, MAX_DEPTH) == (16 * 2**20, 2**20, 32 * 2**20, 128)


async def test_what_is_no_http_request_has_no_body() -> None:
    called = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        called.append(scope["type"])

    await BodyLimit(application, max_bytes=LIMIT)({"type": "websocket"}, None, None)  # type: ignore[arg-type]
    assert called == ["websocket"]
