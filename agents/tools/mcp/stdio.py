"""The process of an MCP server that speaks on standard input and output, and what it may say.

Used by `agents.tools.mcp.server` as the `mcp` package's transport; the package's own keeps a line without end in memory and leaves
behind what a server started. Invariants: at most `MAX_MESSAGE_BYTES` of what a server writes are kept; one that writes more in one
message, or too much unrequested output, is killed, and `fault` says so; when the connection ends, nothing of the server's
process group is alive, and it ends with this process (`agents.fence`). A grandchild that made itself a group of its own
is out of reach. It neither knows what a message means nor starts a dead server again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from types import TracebackType

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import (
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)

from agents import fence
from env_adapters.child_process import open_pipe, signal_group

MAX_MESSAGE_BYTES = 4 << 20
MAX_UNASKED_MESSAGES = 10_000
"""Notifications, requests and lines that are no messages, between two answers to requests of ours."""
MAX_UNASKED_BYTES = 16 << 20
MAX_REQUESTS = 100
"""The server's own, between two answers: all that this side answers is a ping."""
CHUNK_BYTES = 1 << 16
LAST_WORDS_BYTES = 2000
GRACE_S = 2.0
"""Seconds for the server to end by itself when its input ends; and again after SIGTERM."""
ENDING_S = 1.0
"""Seconds for output that still lies in the pipes when the process has ended; what it left behind may hold them open."""


class _Breach(Exception):
    """The server said more than it may."""


class StdioServer:
    """`async with` it: starts the program, gives the streams that `mcp.Client` takes. Raises OSError when it cannot be started."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], folder: Path) -> None:
        self._command = list(command)
        self._env = get_default_environment() | dict(env)
        self._folder = folder
        self._stack = AsyncExitStack()
        self._process: asyncio.subprocess.Process
        self._flow: _Flow
        self._asked: set[str] = set()
        self._unasked_messages = self._unasked_bytes = self._requests = 0
        self._said = b""
        self._no_message = b""
        self.fault = ""
        """Why this side ended the connection, if it did."""

    def last_words(self) -> str:
        """The end of what the server wrote to stderr; and of what it wrote to stdout, where only messages belong."""
        words = " ".join(self._said.decode(errors="replace").split())
        noise = " ".join(self._no_message.decode(errors="replace").split())
        return (f"; it said: {words}" if words else "") + (f"; no message, on stdout: {noise}" if noise else "")

    async def __aenter__(
        self,
    ) -> tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]:
        to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
        async with AsyncExitStack() as stack:
            for stream in (to_session, from_server, to_server, from_session):
                stack.callback(stream.close)
            stdin, stdout, stderr = await self._start(stack)
            reading = asyncio.create_task(self._read(stdout, to_session), name="mcp stdout")
            noting = asyncio.create_task(self._note(stderr), name="mcp stderr")
            writing = asyncio.create_task(self._write(stdin, from_session), name="mcp stdin")
            watching = asyncio.create_task(self._watch(reading, noting, writing, to_session), name="mcp process")
            for task in (reading, noting, writing, watching):
                stack.callback(task.cancel)
            stack.push_async_callback(self._stop, stdin, from_server)
            self._stack = stack.pop_all()
        return from_server, to_server

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(
        self, stack: AsyncExitStack
    ) -> tuple[asyncio.WriteTransport, asyncio.StreamReader, asyncio.StreamReader]:
        """The process, and its pipes: of our own, as asyncio's would keep `wait` until everybody has closed them."""
        with ExitStack() as childs:
            stdout, stderr = await open_pipe(childs), await open_pipe(childs)
            for pipe in (stdout, stderr):
                stack.callback(pipe.transport.close)
            its_in, our_in = os.pipe()
            childs.callback(os.close, its_in)
            stdin, self._flow = await asyncio.get_running_loop().connect_write_pipe(
                _Flow, os.fdopen(our_in, "wb", buffering=0)
            )
            stack.callback(self._abort, stdin)
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", fence.__file__, "follow", str(os.getpid())),
                *self._command,
                env=self._env,
                cwd=self._folder,
                stdin=its_in,
                stdout=stdout.writing,
                stderr=stderr.writing,
                start_new_session=True,
            )
        return stdin, stdout.reader, stderr.reader

    async def _read(
        self, stdout: asyncio.StreamReader, to_session: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        try:
            line = bytearray()
            while chunk := await stdout.read(CHUNK_BYTES):
                first, *others = chunk.split(b"\n")
                line += first
                for other in others:
                    await self._take(bytes(line), to_session)
                    line = bytearray(other)
                if len(line) > MAX_MESSAGE_BYTES:
                    raise _Breach(f"its messages must be at most {MAX_MESSAGE_BYTES} bytes, got a longer one")
        except _Breach as breach:
            self.fault = str(breach)
            signal_group(self._process.pid, signal.SIGKILL)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            # The session is over. What the server still writes is let go, so that it comes to its own end.
            while await stdout.read(CHUNK_BYTES):
                pass

    async def _take(self, line: bytes, to_session: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """One line. Only answers to our requests and the server's own requests reach the session: its notifications mean
        nothing to us."""
        if len(line) > MAX_MESSAGE_BYTES:
            raise _Breach(f"its messages must be at most {MAX_MESSAGE_BYTES} bytes, got one of {len(line)}")
        message: JSONRPCMessage | None
        try:
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            message = self._spoiled_answer(line)
            self._no_message = line[:LAST_WORDS_BYTES]
        if isinstance(message, JSONRPCResponse | JSONRPCError) and str(message.id) in self._asked:
            self._asked.discard(str(message.id))
            self._unasked_messages = self._unasked_bytes = self._requests = 0
            await to_session.send(SessionMessage(message))
            return
        self._unasked_messages += 1
        self._unasked_bytes += len(line)
        self._requests += isinstance(message, JSONRPCRequest)
        if self._requests > MAX_REQUESTS:
            raise _Breach(f"it may ask at most {MAX_REQUESTS} times between two answers, got more")
        if self._unasked_messages > MAX_UNASKED_MESSAGES or self._unasked_bytes > MAX_UNASKED_BYTES:
            raise _Breach(
                f"it may say at most {MAX_UNASKED_MESSAGES} lines and {MAX_UNASKED_BYTES} bytes between two answers, got more"
            )
        if isinstance(message, JSONRPCRequest):
            await to_session.send(SessionMessage(message))

    def _spoiled_answer(self, line: bytes) -> JSONRPCError | None:
        """The refusal of what answers a request of ours and is no message of MCP's (half a surrogate pair, no result, too deep);
        None where it answers none."""
        try:
            number = json.loads(line)["id"]
        except (ValueError, TypeError, LookupError, RecursionError):
            return None
        if not isinstance(number, int | str) or str(number) not in self._asked:
            return None
        reason = ErrorData(code=PARSE_ERROR, message="what it answered is no message as MCP has it")
        return JSONRPCError(jsonrpc="2.0", id=number, error=reason)

    async def _note(self, stderr: asyncio.StreamReader) -> None:
        while chunk := await stderr.read(CHUNK_BYTES):
            self._said = (self._said + chunk)[-LAST_WORDS_BYTES:]

    async def _write(
        self, stdin: asyncio.WriteTransport, from_session: MemoryObjectReceiveStream[SessionMessage]
    ) -> None:
        async for given in from_session:
            message = given.message
            if isinstance(message, JSONRPCRequest):
                self._asked.add(str(message.id))
            elif isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
                self._asked.discard(str((message.params or {}).get("requestId")))
            # Not pydantic's JSON: that refuses half a surrogate pair, which a model may write.
            line = json.dumps(message.model_dump(mode="json", by_alias=True, exclude_unset=True))
            stdin.write(line.encode() + b"\n")
            await self._flow.has_room.wait()
            if self._flow.is_lost:
                return

    async def _watch(
        self,
        reading: asyncio.Task[None],
        noting: asyncio.Task[None],
        writing: asyncio.Task[None],
        to_session: MemoryObjectSendStream[SessionMessage | Exception],
    ) -> None:
        """Tells the session when nothing comes any more: the process ended, or its output did."""
        exited = asyncio.create_task(self._process.wait(), name="mcp exit")
        try:
            await asyncio.wait({reading, writing, exited}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({reading, noting}, timeout=ENDING_S)
        finally:
            exited.cancel()
        writing.cancel()
        to_session.close()

    async def _stop(
        self,
        stdin: asyncio.WriteTransport,
        from_server: MemoryObjectReceiveStream[SessionMessage | Exception],
    ) -> None:
        """End the whole process group: by the end of its input, by SIGTERM, by SIGKILL. The last also when this is cancelled."""
        try:
            from_server.close()
            stdin.close()
            if not await self._ends():
                signal_group(self._process.pid, signal.SIGTERM)
                await self._ends()
        finally:
            signal_group(self._process.pid, signal.SIGKILL)  # also what the server left behind
        await self._process.wait()

    async def _ends(self) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), GRACE_S)
            return True
        return False

    def _abort(self, stdin: asyncio.WriteTransport) -> None:
        """Let go what was not read; a pipe that is closed already cannot be aborted."""
        if not self._flow.is_lost:
            stdin.abort()


class _Flow(asyncio.BaseProtocol):
    """Says whether the server reads what it is sent."""

    def __init__(self) -> None:
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.is_lost = False

    def pause_writing(self) -> None:
        self.has_room.clear()

    def resume_writing(self) -> None:
        self.has_room.set()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.is_lost = True
        self.has_room.set()
