"""A server process's connection to its run: prompts go out, answers come back, episodes are asked for.

Held by `server_process`. One thread has the connection; all else is on the event loop. `RunLink` is what `QueueClient` takes for
its prompt queue. Invariants: prompts of one turn of the event loop go together; outputs reach their request in order; when the run
is gone every request that waits fails, and `until_lost` returns.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from buffers.errors import EngineError
from buffers.prompt_queue import Prompt, Reply
from buffers.wire.address import WireError
from buffers.wire.connection import Connection
from buffers.wire.session import Message
from mocked_server.fleet.engine_messages import WireOutput
from mocked_server.processes.messages import ACK_EVERY, BEAT_S, SILENT_S, Adopted, Figures, Item, RunState, WirePrompt

_ITEMS = msgspec.msgpack.Decoder(list[Item])
_ADOPTED = msgspec.msgpack.Decoder(Adopted)
_STATE = msgspec.msgpack.Decoder(RunState)
_CLOSED = msgspec.msgpack.Decoder(tuple[str, str])


class AnswerCodec(Protocol):
    """What the link needs to know of the engine's own records (`mocked_server.vllm.hosted.outputs`)."""

    def pack_params(self, params: Any) -> msgspec.Raw: ...
    def output_of(self, wire: WireOutput, *, request_id: str) -> Any: ...


class RunLink:
    """See the module. `on_closed(episode_id, reason)`: the run says that an episode ended. `figures`: told every second, once
    there are some."""

    def __init__(
        self,
        connection: Connection,
        codec: AnswerCodec,
        *,
        process: int,
        on_closed: Callable[[str, str], object],
        figures: Callable[[], Figures | None],
    ) -> None:
        self.is_full = False
        self.lost: str | None = None
        self._connection = connection
        self._codec = codec
        self._on_closed = on_closed
        self._figures = figures
        self._loop = asyncio.get_running_loop()
        self._numbers = 0
        self._replies: dict[int, tuple[str, Reply]] = {}
        """Number -> (request, its way back)."""
        self._adopting: dict[int, asyncio.Future[Adopted]] = {}
        self._waiting: list[tuple[int, WirePrompt]] = []
        self._gone = asyncio.Event()
        self._is_closing = False
        connection.post("hello", process)
        self._thread = threading.Thread(target=self._read, name="wire to the run", daemon=True)
        self._thread.start()

    def put(self, prompt: Prompt) -> None:
        """Send a prompt to be generated; its reply gets what comes of it. Raises EngineError when the run is gone."""
        if self.lost is not None:
            raise EngineError(f"the run is gone: {self.lost}")
        assert prompt.episode_id is not None, "a server process has prompts of its episodes only"
        self._numbers += 1
        number = self._numbers
        packed = WirePrompt(
            prompt.request_id, prompt.episode_id, prompt.group_id, prompt.prompt_token_ids.astype("<i4").tobytes(),
            self._codec.pack_params(prompt.sampling.params), dict(prompt.sampling.extra), prompt.parent, prompt.memo,
            prompt.first_trained,
        )  # fmt: skip
        self._replies[number] = (prompt.request_id, prompt.reply)
        prompt.reply.on_abandon(lambda: self._abandon(number))
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append((number, packed))

    async def adopt(self, episode_id: str) -> Adopted:
        """Ask for an episode. Raises EngineError when the run is gone."""
        if self.lost is not None:
            raise EngineError(f"the run is gone: {self.lost}")
        self._numbers += 1
        adopting: asyncio.Future[Adopted] = self._loop.create_future()
        self._adopting[self._numbers] = adopting
        self._connection.post("adopt", episode_id, number=self._numbers)
        return await adopting

    async def until_lost(self) -> str:
        """Why the run is gone, once it is."""
        await self._gone.wait()
        return self.lost or ""

    async def close(self) -> None:
        """End the connection."""
        self._is_closing = True
        self._connection.wake()
        await asyncio.to_thread(self._thread.join)
        self._lose("the server is shutting down")
        await asyncio.to_thread(self._connection.close)

    # In the thread

    def _read(self) -> None:
        heard_at = beaten_at = time.monotonic()
        why = "the server is shutting down"
        try:
            while not self._is_closing:
                message = self._connection.receive(max(0.0, beaten_at + BEAT_S - time.monotonic()))
                now = time.monotonic()
                if message is not None:
                    heard_at = now
                    self._soon(self._take, message)
                elif now - heard_at > SILENT_S:
                    why = f"it gave no sign of life for {SILENT_S:.0f} s"
                    return
                if now - beaten_at >= BEAT_S:
                    beaten_at = now
                    self._soon(self._beat)
        except WireError as error:
            why = str(error)
        finally:
            self._soon(self._lose, why)

    def _soon(self, work: Any, *arguments: Any) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(work, *arguments)

    # On the event loop

    def _beat(self) -> None:
        if self.lost is None and (figures := self._figures()) is not None:
            self._connection.post("beat", figures)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting and self.lost is None:
            self._connection.post("prompts", waiting)

    def _abandon(self, number: int) -> None:
        if self._replies.pop(number, None) is None or self.lost is not None:
            return
        self._flush()  # it may be among them
        self._connection.post("abandon", number=number)

    def _take(self, message: Message) -> None:
        try:
            match message.kind:
                case "answers":
                    for item in _ITEMS.decode(message.body):
                        self._deliver(item)
                    if message.number % ACK_EVERY == 0:
                        self._connection.post("ack", number=message.number)
                case "adopted":
                    adopting = self._adopting.pop(message.number, None)
                    if adopting is not None and not adopting.done():
                        adopting.set_result(_ADOPTED.decode(message.body))
                case "closed":
                    self._on_closed(*_CLOSED.decode(message.body))
                case "beat":
                    self.is_full = _STATE.decode(message.body).is_full
        except (ValueError, TypeError) as error:
            self._lose(f"it said what cannot be said: {error}")

    def _deliver(self, item: Item) -> None:
        request_id, reply = self._replies.get(item.number, ("", None))
        if reply is None:  # its agent hung up
            return
        output = None if item.output is None else self._codec.output_of(item.output, request_id=request_id)
        if item.failure is not None:
            del self._replies[item.number]
            reply.fail(item.failure.error())
        elif item.responses is not None:
            del self._replies[item.number]
            reply.finish(*(each.response(request_id) for each in item.responses), last=output)
        else:
            reply.push(output)

    def _lose(self, why: str) -> None:
        if self.lost is not None:
            return
        self.lost = why
        self._is_closing = True
        self._connection.wake()
        gone = EngineError(f"the run is gone: {why}")
        for _, reply in self._replies.values():
            reply.fail(gone)
        self._replies.clear()
        for adopting in self._adopting.values():
            if not adopting.done():
                adopting.set_exception(gone)
        self._gone.set()
