"""MCP servers that mean harm or are broken: each costs its own call, or its own start, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agents.tools.mcp import server, stdio
from agents.tools.toolbox import Toolbox, ToolFault
from buffers.errors import ToolError
from buffers.outgoing import MCP
from configs.child_processes import python_path

pytestmark = pytest.mark.slow

SERVER = r"""
import json, os, signal, subprocess, sys
MODE, ALIVE = sys.argv[1:]
ANSWERS = {
    "half a surrogate pair": rb'"result": {"content": [{"type": "text", "text": "\ud800"}]}',
    "a result of null": b'"result": null',
    "an error that is none": b'"error": {"code": "x", "message": 5}',
    "nested 500 times": b'"result": {"content": [], "_meta": ' + b'{"a": ' * 500 + b"1" + b"}" * 500 + b"}",
}
held = open(ALIVE, "wb", buffering=0)  # as long as the server, or what it started, is alive
held.write(b"s")
os.set_inheritable(held.fileno(), True)
if MODE == "stays":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if MODE == "has a child":
    wait = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    child = subprocess.Popen([sys.executable, "-c", wait], close_fds=False, stdout=subprocess.PIPE)
    child.stdout.readline()
def say(**fields):
    print(json.dumps({"jsonrpc": "2.0", **fields}), flush=True)
def flood(line):
    while True:
        os.write(1, line)
if MODE == "floods at start":
    flood(b"x" * 65536)
for line in sys.stdin:
    asked = json.loads(line)
    method, number = asked.get("method"), asked.get("id")
    if method == MODE:
        continue
    if method == "initialize":
        say(id=number, result={"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                               "serverInfo": {"name": "hostile", "version": "1"}})
    elif method == "tools/list":
        tool = {"name": "tool", "description": "d", "inputSchema": {"type": "object"}}
        wrong = {"name is a number": {"name": 5}, "description is a list": {"description": [1]},
                 "schema is text": {"inputSchema": "x"}}
        many = [{**tool, "name": f"tool{n}"} for n in range(10_000 if MODE == "10,000 tools" else 0)]
        schema = {"type": "object", "title": "x" * 300_000}
        large = [{**tool, "name": "large", "inputSchema": schema}] * (MODE == "large schemas")
        more = {"nextCursor": "more"} if MODE == "large schemas" else {}
        say(id=number, result={"tools": [{**tool, **wrong.get(MODE, {})}, *many, *large], **more})
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": "ok"}]}
        if MODE == "dies":
            os._exit(3)
        elif MODE == "a line without end":
            flood(b"x" * 65536)
        elif MODE == "notifications":
            flood(b'{"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "x"}}\n' * 100)
        elif MODE == "no messages":
            flood(b"what is this\n" * 1000)
        elif MODE == "requests":
            flood(b'{"jsonrpc": "2.0", "id": 1, "method": "roots/list"}\n')
        elif MODE == "200 MB":
            say(id=number, result={"content": [{"type": "text", "text": "x" * 200_000_000}]})
        elif MODE == "wrong id":
            say(id=number + 1000, result=result)
        elif MODE == "no result":
            say(id=number, result={"content": 5})
        elif MODE in ANSWERS:
            os.write(1, b'{"jsonrpc": "2.0", "id": %d, %s}\n' % (number, ANSWERS[MODE]))
        elif MODE == "closes its output":
            os.close(1)
        else:
            say(id=number, result={"content": [{"type": "text", "text": json.dumps(asked["params"]["arguments"])}]})
    elif number is not None and method:
        say(id=number, error={"code": -32601, "message": "no such method"})
while MODE == "stays":
    signal.pause()
"""
HONEST = "answers"


class Alive:
    """A named pipe that servers hold open as long as they live, and what they started."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "alive"
        os.mkfifo(self.path)
        self._reading = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def wait_for_end(self) -> int:
        """Returns how many servers there were, once none of them is alive."""
        os.set_blocking(self._reading, True)
        num_servers = 0
        while said := os.read(self._reading, 1000):
            num_servers += len(said)
        os.close(self._reading)
        return num_servers


def servers(folder: Path, alive: Alive, *modes: str, deadline_s: float = 60) -> Path:
    """A tools file with a server for each mode."""
    (folder / "server.py").write_text(SERVER)
    entries = [
        {
            "mcp": {"servers": {mode: {"command": "{python}", "args": ["server.py", mode, str(alive.path)]}}},
            "config": {"deadline_s": deadline_s},
        }
        for mode in modes
    ]
    path = folder / "tools.yaml"
    path.write_text(json.dumps({"tools": entries}))
    return path


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("a line without end", f"messages must be at most {stdio.MAX_MESSAGE_BYTES} bytes"),
        ("200 MB", f"messages must be at most {stdio.MAX_MESSAGE_BYTES} bytes"),
        ("notifications", f"at most {stdio.MAX_UNASKED_MESSAGES} lines"),
        ("no messages", f"at most {stdio.MAX_UNASKED_MESSAGES} lines"),
        ("requests", f"may ask at most {stdio.MAX_REQUESTS} times"),
        ("dies", "Connection closed"),
        ("closes its output", "Connection closed"),
        ("half a surrogate pair", "refused the call: what it answered is no message as MCP has it"),
        ("a result of null", "what it answered is no message"),
        ("an error that is none", "what it answered is no message"),
        ("nested 500 times", "what it answered is no message"),
        ("no result", "must answer as MCP has it: content: Input should be a valid list"),
    ],
)
async def test_what_a_server_does_to_a_call_is_that_calls_outcome(tmp_path, mode, reason):
    alive = Alive(tmp_path)
    async with Toolbox.load(servers(tmp_path, alive, mode)) as toolbox, toolbox.open() as tools:
        outcome = await tools.call("tool", {})
        assert outcome.error is ToolFault.RAISED
        assert f"MCP server {mode}" in outcome.text and reason in outcome.text
    assert await asyncio.to_thread(alive.wait_for_end) == 1


@pytest.mark.parametrize("mode", ["tools/call", "wrong id"])
async def test_a_call_that_is_not_answered_ends_at_its_deadline(tmp_path, mode):
    alive = Alive(tmp_path)
    async with Toolbox.load(servers(tmp_path, alive, mode, deadline_s=0.2)) as toolbox, toolbox.open() as tools:
        assert (await tools.call("tool", {})).error is ToolFault.DEADLINE
    assert await asyncio.to_thread(alive.wait_for_end) == 1


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("initialize", "it was not ready within 0.5 s"),
        ("tools/list", "it was not ready within 0.5 s"),
        ("floods at start", f"messages must be at most {stdio.MAX_MESSAGE_BYTES} bytes"),
        ("10,000 tools", f"it must list at most {server.MAX_TOOLS} tools"),
        ("large schemas", f"its list of tools must be at most {server.MAX_LIST_BYTES} bytes"),
        ("name is a number", "tools.0.name: Input should be a valid string"),
        ("description is a list", "tools.0.description: Input should be a valid string"),
        ("schema is text", "tools.0.inputSchema: Input should be a valid dictionary"),
    ],
)
async def test_a_server_that_is_not_fit_for_use_is_refused_by_its_name(tmp_path, mode, reason):
    alive = Alive(tmp_path)
    toolbox = Toolbox.load(servers(tmp_path, alive, mode))
    if "not ready" in reason:
        toolbox._sources[0].start_deadline_s = 0.5
    with pytest.raises(ToolError) as refused:
        async with toolbox:
            pass
    assert f"MCP server {mode} must start: " in str(refused.value) and reason in str(refused.value)
    assert "\n" not in str(refused.value)
    await asyncio.to_thread(alive.wait_for_end)


async def test_other_servers_calls_go_on_while_one_floods(tmp_path):
    """Also of other episodes: 100 calls are answered between the flood's begin and its end."""
    alive = Alive(tmp_path)
    path = servers(tmp_path, alive, HONEST, "notifications")
    path.write_text(
        path.read_text().replace('"servers": {"notifications"', '"tool_selected_list": [], "servers": {"x"')
    )
    async with Toolbox.load(path) as toolbox, toolbox.open() as tools, toolbox.open() as others:
        flooding = asyncio.create_task(toolbox._sources[1].call("tool", {}, again=False))
        for number in range(100):
            assert (await (others if number % 2 else tools).call("tool", {"n": number})).text == f'{{"n": {number}}}'
        with pytest.raises(ToolError, match="MCP server x died during the call"):
            await flooding
    assert await asyncio.to_thread(alive.wait_for_end) == 2


@pytest.mark.parametrize("mode", ["stays", "has a child"])
async def test_nothing_of_a_server_is_left_behind(tmp_path, mode, monkeypatch):
    """It heeds neither the end of its input nor SIGTERM; it ends at once, and its child heeds nothing."""
    monkeypatch.setattr(stdio, "GRACE_S", 0.2)
    alive = Alive(tmp_path)
    async with Toolbox.load(servers(tmp_path, alive, mode)) as toolbox, toolbox.open() as tools:
        assert (await tools.call("tool", {})).ok
    assert await asyncio.to_thread(alive.wait_for_end) == 1


async def test_a_server_ends_with_the_process_that_started_it(tmp_path):
    alive = Alive(tmp_path)
    path = servers(tmp_path, alive, "stays")
    program = f"""
import asyncio
from pathlib import Path
from agents.tools.toolbox import Toolbox
async def main():
    async with Toolbox.load(Path({str(path)!r})):
        print("ready", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, env={**os.environ, "PYTHONPATH": python_path()}, stdout=asyncio.subprocess.PIPE
    )
    assert await process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    assert await asyncio.to_thread(alive.wait_for_end) == 1


async def test_half_a_surrogate_pair_in_arguments_reaches_the_server_as_it_is(tmp_path):
    alive = Alive(tmp_path)
    async with Toolbox.load(servers(tmp_path, alive, HONEST)) as toolbox, toolbox.open() as tools:
        assert (await tools.call("tool", '{"a": "\\ud800"}')).text == '{"a": "\\ud800"}'
        assert (await tools.call("tool", {"a": 1})).text == '{"a": 1}', "and the connection is still there"


SOCKET_BUFFERS = 12 << 20
"""More than what lies between the two ends of a connection on loopback."""
EVENT = (
    b'data: {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "%s"}}\n\n'
    % (b"x" * 9000)
)


class Floods(BaseHTTPRequestHandler):
    """Answers a call in the way that the server's `mode` says."""

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        match asked.get("method"):
            case "initialize":
                version = asked["params"]["protocolVersion"]
                server = {"name": "hostile", "version": "1"}
                self.answer(asked, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server})
            case "tools/list":
                self.answer(asked, {"tools": [{"name": "tool", "description": "d", "inputSchema": {"type": "object"}}]})
            case "tools/call":
                self.flood()
            case _:
                self.send_error(404)

    def do_GET(self) -> None:
        self.send_error(405)

    def answer(self, asked: dict[str, object], result: object) -> None:
        body = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def flood(self) -> None:
        mode = self.server.mode
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if mode == "events" else "application/json")
        if mode == "compressed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        try:
            while True:
                self.server.sent += self.wfile.write(EVENT if mode == "events" else b" " * 65536)
        except OSError:
            pass  # the client has hung up


@contextmanager
def flooding(mode: str) -> Iterator[ThreadingHTTPServer]:
    """An MCP server that floods over HTTP; `sent`: so many bytes."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Floods)
    server.mode, server.sent = mode, 0
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("body", f"may have {MCP.max_bytes} bytes, got more"),
        ("compressed", "must not be compressed"),
        ("events", "MCP server web died during the call"),
    ],
)
async def test_a_flood_over_http_ends_its_call(tmp_path, mode, reason):
    path = tmp_path / "tools.yaml"
    with flooding(mode) as server:
        url = f"http://127.0.0.1:{server.server_port}/mcp"
        path.write_text(json.dumps({"tools": [{"mcp": {"servers": {"web": {"url": url}}}}]}))
        async with Toolbox.load(path) as toolbox, toolbox.open() as tools:
            outcome = await tools.call("tool", {})
    assert outcome.error is ToolFault.RAISED
    assert reason in outcome.text
    assert server.sent < MCP.max_bytes + SOCKET_BUFFERS
