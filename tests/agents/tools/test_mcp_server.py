"""Tools of real MCP servers, made with the official package: on stdio and over HTTP, alive, dying and not starting."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from agents.tools.toolbox import Toolbox, ToolFault
from buffers.errors import ToolError

pytestmark = pytest.mark.slow

SERVER = '''
import asyncio, os, socket, sys
from pathlib import Path

import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.types import ToolAnnotations

app = MCPServer("test")


@app.tool()
async def add(a: int, b: int = 1) -> str:
    """Adds two numbers."""
    return str(a + b)


@app.tool()
def who() -> str:
    """Which process this is, and a variable of its environment."""
    return f"{os.getpid()} {os.environ.get('GREETING')}"


@app.tool()
async def hang() -> str:
    """Never answers."""
    await asyncio.Event().wait()


@app.tool()
def refuse() -> str:
    """Fails."""
    raise ValueError("not today")


@app.tool()
def picture() -> Image:
    """Answers no text."""
    return Image(data=b"....", format="png")


@app.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@app.tool(annotations=ToolAnnotations(read_only_hint=True))
def die_once() -> str:
    """Ends the server at the first call."""
    if not Path("died").exists():
        Path("died").touch()
        os._exit(3)
    return "alive again"


if sys.argv[1:] == ["http"]:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.run(app.streamable_http_app(), fd=listener.fileno(), log_level="error")
else:
    print("the server's own words", file=sys.stderr)
    if sys.argv[1:] == ["broken"]:
        sys.exit("broken on purpose")
    app.run()
'''


def tools_of(folder: Path, servers: dict[str, object], **entry: object) -> Path:
    (folder / "server.py").write_text(SERVER)
    path = folder / "tools.yaml"
    path.write_text(json.dumps({"tools": [{"mcp": {"servers": servers, **entry}, "config": {"deadline_s": 20}}]}))
    return path


STDIO = {"command": "{python}", "args": ["server.py"], "env": {"GREETING": "hello"}}


async def test_a_stdio_servers_tools_are_listed_called_and_ended(tmp_path):
    async with Toolbox.load(tools_of(tmp_path, {"one": STDIO})) as toolbox:
        assert toolbox.names[:2] == ["add", "who"]
        async with toolbox.open() as tools:
            function = tools.schemas[0]["function"]
            assert function["description"] == "Adds two numbers." and function["parameters"]["required"] == ["a"]
            sums = await asyncio.gather(*(tools.call("add", {"a": number}) for number in range(50)))
            assert [outcome.text for outcome in sums] == [str(number + 1) for number in range(50)]
            bad = await tools.call("add", '{"a": "x"}')
            assert bad.error is ToolFault.BAD_ARGUMENTS and "a: 'x' is not of type 'integer'" in bad.text
            refused = await tools.call("refuse", {})
            assert refused.error is ToolFault.RAISED and "Error executing tool refuse" in refused.text
            assert (await tools.call("picture", {})).text == "(image left out: only text is shown)"
            pid, greeting = (await tools.call("who", {})).text.split()
            assert greeting == "hello"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


async def test_a_call_has_a_deadline_and_the_session_goes_on(tmp_path):
    path = tools_of(tmp_path, {"one": STDIO})
    path.write_text(path.read_text().replace('"deadline_s": 20', '"deadline_s": 0.5'))
    async with Toolbox.load(path) as toolbox, toolbox.open() as tools:
        before = (await tools.call("who", {})).text
        assert (await tools.call("hang", {})).error is ToolFault.DEADLINE
        assert (await tools.call("who", {})).text == before


async def test_a_server_that_died_is_started_again_once(tmp_path):
    async with Toolbox.load(tools_of(tmp_path, {"one": STDIO})) as toolbox, toolbox.open() as tools:
        first = (await tools.call("who", {})).text
        died = await tools.call("die", {})
        assert died.error is ToolFault.RAISED
        assert (
            "MCP server one died during the call (Connection closed), which may or may not have had an effect"
            in died.text
        )
        again = await asyncio.gather(*(tools.call("who", {}) for _ in range(5)))
        assert len({outcome.text for outcome in again}) == 1 and again[0].text != first, "one new process for all"
        assert (await tools.call("die_once", {})).text == "alive again", "it may be repeated, and was"
        for _ in range(2):
            assert (await tools.call("die", {})).error is ToolFault.RAISED
        given_up = await tools.call("who", {})
        assert "died again before it answered anything" in given_up.text and "not started again" in given_up.text


async def test_only_selected_tools_are_offered_and_other_clients_files_do(tmp_path):
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"one": STDIO}}))
    path = tools_of(tmp_path, {}, mcp_servers_config_path="servers.json", tool_selected_list=["add"])
    async with Toolbox.load(path) as toolbox:
        assert toolbox.names == ["add"]
    path = tools_of(tmp_path, {"one": STDIO}, tool_selected_list=["ad"])
    with pytest.raises(ToolError, match="must name tools of MCP server one, got 'ad'; did you mean 'add'"):
        async with Toolbox.load(path):
            pass


async def test_a_server_that_does_not_start_is_named_with_its_last_words(tmp_path):
    broken = {**STDIO, "args": ["server.py", "broken"]}
    for server, reason in [
        (broken, "MCP server one must start: .*it said: the server's own words broken on purpose"),
        ({"command": "no-such-program"}, "MCP server one must start: .*no-such-program: No such file or directory"),
        ({"url": "http://127.0.0.1:9/mcp"}, "MCP server one must start: ConnectError"),
    ]:
        with pytest.raises(ToolError, match=reason):
            async with Toolbox.load(tools_of(tmp_path, {"one": server})):
                pass


HOSTILE = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "initialize":
        result = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "hostile", "version": "1"}}
    elif asked["method"] == "tools/list":
        result = json.loads(sys.argv[1])
    elif "id" in asked:
        unknown = {"code": -32601, "message": "Method not found"}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": unknown}), flush=True)
        continue
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        ({"tools": [], "nextCursor": "on and on"}, "must list at most 1000 tools"),
        ({"tools": [{"name": "a\x1b[2J", "inputSchema": OBJECT}]}, "must be at most 128 printable characters"),
        (
            {"tools": [{"name": "a", "description": "x" * 70_000, "inputSchema": OBJECT}]},
            "in at most 65536 bytes, got 70",
        ),
        (
            {"tools": [{"name": "a", "inputSchema": {**OBJECT, "properties": {"b": True}}}]},
            "that can be used: parameters.properties.b: Input should be a valid dictionary",
        ),
    ],
)
async def test_a_server_that_lists_too_much_or_what_cannot_be_used_is_refused_and_ended(tmp_path, listed, reason):
    server = {"command": "{python}", "args": ["-c", HOSTILE, json.dumps(listed)]}
    toolbox = Toolbox.load(tools_of(tmp_path, {"one": server}))
    with pytest.raises(ToolError, match=reason):
        async with toolbox:
            pass
    assert toolbox._sources[0]._session is None


async def test_a_server_over_http_does_as_well(tmp_path):
    tools_of(tmp_path, {})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "server.py", "http", cwd=tmp_path, stdout=asyncio.subprocess.PIPE
    )
    try:
        port = (await process.stdout.readline()).decode().strip()
        web = {"url": f"http://127.0.0.1:{port}/mcp", "auth_token": "t"}
        async with Toolbox.load(tools_of(tmp_path, {"web": web})) as toolbox, toolbox.open() as tools:
            sums = await asyncio.gather(*(tools.call("add", {"a": number}) for number in range(20)))
            assert [outcome.text for outcome in sums] == [str(number + 1) for number in range(20)]
            assert "died during the call" in (await tools.call("die", {})).text
            await process.wait()  # until then its port may still take a connection
            assert "must start: ConnectError" in (await tools.call("add", {"a": 1})).text
    finally:
        await process.communicate()  # it has died, as it was told
