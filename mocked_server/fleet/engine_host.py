"""Serves an engine's token streams to another process: over the wire, all requests' deltas together.

Runs in the process that has the engine (`mocked_server.vllm.hosted`), on that engine's event loop; `remote_engine` is the other
side. Invariants: the outputs of a request go in their order; what waits for a slow reader is bounded by what was sampled; a
client that is gone, or was silent for `SILENT_S`, has its requests aborted; the host never restarts its engine by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from buffers.errors import EngineError, UnderstudyError
from buffers.wire.address import Way, WireAddress
from buffers.wire.listener import Listener, Peer
from buffers.wire.session import Message
from mocked_server.fleet.engine_messages import (
    MAX_UNREAD,
    SILENT_S,
    Asked,
    EngineState,
    Failure,
    Item,
    Order,
    WireOutput,
    WireSampled,
)
from mocked_server.fleet.member import FleetEngine, Sampled

logger = logging.getLogger(__name__)

_ASKED = msgspec.msgpack.Decoder(Asked)
_ORDER = msgspec.msgpack.Decoder(Order)


class HostCodec(Protocol):
    """What the host needs to know of the engine's own records (`mocked_server.vllm.hosted.outputs`)."""

    def params_of(self, data: msgspec.Raw) -> Any:
        """SamplingParams that ask for deltas. Raises ValueError or TypeError for what is none."""
        ...

    def pack_output(self, output: Any) -> WireOutput: ...
    def sampled_of(self, sampled: WireSampled) -> Sampled: ...


@dataclass(slots=True, eq=False)
class _Client:
    """One connection: its requests under way, and what waits to be sent to it."""

    peer: Peer
    streams: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    waiting: list[Item] = field(default_factory=list)
    sent: int = 0
    read: int = 0
    """Batches sent, and those that were acknowledged."""
    is_due: bool = False
    """They will be sent soon."""


class EngineHost:
    """Listens from `start` until `close`. `address`: where."""

    def __init__(
        self, engine: FleetEngine, codec: HostCodec, *, secret: bytes, way: Way, host: str = "127.0.0.1"
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._secret, self._way, self._host = secret, way, host
        self._clients: dict[Peer, _Client] = {}
        self._orders: set[asyncio.Task[None]] = set()
        self._dying: asyncio.Task[None] | None = None
        self._listener: Listener | None = None

    @property
    def address(self) -> WireAddress:
        assert self._listener is not None
        return self._listener.address

    async def start(self) -> None:
        """Take connections. Raises OSError."""
        loop = self._loop = asyncio.get_running_loop()

        def soon(work: Any, *arguments: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(work, *arguments)

        def take(peer: Peer, message: Message) -> None:
            soon(self._take, peer, message.kind, message.number, bytes(message.body))

        self._listener = Listener(
            secret=self._secret, way=self._way, host=self._host, name="engine wire", on_message=take,
            on_tick=lambda: soon(self._beat), on_gone=lambda peer: soon(self._forget, peer),
        )  # fmt: skip

    async def close(self) -> None:
        """End all connections, their requests, and the engine."""
        if self._listener is not None:
            await asyncio.to_thread(self._listener.close)
        for client in list(self._clients.values()):
            self._forget(client.peer)
        tasks = [*self._orders, *filter(None, [self._dying])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._engine.close()

    def _take(self, peer: Peer, kind: str, number: int, body: bytes) -> None:
        if peer.is_gone:
            return
        client = self._clients.setdefault(peer, _Client(peer))
        try:
            match kind:
                case "generate":
                    asked = _ASKED.decode(body)
                    stream = self._stream(client, number, asked)
                    client.streams[number] = asyncio.create_task(stream, name=f"host {asked.request_id}")
                case "abort":
                    if (task := client.streams.pop(number, None)) is not None:
                        task.cancel()
                case "ack":
                    client.read = max(client.read, number)
                    self._flush(client)
                case "apply":
                    task = asyncio.create_task(self._obey(client, number, _ORDER.decode(body)), name="obey an order")
                    self._orders.add(task)
                    task.add_done_callback(self._orders.discard)
                case "beat":
                    pass
                case _:
                    raise UnderstudyError(
                        f"an engine's host must be asked to generate, abort, apply or ack, got {kind:.40}"
                    )
        except (UnderstudyError, ValueError) as error:
            logger.warning("a client of engine %s said what cannot be said: %s", self._engine.name, error)
            self._end(peer, str(error))

    async def _stream(self, client: _Client, number: int, asked: Asked) -> None:
        """The border around one request: what it raises goes to its client, and ends nothing else."""
        try:
            async with aclosing(self._outputs(asked)) as outputs:
                async for output in outputs:
                    self._send(client, Item(number, self._codec.pack_output(output)))
        except (UnderstudyError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, OSError) as error:
            if not isinstance(error, UnderstudyError):
                logger.exception("request %s failed", asked.request_id)
            self._send(client, Item(number, None, Failure.of(error)))
        finally:
            client.streams.pop(number, None)

    def _outputs(self, asked: Asked) -> AsyncGenerator[Any, None]:
        sampled = [self._codec.sampled_of(one) for one in asked.sampled]
        return self._engine.generate(
            asked.prompt_token_ids, self._codec.params_of(asked.params), request_id=asked.request_id, sampled=sampled,
            **asked.extra,
        )  # fmt: skip

    def _send(self, client: _Client, item: Item) -> None:
        client.waiting.append(item)
        if not client.is_due:
            client.is_due = True
            # After the tasks that this step of the engine's has woken: so theirs go together.
            self._loop.call_soon(self._loop.call_soon, self._flush, client)

    def _flush(self, client: _Client) -> None:
        client.is_due = False
        if client.waiting and client.sent - client.read < MAX_UNREAD:
            client.sent += 1
            client.peer.send("outputs", client.waiting, number=client.sent)
            client.waiting = []

    async def _obey(self, client: _Client, number: int, order: Order) -> None:
        engine, paused_s = self._engine, 0.0
        try:
            match order.name:
                case "start":
                    await engine.start()
                    self._watch()
                case "restart":
                    await engine.restart()
                    self._watch()
                case "load_weights":
                    paused_s = await engine.load_weights(Path(order.folder), version=order.version)
                case "sleep":
                    await engine.sleep()
                case "wake_up":
                    await engine.wake_up()
                case "close":
                    await engine.close()
                case name:
                    raise UnderstudyError(
                        f"an order must be start, restart, load_weights, sleep, wake_up or close, got {name:.40}"
                    )
        except Exception as error:  # whatever it is: the client waits for the answer
            logger.warning("engine %s could not %s: %s", engine.name, order.name, error)
            if not isinstance(error, EngineError):
                error = EngineError(f"engine {engine.name} could not {order.name}: {type(error).__name__}: {error}")
            client.peer.send("failed", Failure.of(error), number=number)
            return
        client.peer.send("done", EngineState.of(engine.figures(), paused_s=paused_s), number=number)

    def _watch(self) -> None:
        if self._dying is not None:
            self._dying.cancel()
        self._dying = asyncio.create_task(self._tell_death(), name="tell the engine's death")

    async def _tell_death(self) -> None:
        await self._engine.until_dead()
        self._beat()

    def _state(self) -> EngineState:
        return EngineState.of(self._engine.figures())

    def _beat(self) -> None:
        state, silent = self._state(), time.monotonic() - SILENT_S
        for client in list(self._clients.values()):
            if client.peer.heard_at < silent:
                logger.warning(
                    "a client of engine %s was silent for %.0f s: its requests end", self._engine.name, SILENT_S
                )
                self._end(client.peer, "a client must say something every second, got nothing")
                self._forget(client.peer)
            else:
                client.peer.send("beat", state)

    def _end(self, peer: Peer, why: str) -> None:
        if (listener := self._listener) is not None:
            listener.call(partial(listener.end, peer, why))

    def _forget(self, peer: Peer) -> None:
        if (client := self._clients.pop(peer, None)) is not None:
            for task in client.streams.values():
                task.cancel()
