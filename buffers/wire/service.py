"""`Service`: methods that other processes call over the wire, on an event loop or in the listener's own thread.

A subclass has the methods, each marked `rpc.remote`: a ledger's (`buffers.remote.ledger_server`), published weights
(`buffers.weights.version_server`), an engine's (`mocked_server.vllm.hosted.engine_host`), the run's for its server processes
(`mocked_server.processes.prompt_host`). What a method raises at once, for what it must not be asked, ends the connection that
asked; what its coroutine or its later answer raises is the answer. Invariants: calls of a connection begin in their order; items of
a stream go in theirs, those of all streams of one step together; what waits for a slow reader is bounded by what is made for it;
calls of a connection that has left, or was silent, are aborted.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from buffers.errors import UnderstudyError
from buffers.wire.address import Way, WireAddress
from buffers.wire.listener import Listener, Peer
from buffers.wire.rpc import (
    MAX_UNREAD,
    NOTHING,
    Answer,
    Item,
    Later,
    RemoteError,
    SentCall,
    arguments_of,
    method_of,
    pack,
    remote,
)
from buffers.wire.session import Message

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CALLS = msgspec.msgpack.Decoder(list[SentCall])


@dataclass(slots=True, eq=False)
class Caller:
    """One connection: its calls under way, and the items that wait to be sent to it."""

    peer: Peer
    calls: dict[int, Call[Any]] = field(default_factory=dict)
    waiting: list[Item] = field(default_factory=list)
    sent: int = 0
    read: int = 0
    """Batches sent, and those that were acknowledged."""
    is_due: bool = False
    """They will be sent soon."""


@dataclass(slots=True, eq=False)
class Call(Generic[T]):
    """One call under way. Used where its service runs."""

    number: int
    caller: Caller
    send: Callable[[Caller, Item], None]
    on_abort: Callable[[], object] = lambda: None
    """Called when nobody waits for it any more."""

    @property
    def is_open(self) -> bool:
        """Its caller waits for it."""
        return self.caller.calls.get(self.number) is self

    def push(self, item: T, *, is_last: bool = False) -> None:
        """Send one item. No effect on a call that has ended."""
        if self.is_open:
            self._send(Item(self.number, pack(item), None, is_last))

    def fail(self, error: BaseException) -> None:
        """End the stream with this error. No effect on a call that has ended."""
        if self.is_open:
            self._send(Item(self.number, NOTHING, RemoteError.of(error), is_last=True))

    def leave(self) -> None:
        """End it without a word, as its caller has left."""
        if self.is_open:
            del self.caller.calls[self.number]
            self.on_abort()

    def _send(self, item: Item) -> None:
        if item.is_last:
            del self.caller.calls[self.number]
        self.send(self.caller, item)


class Service:
    """See the module. `silent_s`: a connection that said nothing for so long is ended, and this side says to each every second that
    it is there; None: it does so only to those that wait for an answer."""

    def __init__(
        self, *, name: str, secret: bytes, way: Way, host: str = "127.0.0.1", silent_s: float | None = None
    ) -> None:
        self._name = name
        self._wire: dict[str, Any] = {"secret": secret, "way": way, "host": host, "name": f"wire of {name}"}
        self._silent_s = silent_s
        self._methods = {
            name: function
            for name, function in inspect.getmembers(type(self), inspect.isfunction)
            if "is_remote" in vars(function)
        }
        self._callers: dict[Peer, Caller] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None

    @property
    def address(self) -> WireAddress:
        """The address that clients connect to."""
        assert self._listener is not None, "listen() first"
        return self._listener.address

    def listen(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Take calls: on this event loop, else in the listener's thread, where no method may wait. Raises OSError."""
        self._loop = loop
        self._listener = Listener(
            on_message=lambda peer, message: self._run(self._take, peer, message),
            on_tick=lambda: self._run(self._beat),
            on_gone=lambda peer: self._run(self._forget, peer),
            **self._wire,
        )

    def close(self) -> None:
        """End all connections. What was asked and has no answer yet is done or not. Idempotent."""
        if self._listener is not None:
            self._listener.close()

    async def aclose(self) -> None:
        """`close`, on the event loop, which also ends all that is under way."""
        await asyncio.to_thread(self.close)
        for peer in list(self._callers):
            self._forget(peer)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start_task(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Run this until it ends or the service does."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # What a subclass may say

    def state(self) -> Any:
        """What goes with each answer, and every second to who waits."""
        return None

    def on_silent(self, caller: Caller) -> None:
        """It said nothing for `silent_s`."""
        logger.warning("a client of %s was silent for %.0f s: its calls end", self._name, self._silent_s)
        self.end(caller, "a client must say something every second, got nothing")

    @remote
    def beat(self, sender: Caller, figures: None = None) -> None:
        """The client is there. `figures`: what it says of itself."""

    def end(self, caller: Caller, why: str) -> None:
        """End this connection, which reads why. What it said before and was not looked at yet is not done."""
        assert self._listener is not None
        caller.peer.is_gone = True
        self._listener.call(partial(self._listener.end, caller.peer, why))
        self._forget(caller.peer)

    # What clients say

    def _run(self, work: Callable[..., object], *arguments: Any) -> None:
        if self._loop is None:
            work(*arguments)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work, *arguments)

    def _take(self, peer: Peer, message: Message) -> None:
        if peer.is_gone:
            return
        caller = self._callers.setdefault(peer, Caller(peer))
        try:
            match message.kind:
                case "abort":
                    if (call := caller.calls.get(message.number)) is not None:
                        call.leave()
                case "ack":
                    caller.read = max(caller.read, message.number)
                    self._flush(caller)
                case "calls":
                    for number, name, arguments in _CALLS.decode(message.body):
                        self._begin(caller, number, name, arguments)
                case name:
                    self._begin(caller, message.number, name, message.body)
        except (UnderstudyError, ValueError, LookupError, TypeError, RecursionError, OSError) as error:
            if self._loop is None:
                raise UnderstudyError(str(error)) from error  # which ends the connection
            logger.error("a client of %s sent an invalid message: %s", self._name, error)
            self.end(caller, str(error))

    def _begin(self, caller: Caller, number: int, name: str, sent: msgspec.Raw) -> None:
        if name not in self._methods or number in caller.calls:
            raise UnderstudyError(
                f"{self._name} must be asked for one of {', '.join(self._methods)}, each call with a number of its own, got "
                f"{name:.40} {number}"
            )
        arguments = arguments_of(self._methods[name], sent)
        method = method_of(self._methods[name])
        call: Call[Any] = Call(number, caller, self._send)
        if method.takes_sender:
            arguments["sender"] = caller
        if method.is_stream:
            caller.calls[number] = arguments["call"] = call
        answer = getattr(self, name)(**arguments)
        if method.is_stream:
            return
        if inspect.iscoroutine(answer):
            caller.calls[number] = call

            def settle(done: asyncio.Task[Any]) -> None:
                if not done.cancelled():
                    self._settle(call, done.result)

            self.start_task(answer, name=f"{self._name}: {name}").add_done_callback(settle)
        elif isinstance(answer, Later):
            caller.calls[number] = call
            self._when_done(answer.futures, partial(self._settle, call, answer.answer))
        elif number:
            self._settle(call, lambda: answer)

    def _when_done(self, futures: Any, work: Callable[[], None]) -> None:
        """Do this where the service runs, once all of them are done; at once if they are."""
        waiting = [future for future in futures if not future.done()]
        if not waiting:
            work()
            return
        left, lock = [len(waiting)], threading.Lock()

        def done(_: Future[Any]) -> None:
            with lock:
                left[0] -= 1
                is_last = left[0] == 0
            if is_last:
                assert self._listener is not None
                self._listener.call(partial(self._run, work))

        for future in waiting:
            future.add_done_callback(done)

    def _settle(self, call: Call[Any], answer: Callable[[], Any]) -> None:
        try:
            value, error = pack(answer()), None
        except Exception as raised:  # whatever it is: its caller waits for the answer
            logger.warning("%s could not answer: %s", self._name, raised)
            value, error = NOTHING, RemoteError.of(raised)
        call.caller.calls.pop(call.number, None)
        call.caller.peer.send("answer", Answer(value, error, pack(self.state())), number=call.number)

    # What is said to them

    def _send(self, caller: Caller, item: Item) -> None:
        caller.waiting.append(item)
        if self._loop is None:
            self._flush(caller)
        elif not caller.is_due:
            caller.is_due = True
            # After the tasks that this step of an engine's has woken: so theirs go together.
            self._loop.call_soon(self._loop.call_soon, self._flush, caller)

    def _flush(self, caller: Caller) -> None:
        caller.is_due = False
        if caller.waiting and caller.sent - caller.read < MAX_UNREAD:
            caller.sent += 1
            caller.peer.send("items", caller.waiting, number=caller.sent)
            caller.waiting = []

    def _beat(self) -> None:
        waiting = [each for each in self._callers.values() if self._silent_s is not None or each.calls]
        if not waiting:
            return
        state = pack(self.state())
        for caller in waiting:
            caller.peer.send("beat", state)
            if self._silent_s is not None and caller.peer.heard_at < time.monotonic() - self._silent_s:
                self.on_silent(caller)

    def _forget(self, peer: Peer) -> None:
        if (caller := self._callers.pop(peer, None)) is not None:
            peer.is_gone = True
            for call in list(caller.calls.values()):
                call.leave()
