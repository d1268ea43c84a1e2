"""Calls the methods of a `Service` in another process: `Client` waits for each answer, `AsyncClient` for many at once.

A method is named by the function itself (`client.call(LedgerServer.events, ...)`); its signature says what travels. Invariants:
items of a call are taken in their order; without an answer the outcome is not known (WireLost): the same may be sent again over
a new connection; a client never connects again by itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from typing import Any, Self

import msgspec

from buffers.errors import UnderstudyError
from buffers.wire.address import WireAddress, WireError, WireLost
from buffers.wire.connection import Connection
from buffers.wire.rpc import ACK_EVERY, BEAT_S, Answer, Item, RemoteError, SentCall, method_of, pack
from buffers.wire.service import Service
from buffers.wire.session import Message

logger = logging.getLogger(__name__)

Take = Callable[[Any, UnderstudyError | None, bool], object]
"""Gets (an item or the answer, or an error, whether it is the last)."""

MOST_TOGETHER = 64 << 20
"""Bytes of arguments after which no further call goes in the same message."""
_ANSWER = msgspec.msgpack.Decoder(Answer)
_ITEMS = msgspec.msgpack.Decoder(list[Item])


class Client:
    """One thread at a time. An answer of which nothing is heard for `answer_s` is lost. Making one, and every method, raises
    WireError."""

    def __init__(self, address: str | WireAddress, *, secret: bytes, answer_s: float) -> None:
        self._answer_s = answer_s
        self._number = 0
        self._connection = Connection(address, secret=secret)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def call(self, method: Callable[..., Any], /, **arguments: Any) -> Any:
        """What the method answers. Raises what it raises."""
        return self.answer(method, self.begin(method, **arguments))

    def begin(self, method: Callable[..., Any], /, **arguments: Any) -> int:
        """Call it, and go on. The number to ask `answer` for, in the order of the calls."""
        self._number += 1
        self._connection.send(method.__name__, pack(arguments), number=self._number)
        return self._number

    def answer(self, method: Callable[..., Any], number: int) -> Any:
        """What a call that was begun answers. Raises what it raises."""
        while (message := self._connection.receive(self._answer_s)) is not None:
            if message.kind == "answer" and message.number == number:
                answer = _ANSWER.decode(message.body)
                if answer.error is not None:
                    raise answer.error.raised()
                return method_of(method).answer.decode(answer.value)
        raise WireLost(f"{self._connection.address} must answer within {self._answer_s:.0f} s; send again")


class AsyncClient:
    """Many calls at once, on the running event loop: a thread reads the connection. `name`: of the other side; it is lost after
    `silent_s` without a word. `on_state` gets what it says of itself; `on_lost` is called when it is lost, and `lost_as` makes the
    error of its calls then. `figures`: of this side, sent every second, None: there are none yet; without it the thread says that
    this side is there."""

    def __init__(
        self,
        connection: Connection,
        service: type[Service],
        *,
        name: str,
        silent_s: float,
        on_state: Callable[[Any], object],
        on_lost: Callable[[], object],
        lost_as: Callable[[str], UnderstudyError],
        figures: Callable[[], Any] | None = None,
    ) -> None:
        self.lost: str | None = None
        self._connection = connection
        self._service = service
        self._state = method_of(service.state).answer
        self._name = name
        self._silent_s = silent_s
        self._on_state, self._on_lost, self._lost_as = on_state, on_lost, lost_as
        self._figures = figures
        self._loop = asyncio.get_running_loop()
        self._numbers = 0
        self._pending: dict[int, tuple[msgspec.msgpack.Decoder[Any], Take]] = {}
        self._waiting: list[SentCall] = []
        """Calls of this turn of the event loop, which go together."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._read, name=f"wire to {name}", daemon=True)
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
                elif now - heard_at > self._silent_s:
                    why = f"it gave no sign of life for {self._silent_s:.0f} s"
                    return
                if now - beaten_at >= BEAT_S:
                    beaten_at = now
                    if self._figures is None:
                        self._connection.send("beat", {})
                    else:
                        self._soon(self._send_figures)
        except WireError as error:
            why = str(error)
        finally:
            self._soon(self._lose, why)

    def _soon(self, work: Any, *arguments: Any) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(work, *arguments)

    # On the event loop

    def begin(self, method: Callable[..., Any], take: Take, /, **arguments: Any) -> int:
        """Call a method. The call's number. Raises `lost_as` where the other side is lost, TypeError, ValueError or
        OverflowError for what cannot travel."""
        if self.lost is not None:
            raise self._error()
        body = pack(arguments)
        self._numbers += 1
        self._pending[self._numbers] = (method_of(method).answer, take)
        self._post(self._numbers, method, body)
        return self._numbers

    async def call(self, method: Callable[..., Any], /, **arguments: Any) -> Any:
        """What the method answers. Raises what it raises, else as `begin`."""
        done: asyncio.Future[Any] = self._loop.create_future()

        def take(value: Any, error: UnderstudyError | None, _: bool) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(value)

        number = self.begin(method, take, **arguments)
        try:
            return await done
        finally:
            self._pending.pop(number, None)

    def tell(self, method: Callable[..., Any], /, **arguments: Any) -> None:
        """Call it and want no answer. No effect where the other side is lost."""
        if self.lost is None:
            self._post(0, method, pack(arguments))

    def abort(self, number: int) -> None:
        """Nobody waits for this call any more. No effect on one that has ended."""
        if self._pending.pop(number, None) is not None and self.lost is None:
            self._flush()  # it may be among them
            self._connection.post("abort", number=number)

    async def close(self) -> None:
        """End it; what is under way ends as lost."""
        self._is_closing = True
        self._connection.wake()
        await asyncio.to_thread(self._thread.join)
        self._lose("it was closed")
        await asyncio.to_thread(self._connection.close)

    def _post(self, number: int, method: Callable[..., Any], arguments: msgspec.Raw) -> None:
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append((number, method.__name__, arguments))

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        while waiting and self.lost is None:
            number = 1 + sum(size < MOST_TOGETHER for size in accumulate(len(call[2]) for call in waiting[:-1]))
            self._connection.post("calls", waiting[:number])
            waiting = waiting[number:]

    def _send_figures(self) -> None:
        assert self._figures is not None
        if self.lost is None and (figures := self._figures()) is not None:
            self.tell(self._service.beat, figures=figures)

    def _take(self, message: Message) -> None:
        if self.lost is not None:
            return
        try:
            match message.kind:
                case "items":
                    for item in _ITEMS.decode(message.body):
                        self._deliver(item.number, item.value, item.error, is_last=item.is_last)
                    if message.number % ACK_EVERY == 0:
                        self._connection.post("ack", number=message.number)
                case "answer":
                    answer = _ANSWER.decode(message.body)
                    self._on_state(self._state.decode(answer.state))
                    self._deliver(message.number, answer.value, answer.error, is_last=True)
                case "beat":
                    self._on_state(self._state.decode(message.body))
        except (ValueError, TypeError) as error:
            self._lose(f"it sent an invalid message: {error}")

    def _deliver(self, number: int, value: msgspec.Raw, error: RemoteError | None, *, is_last: bool) -> None:
        if (pending := self._pending.get(number)) is None:
            return  # nobody waits for it any more
        if is_last:
            del self._pending[number]
        decoder, take = pending
        if error is not None:
            take(None, error.raised(), is_last)
        else:
            take(decoder.decode(value), None, is_last)

    def _error(self) -> UnderstudyError:
        return self._lost_as(f"{self._name} was lost: {self.lost}")

    def _lose(self, why: str) -> None:
        if self.lost is not None:
            return
        self.lost = why
        if not self._is_closing:
            logger.error("%s", self._error())
        self._is_closing = True
        self._connection.wake()
        pending, self._pending = self._pending, {}
        for _, take in pending.values():
            take(None, self._error(), True)
        self._on_lost()
