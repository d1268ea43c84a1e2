"""Connections to MCP servers, through the official `mcp` package.

Used by `agents.tools.mcp.server`. Invariants: a session is opened and closed by one task, a matter of the package's
cancel scopes; a server that this program started ends with its session; what a server lists and says is bounded
(`agents.tools.mcp.stdio`, `buffers.outgoing`). It neither starts a dead server again, nor knows what a tool is for.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2
from mcp import Client
from mcp import types as mcp_types
from mcp.client.streamable_http import streamable_http_client
from pydantic import ValidationError

from agents.tools.mcp.config import McpServerSpec
from agents.tools.mcp.stdio import StdioServer
from buffers.errors import ToolError
from buffers.outgoing import MCP, Outgoing

CLOSE_DEADLINE_S = 10.0
MAX_TOOLS = 1000
"""Most tools of one server; also pages of its list, which may be empty."""
MAX_LIST_BYTES = 16 << 20
HTTP_S = 30.0
"""Seconds to connect and to send; an answer has the call's own deadline."""


class McpSession:
    """One connection, kept open by a task of its own."""

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
    """What pydantic found wrong, in one line; without the values, which may be long."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found[:3])
