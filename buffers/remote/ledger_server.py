"""A ledger as a service on the wire: stores rounds, runs operations, tells events.

Held by `host.LedgerHost` (or beside a `Ledger`). It answers once what was asked is on disk. Invariants: the operations of one
connection are applied in their order; a round's body is decoded and checked before it is stored; a call that comes again is
answered again; a reader that missed events learns that.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from buffers.errors import EpisodeError, UnderstudyError
from buffers.ledger.encode import decode, stored_body
from buffers.ledger.episodes import StoredRound
from buffers.ledger.group_commit import rules_of
from buffers.ledger.idempotency import forget, idempotent
from buffers.ledger.ledger import Ledger, LedgerEvent
from buffers.remote import messages
from buffers.remote.messages import EventPage, LedgerState
from buffers.wire.address import Way
from buffers.wire.rpc import NOTHING, Later, RemoteError, remote
from buffers.wire.service import Call, Service

_MAX_EVENTS = 1024
Outcome = tuple[msgspec.Raw, RemoteError | None]
"""What an operation answered, or raised."""


class LedgerServer(Service):
    """Listens until `close`. `address`: where."""

    def __init__(self, ledger: Ledger, *, secret: bytes, way: Way = Way.LOCAL, host: str = "127.0.0.1") -> None:
        super().__init__(name="a ledger", secret=secret, way=way, host=host)
        self._ledger = ledger
        self._life = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._events: deque[LedgerEvent] = deque(maxlen=_MAX_EVENTS)
        self._num_events = 0
        self._heard_at = time.monotonic()
        """Time of the last message of a reader that has left."""
        self._readers: dict[Call[EventPage], tuple[str, int]] = {}
        """Calls of those who read events, each with the cursor of what was sent."""
        self._unwatch = ledger.watch(self._on_event)
        self.listen()

    @property
    def cursor(self) -> tuple[str, int]:
        """See `EventPage`."""
        return self._life, self._num_events

    @property
    def idle_s(self) -> float:
        """Seconds since the last message of anybody who reads events."""
        return time.monotonic() - max([self._heard_at, *(call.caller.peer.heard_at for call in list(self._readers))])

    def close(self) -> None:
        self._unwatch()
        super().close()

    def state(self) -> LedgerState:
        """The counts now."""
        with self._lock:
            ledger = self._ledger
            return LedgerState(
                number=time.monotonic_ns(), counts=ledger.counts(), waits_for=ledger.waits_for, room=ledger.has_room()
            )

    @remote
    def put_rounds(self, rounds: list[StoredRound]) -> Later[list[Outcome]]:
        """Store them: nothing for those that are on disk, why each other was refused."""
        kept: list[StoredRound] = []
        refused: dict[int, EpisodeError] = {}
        for place, each in enumerate(rounds):
            try:
                kept.append(_checked(each))
            except EpisodeError as error:
                refused[place] = error
        stored = self._ledger.put_rounds(kept)
        return Later([stored], partial(self._stored, stored, refused))

    def _stored(self, stored: Future[Any], refused: dict[int, EpisodeError]) -> list[Outcome]:
        outcomes = iter(stored.result())
        number = len(refused) + len(stored.result())
        errors = [refused[place] if place in refused else next(outcomes) for place in range(number)]
        return [(NOTHING, None if error is None else RemoteError.of(error)) for error in errors]

    @remote
    def apply(self, caller: str, number: int, oldest: int, jobs: list[tuple[str, msgspec.Raw]]) -> Later[list[Outcome]]:
        """Run operations in their order: what each answered, or raised. The same number of a caller again is the same call. It has
        the answers to all calls before `oldest`."""
        futures = [
            self._submit(name, arguments, caller=caller, number=number, oldest=oldest, place=place)
            for place, (name, arguments) in enumerate(jobs)
        ]
        return Later(futures, partial(self._answered, futures))

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

    def _answered(self, futures: list[Future[Any]]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for future in futures:
            error, answer = future.exception(), NOTHING
            if error is None:
                try:
                    answer = messages.pack_answer(future.result())
                except (TypeError, ValueError, OverflowError) as unfit:  # a defect of an operation is that operation's
                    error = unfit
            outcomes.append((answer, None if error is None else RemoteError.of(error)))
        return outcomes

    @remote
    def forget(self, caller: str) -> None:
        """This caller has all its answers and leaves."""
        self._ledger.run(partial(forget, caller=caller))

    @remote
    def events(self, call: Call[EventPage], life: str, number: int) -> None:
        """Tell the events after this cursor, as they come."""
        self._readers[call] = (life, number)
        call.on_abort = partial(self._leave, call)
        self._tell()

    def _leave(self, reader: Call[EventPage]) -> None:
        del self._readers[reader]
        self._heard_at = max(self._heard_at, reader.caller.peer.heard_at)

    def _on_event(self, event: LedgerEvent) -> None:
        """Called in the thread that committed."""
        with self._lock:
            self._events.append(event)
            self._num_events += 1
        if self._listener is not None:
            self._listener.call(self._tell)

    def _tell(self) -> None:
        for reader, cursor in list(self._readers.items()):
            if cursor != self.cursor:
                page = self._page(cursor)
                self._readers[reader] = page.cursor
                reader.push(page)

    def _page(self, cursor: tuple[str, int]) -> EventPage:
        life, number = cursor
        with self._lock:
            end, kept = self._num_events, list(self._events)
        if life != self._life or not 0 <= end - number <= len(kept):
            return EventPage(events=[], cursor=(self._life, end), lost=True)
        return EventPage(events=kept[len(kept) - (end - number) :], cursor=(self._life, end), lost=False)


def _checked(each: StoredRound) -> StoredRound:
    """What it says of its arrays is read from them again. Raises EpisodeError for what cannot be trained, ValueError for what is no
    round."""
    return stored_body(
        decode(each.body), episode_id=each.episode_id, round_index=each.round_index, parent=each.parent,
        finish_reason=each.finish_reason, memo=each.memo or b"", trained=each.trained, role=each.role, body=each.body,
    )  # fmt: skip
