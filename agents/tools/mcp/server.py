"""Tools of MCP servers, through the official `mcp` package: programs on stdio, and URLs with streamable HTTP.

Built from a tools' YAML (`mcp:`) and entered by `agents.tools.toolbox`. One session per server and worker serves all episodes.
Invariants: a call is sent once, and once more only if the server died under it and says that the tool may be repeated; a server
that died is started again once, and given up if it dies again before it has answered anything; one that this program started ends
with its session; what a server lists and says is bounded (`agents.tools.mcp.stdio`, `buffers.outgoing`). Deadlines of calls are the
toolbox's. Text only: other contents are named, not shown.

    mcp:
      servers: {files: {command: "{python}", args: [server.py]}, web: {url: "http://127.0.0.1:8000/mcp"}}
      mcp_servers_config_path: servers.json        # or, or also: {"mcpServers": {...}}, as other clients have it
      tool_selected_list: [search]                 # all, without it
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import anyio
import httpx2
from mcp import Client, MCPError
from mcp import types as mcp_types
from mcp.client.streamable_http import streamable_http_client
from pydantic import ValidationError
from pydantic_core import to_json

from agents.tools.base_tool import BaseTool
from agents.tools.mcp.config import McpServerSpec
from agents.tools.mcp.stdio import StdioServer
from agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from buffers.did_you_mean import nearest
from buffers.errors import ToolError
from buffers.outgoing import MCP, Outgoing

logger = logging.getLogger(__name__)

START_DEADLINE_S = 60.0
CLOSE_DEADLINE_S = 10.0
MAX_TOOLS = 1000
"""Most tools of one server; also pages of its list, which may be empty."""
MAX_LIST_BYTES = 16 << 20
HTTP_S = 30.0
"""Seconds to connect and to send; an answer has the call's own deadline."""
MAX_NAME_CHARS = 128
MAX_TOOL_BYTES = 1 << 16
_DEAD = (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError)
"""Errors of a call to a server that is not there, beside MCPError with this code (also over HTTP):"""
CONNECTION_CLOSED = -32000


@dataclass(slots=True, eq=False)
class McpServer:
    """`async with` it: starts the server, gives its tools. `selected`: of those, only these. `config`: of each of its tools."""

    spec: McpServerSpec
    _: KW_ONLY
    name: str
    folder: Path
    selected: list[str] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    start_deadline_s: float = START_DEADLINE_S
    starts: int = field(default=0, init=False)
    _session: McpSession | None = field(default=None, init=False)
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _given_up: str = field(default="", init=False)

    async def __aenter__(self) -> list[BaseTool]:
        """Raises ToolError when the server does not start, or has not the tools that were selected."""
        session = await self._open()
        tools = {tool.name: tool for tool in session.tools}
        for name in self.selected or ():
            if name not in tools:
                await self._close()
                raise ToolError(
                    f"tool_selected_list must name tools of MCP server {self.name}, got {name!r}; {nearest(name, tools)}"
                )
        chosen = tools if self.selected is None else {name: tools[name] for name in self.selected}
        try:
            return [McpTool(tool, server=self, config=self.config) for tool in chosen.values()]
        except (ToolError, ValidationError) as error:
            await self._close()
            rules = rules_of(error) if isinstance(error, ValidationError) else str(error)
            raise ToolError(
                f"tools of MCP server {self.name} must have names and schemas that can be used: {rules:.500}"
            ) from error

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def call(self, tool: str, arguments: dict[str, Any], *, again: bool) -> mcp_types.CallToolResult:
        """Answer of the server. `again`: the call may be repeated when the server died under it. Raises ToolError."""
        try:
            return await self._call(tool, arguments)
        except _Died as died:
            if not again:
                raise ToolError(
                    f"MCP server {self.name} died during the call ({died}), which may or may not have had an effect; "
                    f"it is started again for the next one"
                ) from None
        try:
            return await self._call(tool, arguments)
        except _Died as died:
            raise ToolError(f"MCP server {self.name} died during the call, twice ({died})") from None

    async def _call(self, tool: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        session = await self._open()
        try:
            result = await session.client.call_tool(tool, arguments)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                reason = " ".join(str(error).split())
                raise ToolError(f"MCP server {self.name} refused the call: {reason:.500}") from None
            session.dead = True
            raise _Died(session.fault or str(error)) from None
        except _DEAD as error:
            session.dead = True
            raise _Died(session.fault or f"{type(error).__name__}: {error}") from None
        except ValidationError as error:
            raise ToolError(f"MCP server {self.name} must answer as MCP has it: {rules_of(error)}") from None
        session.has_answered = True
        return result

    async def _open(self) -> McpSession:
        """The session; a new one when there is none, or it died."""
        async with self._starting:
            if self._given_up:
                raise ToolError(self._given_up)
            old = self._session
            if old is not None and not old.dead:
                return old
            if old is not None:
                await self._close()
                words = old.last_words()
                if not old.has_answered and self.starts > 1:
                    self._give_up(f"MCP server {self.name} died again before it answered anything{words}")
            try:
                self._session = await McpSession.start(self.spec, folder=self.folder, deadline_s=self.start_deadline_s)
            except ToolError as error:
                self._give_up(f"MCP server {self.name} must start: {error}")
            self.starts += 1
            assert self._session is not None
            return self._session

    def _give_up(self, reason: str) -> NoReturn:
        self._given_up = f"{reason}; it is not started again"
        logger.error("%s", self._given_up)
        raise ToolError(self._given_up)

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class _Died(Exception):
    """The server is gone."""


class McpSession:
    """One connection, kept open by a task of its own: the package's cancel scopes are entered and left by one task."""

    def __init__(self, spec: McpServerSpec, *, folder: Path) -> None:
        self._spec = spec
        self._folder = folder
        self._server: StdioServer | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.client: Client
        self.tools: list[mcp_types.Tool] = []
        self.dead = False
        self.has_answered = False

    @classmethod
    async def start(cls, spec: McpServerSpec, *, folder: Path, deadline_s: float) -> McpSession:
        """Connect and list the tools. Raises ToolError with what the server said."""
        session = cls(spec, folder=folder)
        session._task = asyncio.create_task(session._hold(), name="mcp session")
        try:
            await asyncio.wait({session._task, session._ready}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await session.close()
            raise
        if not session._ready.done():
            why = await session.close()
            why = session.fault or why or f"it was not ready within {deadline_s:g} s"
            raise ToolError(f"{why}{session.last_words()}; check its command or url")
        return session

    async def close(self) -> str:
        """End the connection and the server's process. Returns what went wrong on the way, for a message."""
        assert self._task is not None
        self._stop.set()
        if not self._ready.done():
            self._task.cancel()
        _, hanging = await asyncio.wait({self._task}, timeout=CLOSE_DEADLINE_S)
        if hanging:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_DEADLINE_S)
        error = self._task.exception() if self._task.done() and not self._task.cancelled() else None
        return "" if error is None else _cause(error)

    @property
    def fault(self) -> str:
        """Why this side ended the connection, if it did."""
        return self._server.fault if self._server is not None else ""

    def last_words(self) -> str:
        """The end of what the server's process wrote beside its messages."""
        return self._server.last_words() if self._server is not None else ""

    async def _hold(self) -> None:
        async with AsyncExitStack() as stack:
            self.client = await stack.enter_async_context(await self._connect(stack))
            cursor: str | None = None
            num_pages = num_bytes = 0
            while True:
                page = await self.client.list_tools(cursor=cursor)
                self.tools += page.tools
                num_pages += 1
                num_bytes += len(page.model_dump_json())
                if len(self.tools) > MAX_TOOLS or num_pages > MAX_TOOLS:
                    raise ToolError(f"it must list at most {MAX_TOOLS} tools, got more")
                if num_bytes > MAX_LIST_BYTES:
                    raise ToolError(f"its list of tools must be at most {MAX_LIST_BYTES} bytes, got more")
                cursor = page.next_cursor
                if cursor is None:
                    break
            self._ready.set_result(None)
            await self._stop.wait()

    async def _connect(self, stack: AsyncExitStack) -> Client:
        if self._spec.url is not None:
            headers = dict(self._spec.headers)
            if self._spec.auth_token is not None:
                headers["Authorization"] = f"Bearer {self._spec.auth_token}"
            timeout = httpx2.Timeout(HTTP_S, read=None)
            http = await stack.enter_async_context(Outgoing(MCP, headers=headers, timeout=timeout))
            return Client(streamable_http_client(self._spec.url, http_client=http))
        words = [
            sys.executable if word == "{python}" else word for word in (self._spec.command or "", *self._spec.args)
        ]
        self._server = StdioServer(words, env=self._spec.env, folder=self._folder)
        return Client(self._server)


def _cause(error: BaseException) -> str:
    """The first error of a group of groups, which is what task groups make of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ValidationError):
        return f"what it says must be as MCP has it: {rules_of(error)}"
    return f"{type(error).__name__}: {error}"


def rules_of(error: ValidationError) -> str:
    """Rules of pydantic that are broken, in one line; without the values, which may be long."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in errors[:3])


class McpTool(BaseTool):
    """One tool of a server, under its own name."""

    def __init__(self, tool: mcp_types.Tool, *, server: McpServer, config: dict[str, Any]) -> None:
        _check(tool, server=server.name)
        self._tool = tool
        self._server = server
        hints = tool.annotations
        self._again = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        super().__init__(config, OpenAIFunctionToolSchema.of(tool.name, tool.description or "", tool.input_schema))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Ask the server. Raises ToolError when it says that the call failed. Its reward is 0."""
        result = await self._server.call(self._tool.name, parameters, again=self._again)
        text = "\n".join(_text(part) for part in result.content)
        if not text and result.structured_content is not None:
            text = to_json(result.structured_content).decode()
        if result.is_error:
            raise ToolError(text or "the server gave no reason")
        return ToolResponse(text=text), 0.0, {}


def _check(tool: mcp_types.Tool, *, server: str) -> None:
    """Bound a tool's description, which stands in every prompt, and its patterns, which are compiled. Raises ToolError."""
    if not (tool.name.isprintable() and len(tool.name) <= MAX_NAME_CHARS):
        raise ToolError(
            f"names of MCP server {server}'s tools must be at most {MAX_NAME_CHARS} printable characters, got "
            f"{tool.name[:MAX_NAME_CHARS]!r}; correct the server"
        )
    size = len(tool.description or "") + len(to_json(tool.input_schema))
    if size > MAX_TOOL_BYTES:
        raise ToolError(
            f"tool {tool.name} of MCP server {server} must be described in at most {MAX_TOOL_BYTES} bytes, got {size}; leave it "
            f"out of tool_selected_list"
        )


def _text(content: mcp_types.ContentBlock) -> str:
    match content:
        case mcp_types.TextContent(text=text):
            return text
        case mcp_types.EmbeddedResource(resource=mcp_types.TextResourceContents(text=text)):
            return text
        case mcp_types.ResourceLink(uri=uri):
            return str(uri)
    return f"({content.type} left out: only text is shown)"
