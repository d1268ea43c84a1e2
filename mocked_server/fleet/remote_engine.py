"""`RemoteEngine`: an engine in another process, here or on another machine, used as one in this process.

Made by the pipeline for engines that are placed elsewhere; a `FleetEngine`. A `HostProcess` says how its host (`engine_host`) is
started and ended; all else goes over the wire. Invariants: outputs are those that the engine made, in their order; closing an
iterator aborts its request; a host that ended, or says nothing for `SILENT_S`, is a dead engine: each request under way ends with
EngineLost and all that came of it, and `until_dead` returns.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from buffers.errors import EngineDied, EngineError, RequestFailed
from buffers.wire.address import WireError, WireLost
from buffers.wire.connection import Connection
from buffers.wire.session import Message
from mocked_server.fleet.engine_messages import (
    BEAT_S,
    SILENT_S,
    Asked,
    EngineState,
    Failure,
    Item,
    Order,
    WireOutput,
    WireSampled,
    order_to_load,
)
from mocked_server.fleet.member import EngineFigures, EngineLost, Sampled

logger = logging.getLogger(__name__)

_ITEMS = msgspec.msgpack.Decoder(list[Item])
_STATE = msgspec.msgpack.Decoder(EngineState)
_FAILURE = msgspec.msgpack.Decoder(Failure)


class HostProcess(Protocol):
    """The process of an engine's host."""

    async def start(self) -> str:
        """Start it; its address on the wire. Raises EngineError, EngineDied."""
        ...

    async def end(self) -> None:
        """End it, whatever it does. Idempotent."""
        ...


class Rebuilt(Protocol):
    """One request's outputs, from their deltas."""

    def add(self, delta: WireOutput) -> Any | None: ...
    def sampled(self) -> list[Sampled]: ...


class ClientCodec(Protocol):
    """What the client needs to know of the engine's own records (`mocked_server.vllm.hosted.outputs`)."""

    def pack_params(self, params: Any) -> msgspec.Raw: ...
    def pack_sampled(self, sampled: Sampled) -> WireSampled: ...
    def rebuilt(
        self, prompt_token_ids: list[int], params: Any, *, request_id: str, sampled: Sequence[Sampled]
    ) -> Rebuilt: ...


class RemoteEngine:
    """See the module. `weights`: (folder, version) to begin with. `locate`: the folder that its host reads in place of one here."""

    def __init__(
        self,
        host: HostProcess,
        codec: ClientCodec,
        *,
        secret: bytes,
        name: str = "e0",
        weights: tuple[Path, int] | None = None,
        locate: Callable[[Path], Path] = lambda folder: folder,
    ) -> None:
        self._locate = locate
        self.name = name
        self.version = 0
        self._host = host
        self._codec = codec
        self._secret = secret
        self._weights = weights
        self._life = 0
        self._link: _Link | None = None
        self._is_up = False
        self._dead = asyncio.Event()
        self._dead.set()
        self._figures = self._before = _nothing(name)
        """Figures of the present process, and sums of those before."""

    @property
    def is_up(self) -> bool:
        """It takes requests."""
        return self._is_up and self._link is not None and self._link.lost is None

    async def start(self) -> None:
        """Start its host's process, and the engine in it. Raises EngineDied when it ended meanwhile, else EngineError."""
        self._life += 1
        address = await self._host.start()
        try:
            connection = await asyncio.to_thread(Connection, address, secret=self._secret)
        except WireLost as error:
            raise EngineDied(f"the host of engine {self.name} ended before it could be reached: {error}") from error
        except WireError as error:
            raise EngineError(f"the host of engine {self.name} cannot be asked: {error}") from error
        self._link = _Link(connection, on_state=self._see, name=self.name)
        await self._load_first()
        await self._order(Order("start"))
        self._be_up()

    async def restart(self) -> None:
        """A new engine process in place of a dead one, in the same host if that answers. Raises as `start`."""
        self._is_up = False
        link = self._link
        if link is None or link.lost is not None:
            await self.close()
            await self.start()
            return
        self._life += 1
        await self._load_first()  # told again: the host may never have heard
        await self._order(Order("restart"))
        self._be_up()

    async def _load_first(self) -> None:
        if (weights := self._weights) is not None:
            await self._order(order_to_load(self._locate(weights[0]), version=weights[1]))

    def _be_up(self) -> None:
        self._is_up = True
        self._dead = asyncio.Event()

    def _see(self, state: EngineState | None) -> None:
        """What the host says of its engine; None: the host is lost."""
        if state is not None:
            self._figures = state.engine_figures()
            self.version = self._figures.version
        if state is None or (self._is_up and not self._figures.is_up):
            self._is_up = False
            self._dead.set()
        if state is None:
            self._before, self._figures = self._sum(), _nothing(self.name)

    async def until_dead(self) -> None:
        """Returns when its present process is gone."""
        await self._dead.wait()

    async def close(self) -> None:
        """End the engine and its host's process; what it was still answering ends with EngineLost."""
        self._is_up = False
        link, self._link = self._link, None
        if link is not None:
            if link.lost is None:
                with suppress(EngineError, TimeoutError):
                    await asyncio.wait_for(link.order(Order("close")), SILENT_S)
            await link.close()
        self._dead.set()
        await self._host.end()

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: Any,
        *,
        request_id: str,
        sampled: Sequence[Sampled] = (),
        **extra: Any,
    ) -> AsyncGenerator[Any, None]:
        """See `FleetEngine.generate`. Raises RequestRefused, RequestFailed, EngineLost."""
        life = (self.name, self._life)
        link = self._link
        if link is None or not self.is_up:
            raise EngineLost(f"engine {self.name} is down", life=life, sampled=sampled)
        rebuilt = self._codec.rebuilt(prompt_token_ids, params, request_id=request_id, sampled=sampled)
        try:
            rest = [self._codec.pack_sampled(one) for one in sampled if one.output is None]
            asked = Asked(prompt_token_ids, self._codec.pack_params(params), request_id, rest, extra)
            stream = link.ask(asked)
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestFailed(f"request {request_id} cannot be sent to engine {self.name}: {error}") from error
        finished = False
        try:
            while not finished:
                item = await stream.get()
                if item is None:
                    raise EngineLost(
                        f"the host of engine {self.name} was lost: {link.lost}", life=life, sampled=rebuilt.sampled()
                    )
                if item.failure is not None:
                    finished = True
                    if item.failure.kind == EngineLost.__name__:
                        raise EngineLost(
                            item.failure.text,
                            life=life,
                            sampled=rebuilt.sampled(),
                            by_itself=item.failure.by_itself,
                        )
                    raise item.failure.error()
                if item.output is not None:
                    finished = item.output.finished
                    if (output := rebuilt.add(item.output)) is not None:
                        yield output
        finally:
            link.leave(stream, abort=not finished)

    async def load_weights(self, folder: Path, *, version: int) -> float:
        """Sample with these weights from now on. One that is down gets them with its restart; one that starts, before it is up.
        Returns the seconds that it paused."""
        self._weights = folder, version
        if self._link is not None and self._link.lost is None:
            try:
                return await self._order(order_to_load(self._locate(folder), version=version))
            except _HostLost:
                pass
            except EngineError as error:  # it has none that are whole: it starts anew, where these are
                logger.error("engine %s is ended, as it could not load version %d: %s", self.name, version, error)
                await self._host.end()
        return 0.0

    async def sleep(self) -> None:
        """Give memory back until `wake_up`. No effect on one that is down."""
        await self._order_if_up("sleep")

    async def wake_up(self) -> None:
        """Undo `sleep`."""
        await self._order_if_up("wake_up")

    def figures(self) -> EngineFigures:
        """The figures that the host told last, a second ago at most."""
        found = self._sum()
        return replace(found, name=self.name, is_up=self.is_up, version=self.version, restarts=max(0, self._life - 1))

    def _sum(self) -> EngineFigures:
        now, before = self._figures, self._before
        totals = ("sampled_tokens", "prompt_tokens", "cached_tokens", "preemptions")
        return replace(now, **{each: getattr(now, each) + getattr(before, each) for each in totals})

    async def _order_if_up(self, name: str) -> None:
        if self.is_up:
            with suppress(_HostLost):
                await self._order(Order(name))

    async def _order(self, order: Order) -> float:
        """Returns the seconds that the engine paused for it."""
        assert self._link is not None
        state = await self._link.order(order)
        self._see(state)
        return state.paused_s


def _nothing(name: str) -> EngineFigures:
    return EngineFigures(
        name=name, is_up=False, version=0, running=0, waiting=0, tokens_held=0, kv_capacity=0, sampled_tokens=0,
        prompt_tokens=0, cached_tokens=0, preemptions=0, restarts=0,
    )  # fmt: skip


class _HostLost(EngineDied):
    """The host was lost before it had done what it was asked."""


class _Link:
    """A connection to a host, read by a thread; all else is on the event loop. `lost`: why it ended."""

    def __init__(self, connection: Connection, *, on_state: Any, name: str) -> None:
        self.lost: str | None = None
        self._connection = connection
        self._on_state = on_state
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._numbers = 0
        self._streams: dict[int, asyncio.Queue[Item | None]] = {}
        self._orders: dict[int, asyncio.Future[EngineState]] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._read, name=f"wire of engine {name}", daemon=True)
        self._thread.start()

    # In the thread

    def _read(self) -> None:
        heard_at = beaten_at = time.monotonic()
        why = "it was closed"
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
                    self._connection.send("beat")
        except WireError as error:
            why = str(error)
        finally:
            self._soon(self._lose, why)

    def _soon(self, work: Any, *arguments: Any) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(work, *arguments)

    # On the event loop

    def ask(self, asked: Asked) -> asyncio.Queue[Item | None]:
        """The stream of a request's items; None ends it: the host is lost."""
        msgspec.msgpack.encode(asked)  # what cannot travel is refused here, not in the thread
        self._numbers += 1
        stream: asyncio.Queue[Item | None] = asyncio.Queue()
        self._streams[self._numbers] = stream
        if self.lost is not None:
            stream.put_nowait(None)
        self._connection.post("generate", asked, number=self._numbers)
        return stream

    def leave(self, stream: asyncio.Queue[Item | None], *, abort: bool) -> None:
        """Nobody reads it any more. `abort`: its request is to end."""
        number = next((number for number, each in self._streams.items() if each is stream), None)
        if number is not None:
            del self._streams[number]
            if abort and self.lost is None:
                self._connection.post("abort", number=number)

    async def order(self, order: Order) -> EngineState:
        """Have the host do this; its engine's state then. Raises what that raised, or _HostLost."""
        if self.lost is not None:
            raise _HostLost(f"the host of engine {self._name} was lost: {self.lost}")
        self._numbers += 1
        number = self._numbers
        done: asyncio.Future[EngineState] = self._loop.create_future()
        self._orders[number] = done
        self._connection.post("apply", order, number=number)
        try:
            return await done
        finally:
            self._orders.pop(number, None)

    def _take(self, message: Message) -> None:
        try:
            match message.kind:
                case "outputs":
                    for item in _ITEMS.decode(message.body):
                        if (stream := self._streams.get(item.number)) is not None:
                            stream.put_nowait(item)
                    self._connection.post("ack", number=message.number)
                case "beat":
                    self._on_state(_STATE.decode(message.body))
                case "done":
                    self._settle(message.number, state=_STATE.decode(message.body))
                case "failed":
                    self._settle(message.number, error=_FAILURE.decode(message.body).error())
        except (ValueError, TypeError) as error:
            self._lose(f"it said what cannot be said: {error}")

    def _settle(self, number: int, *, state: EngineState | None = None, error: Exception | None = None) -> None:
        if (done := self._orders.get(number)) is not None and not done.done():
            if error is not None:
                done.set_exception(error)
            elif state is not None:
                done.set_result(state)

    def _lose(self, why: str) -> None:
        if self.lost is not None:
            return
        self.lost = why
        if not self._is_closing:
            logger.error("the host of engine %s is lost: %s", self._name, why)
        self._is_closing = True
        self._connection.wake()
        for stream in self._streams.values():
            stream.put_nowait(None)
        for number in list(self._orders):
            self._settle(number, error=_HostLost(f"the host of engine {self._name} was lost: {why}"))
        self._on_state(None)

    async def close(self) -> None:
        """End it; what is under way ends as lost."""
        self._is_closing = True
        self._connection.wake()
        await asyncio.to_thread(self._thread.join)
        self._lose("it was closed")
        await asyncio.to_thread(self._connection.close)
