"""The wire to a ledger in another process: stores rounds, asks for operations, waits for events.

`remote_ledger` holds two of them, each in a thread of its own; a process that only brings rounds holds one. Invariant: an
answer is of the question that was asked last; without one the outcome is not known (WireLost): the same may be sent again over
a new connection, which the server answers as it did before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import msgspec

from buffers.errors import EpisodeError, UnderstudyError
from buffers.ledger.encode import stored_round
from buffers.ledger.episodes import StoredRound
from buffers.records import Round
from buffers.remote.messages import (
    Answered,
    Asked,
    EventPage,
    Job,
    LedgerState,
    Refused,
    Stored,
    WireRound,
    unpack_answer,
)
from buffers.wire.address import WireAddress, WireLost
from buffers.wire.connection import Connection

ANSWER_S = 30.0
"""Seconds without a word, after which the other side counts as lost: it says every second that it waits."""
_STATE = msgspec.msgpack.Decoder(LedgerState)
_PAGE = msgspec.msgpack.Decoder(EventPage)
_STORED = msgspec.msgpack.Decoder(Stored)
_ANSWERED = msgspec.msgpack.Decoder(Answered)
_REFUSED = msgspec.msgpack.Decoder(Refused)


class LedgerClient:
    """One thread at a time. `on_state` gets what the ledger says of itself. Making one, and every method, raises WireError."""

    def __init__(
        self, address: str | WireAddress, *, secret: bytes, on_state: Callable[[LedgerState], None] = lambda _: None
    ) -> None:
        self._on_state = on_state
        self._number = 0
        self._connection = Connection(address, secret=secret)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def put_rounds(self, rounds: Iterable[Round]) -> list[EpisodeError | None]:
        """Sends rounds as `put_stored`. Raises EpisodeError for numbers that could not be trained."""
        return self.put_stored([stored_round(round_) for round_ in rounds])

    def put_stored(self, rounds: Sequence[StoredRound]) -> list[EpisodeError | None]:
        """Store rounds: why each was refused, None for those that are on disk. Raises what the ledger says when it takes none of
        them."""
        told = self._ask("rounds", [WireRound.of(stored) for stored in rounds], answer=_STORED)
        errors = [refusal and refusal.error() for refusal in told.errors]
        return [error if error is None or isinstance(error, EpisodeError) else EpisodeError(error) for error in errors]

    def apply(self, jobs: Sequence[Job], *, caller: str, number: int) -> list[tuple[Any, Exception | None]]:
        """Run operations in their order: (answer, None) or (None, error) of each."""
        asked = Asked(caller, number, [(job.name, msgspec.Raw(job.arguments)) for job in jobs])
        told = self._ask("apply", asked, answer=_ANSWERED)
        return [
            (None, refusal.error()) if refusal is not None else (unpack_answer(job.name, answer), None)
            for job, (answer, refusal) in zip(jobs, told.outcomes, strict=True)
        ]

    def events(self, cursor: tuple[str, int], *, wait_s: float) -> EventPage:
        """The events after `cursor`; waits up to `wait_s` for one."""
        page: EventPage = self._ask("events", (*cursor, wait_s), answer=_PAGE)
        return page

    def forget(self, caller: str) -> None:
        """This caller has all its answers and leaves."""
        self._connection.send("forget", caller)

    def _ask(self, kind: str, body: Any, *, answer: msgspec.msgpack.Decoder[Any]) -> Any:
        self._number += 1
        self._connection.send(kind, body, number=self._number)
        while (message := self._connection.receive(ANSWER_S)) is not None:
            if message.number != self._number:
                continue
            if message.kind == "waiting":
                self._on_state(_STATE.decode(message.body))
                continue
            if message.kind == "refused":
                refused = _REFUSED.decode(message.body)
                self._on_state(refused.state)
                error = refused.error.error()
                raise error if isinstance(error, UnderstudyError) else UnderstudyError(str(error))
            told = answer.decode(message.body)
            self._on_state(told.state)
            return told
        raise WireLost(f"the ledger at {self._connection.address} must answer within {ANSWER_S:.0f} s; send again")
