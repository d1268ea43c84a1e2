"""A ledger's side of the wire: stores the rounds that come, runs the operations that are asked for, tells events.

Held by `host.LedgerHost` (or beside a `Ledger`). It answers once what was asked is on disk; until then the asker hears every
second that it waits. Invariants: the operations of one connection are applied in their order; a round's body is decoded and
checked before it is stored; a call that comes again is answered again; a reader that missed events learns that.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from buffers.errors import EpisodeError, UnderstudyError
from buffers.ledger.encode import stored_body
from buffers.ledger.episodes import StoredRound
from buffers.ledger.group_commit import rules_of
from buffers.ledger.idempotency import forget, idempotent
from buffers.ledger.ledger import Ledger, LedgerEvent
from buffers.ledger.round_codec import decode
from buffers.remote import messages
from buffers.remote.messages import Answered, Asked, EventPage, LedgerState, Refusal, Refused, Stored, WireRound
from buffers.wire.address import Way, WireAddress
from buffers.wire.listener import Listener, Peer
from buffers.wire.session import Message

_MAX_EVENTS = 1024
_ROUNDS = msgspec.msgpack.Decoder(list[WireRound])
_ASKED = msgspec.msgpack.Decoder(Asked)
_CURSOR = msgspec.msgpack.Decoder(tuple[str, int, float])
_CALLER = msgspec.msgpack.Decoder(str)


@dataclass(slots=True, eq=False)
class _Reader:
    """A client that waits for events."""

    peer: Peer
    number: int
    cursor: tuple[str, int]
    until: float


class LedgerServer:
    """Listens until `close`. `address`: where."""

    def __init__(self, ledger: Ledger, *, secret: bytes, way: Way = Way.LOCAL, host: str = "127.0.0.1") -> None:
        self._ledger = ledger
        self._life = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._events: deque[LedgerEvent] = deque(maxlen=_MAX_EVENTS)
        self._num_events = 0
        self._asked_at = time.monotonic()
        self._waiting: dict[tuple[bytes, int], Peer] = {}
        """(connection, number of what it asked) -> connection."""
        self._readers: list[_Reader] = []
        self._unwatch = ledger.watch(self._on_event)
        self._listener = Listener(
            secret=secret, way=way, host=host, on_message=self._take, on_tick=self._tick, name="ledger wire"
        )

    @property
    def address(self) -> WireAddress:
        return self._listener.address

    @property
    def cursor(self) -> tuple[str, int]:
        """See `EventPage`."""
        return self._life, self._num_events

    @property
    def idle_s(self) -> float:
        """Seconds since the last request for events."""
        return time.monotonic() - self._asked_at

    def close(self) -> None:
        """Ends all connections. What was asked and has no answer yet is done or not: the same may be asked again."""
        self._unwatch()
        self._listener.close()

    def state(self) -> LedgerState:
        """The counts now."""
        with self._lock:
            ledger = self._ledger
            return LedgerState(
                number=time.monotonic_ns(), counts=ledger.counts(), waits_for=ledger.waits_for, room=ledger.has_room()
            )

    def _take(self, peer: Peer, message: Message) -> None:
        match message.kind:
            case "rounds":
                self._store(peer, message.number, _ROUNDS.decode(message.body))
            case "apply":
                self._apply(peer, message.number, _ASKED.decode(message.body))
            case "events":
                life, number, wait_s = _CURSOR.decode(message.body)
                self._asked_at = time.monotonic()
                self._readers.append(_Reader(peer, message.number, (life, number), self._asked_at + wait_s))
                self._tell()
            case "forget":
                self._ledger.run(partial(forget, caller=_CALLER.decode(message.body)))
            case kind:
                raise UnderstudyError(f"a ledger must be asked for rounds, apply, events or forget, got {kind:.40}")

    # Rounds

    def _store(self, peer: Peer, number: int, rounds: list[WireRound]) -> None:
        kept: list[StoredRound] = []
        refused: dict[int, Refusal] = {}
        for place, each in enumerate(rounds):
            try:
                kept.append(_checked(each))
            except EpisodeError as error:
                refused[place] = Refusal.of(error)
        future = self._ledger.put_rounds(kept)
        self._when_done([future], peer, number, partial(self._stored, future, refused))

    def _stored(self, future: Future[Any], refused: dict[int, Refusal]) -> tuple[str, Any]:
        if (failure := future.exception()) is not None:
            return "refused", Refused(Refusal.of(failure), self.state())
        outcomes = iter(future.result())
        number = len(refused) + len(future.result())
        errors = [refused[place] if place in refused else next(outcomes) for place in range(number)]
        told = [Refusal.of(error) if isinstance(error, Exception) else error for error in errors]
        return "stored", Stored(told, self.state())

    # Operations

    def _apply(self, peer: Peer, number: int, asked: Asked) -> None:
        futures = [
            self._submit(name, arguments, caller=asked.caller, number=asked.number, place=place)
            for place, (name, arguments) in enumerate(asked.jobs)
        ]
        self._when_done(futures, peer, number, partial(self._answered, futures))

    def _submit(self, name: str, arguments: msgspec.Raw, **call: Any) -> Future[Any]:
        try:
            operation = messages.operation_of(name, arguments)
            rules = rules_of(messages.OPERATIONS[name])
            if not rules.repeatable:
                operation = partial(idempotent, operation=operation, **call)
            return self._ledger.run(operation, rules=rules)
        except UnderstudyError as error:  # closed, or no operation
            refused: Future[Any] = Future()
            refused.set_exception(error)
            return refused

    def _answered(self, futures: list[Future[Any]]) -> tuple[str, Any]:
        outcomes = []
        for future in futures:
            error, answer = future.exception(), messages.NOTHING
            if error is None:
                try:
                    answer = messages.pack_answer(future.result())
                except (TypeError, ValueError, OverflowError) as unfit:  # a defect of an operation is that operation's
                    error = unfit
            outcomes.append((answer, None if error is None else Refusal.of(error)))
        return "answers", Answered(outcomes, self.state())

    def _when_done(
        self, futures: list[Future[Any]], peer: Peer, number: int, answer: Callable[[], tuple[str, Any]]
    ) -> None:
        """Answer, in the listener's thread, once all of them are done; at once if they are."""
        waiting = [future for future in futures if not future.done()]
        if not waiting:
            self._answer(peer, number, answer)
            return
        self._waiting[peer.name, number] = peer
        left, lock = [len(waiting)], threading.Lock()

        def done(_: Future[Any]) -> None:
            with lock:
                left[0] -= 1
                is_last = left[0] == 0
            if is_last:
                self._listener.call(partial(self._answer, peer, number, answer))

        for future in waiting:
            future.add_done_callback(done)

    def _answer(self, peer: Peer, number: int, answer: Callable[[], tuple[str, Any]]) -> None:
        self._waiting.pop((peer.name, number), None)
        kind, body = answer()
        peer.send(kind, body, number=number)

    # Events

    def _on_event(self, event: LedgerEvent) -> None:
        """Called in the thread that committed."""
        with self._lock:
            self._events.append(event)
            self._num_events += 1
        self._listener.call(self._tell)

    def _tell(self) -> None:
        """Answer those who wait for events that are there, or have waited long enough."""
        now = time.monotonic()
        for reader in list(self._readers):
            if reader.cursor != self.cursor or now >= reader.until or reader.peer.is_gone:
                self._readers.remove(reader)
                reader.peer.send("page", self._page(reader.cursor), number=reader.number)

    def _page(self, cursor: tuple[str, int]) -> EventPage:
        life, number = cursor
        with self._lock:
            end, kept = self._num_events, list(self._events)
        state, after = self.state(), (self._life, end)
        if life != self._life or not 0 <= end - number <= len(kept):
            return EventPage(events=[], cursor=after, lost=True, state=state)
        return EventPage(events=kept[len(kept) - (end - number) :], cursor=after, lost=False, state=state)

    def _tick(self) -> None:
        self._tell()
        for (_, number), peer in list(self._waiting.items()):
            peer.send("waiting", self.state(), number=number)


def _checked(each: WireRound) -> StoredRound:
    """Raises EpisodeError for what cannot be trained, ValueError for what is no round."""
    return stored_body(
        decode(each.body), episode_id=each.episode_id, round_index=each.round_index, parent=each.parent,
        finish_reason=each.finish_reason, memo=each.memo, trained=each.trained, role=each.role, body=each.body,
    )  # fmt: skip
