"""Rules of buffers/outgoing.py: what a server of others may answer, and that nothing goes out by another way."""

from __future__ import annotations

import ast
import asyncio
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from buffers.outgoing import BOUNDS, ENGINE, MCP, ROLE, AnswerRefused, Bounds, Outgoing
from scripts.made_pages import CLIENTS_OF_OTHERS, OURS
from tests.support.faults.hostile_http import BOMB, ENDLESS, hostile, whole
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SMALL = replace(ROLE, max_bytes=1000)
each_server = pytest.mark.parametrize("bounds", BOUNDS, ids=lambda bounds: bounds.server)


async def ask(bounds: Bounds, url: str, *, times: int = 1) -> list[httpx2.Response]:
    async with Outgoing(bounds, headers={"authorization": "Bearer secret"}, trust_env=False) as client:
        return [await client.post(url, json={}) for _ in range(times)]


@each_server
async def test_no_compression_is_asked_for_and_none_is_unpacked(bounds: Bounds) -> None:
    async with hostile(BOMB) as server:
        with pytest.raises(AnswerRefused, match="must not be compressed, got 'gzip, gzip'"):
            await ask(bounds, server.url)
    assert b"accept-encoding: identity\r\n" in server.asked[0].lower()


@each_server
async def test_an_answer_without_end_is_hung_up_on(bounds: Bounds) -> None:
    async with hostile(ENDLESS, then=b"x" * 500) as server:
        with pytest.raises(AnswerRefused, match=rf"of {bounds.server} may have 1000 bytes, got more"):
            await ask(replace(bounds, max_bytes=1000), server.url)
        await asyncio.wait_for(server.hung_up.wait(), PATIENCE_S)


@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 200 OK\r\n", ENDLESS], ids=["nothing", "half a head", "a head"])
async def test_an_answer_that_comes_too_slowly_ends_however_it_comes(before: bytes) -> None:
    async with hostile(before, then=b"x" if before == ENDLESS else b"a: b\r\n", pause_s=0.01) as server:
        with pytest.raises(httpx2.HTTPError):
            await asyncio.wait_for(ask(replace(ROLE, total_s=0.2), server.url), PATIENCE_S)
        await asyncio.wait_for(server.hung_up.wait(), PATIENCE_S)


@pytest.mark.parametrize("status", ["600 X", "999 X", "302 Found", "307 X", "300 X"])
async def test_no_other_server_is_asked_and_no_status_is_taken_that_is_none(status: str) -> None:
    async with (
        hostile(whole()) as other,
        hostile(whole(b"{}", f"location: {other.url}/x", status=status)) as server,
    ):
        with pytest.raises(AnswerRefused, match=r"must answer (with a status|itself, got a redirect)"):
            await ask(ROLE, server.url)
    assert other.asked == []


async def test_a_redirect_of_an_mcp_server_is_left_to_its_package_which_stays_there() -> None:
    async with hostile(whole()) as other, hostile(whole(b"", f"location: {other.url}/x", status="307 X")) as server:
        (answer,) = await ask(MCP, server.url)
        assert answer.status_code == 307 and other.asked == []


@each_server
async def test_cookies_are_forgotten(bounds: Bounds) -> None:
    async with hostile(whole(b"{}", "set-cookie: who=this-episode; Path=/")) as server:
        await ask(bounds, server.url, times=2)
    assert len(server.asked) == 2 and not any(b"who=" in head for head in server.asked)


async def test_a_stream_of_events_may_go_on_and_none_of_its_lines() -> None:
    lines = ENDLESS + b"data: 1\n" * 1000
    async with hostile(lines) as server:
        (answer,) = await ask(replace(ENGINE, max_bytes=1000), server.url)
    assert answer.text == "data: 1\n" * 1000
    async with hostile(lines) as server:
        with pytest.raises(AnswerRefused):
            await ask(SMALL, server.url)


async def test_an_answer_of_just_the_limit_is_taken() -> None:
    async with hostile(whole(b"x" * 1000)) as server:
        (answer,) = await ask(SMALL, server.url)
    assert answer.content == b"x" * 1000


def test_nothing_of_ours_goes_out_over_http_by_another_way() -> None:
    """Whoever makes a client of his own is named here and in the document, with the reason."""
    makers = set()
    for folder in OURS:
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
            modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
            roots = {
                module if module.startswith(("urllib", "http.")) else module.partition(".")[0] for module in modules
            }
            made = {
                node.func.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name) and node.func.value.id == "httpx2"
            }  # fmt: skip
            name = path.relative_to(ROOT).as_posix()
            if roots & set(CLIENTS_OF_OTHERS) or made & {"AsyncClient", "Client", "get", "post", "request", "stream"}:
                makers.add(name)
    named = {name for names in CLIENTS_OF_OTHERS.values() for name in names}
    assert makers == named
