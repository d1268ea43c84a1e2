"""Calls a ledger in another process: stores rounds, asks for operations, waits for events.

`remote_ledger` holds two of them, each in a thread of its own; a process that only brings rounds holds one. Without an answer the
outcome is not known: the same may be sent again over a new connection, which the server answers as it did before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from buffers.errors import EpisodeError
from buffers.ledger.encode import stored_round
from buffers.ledger.episodes import StoredRound
from buffers.records import Round
from buffers.remote.ledger_server import LedgerServer
from buffers.remote.messages import EventPage, Job, LedgerState, WireRound, unpack_answer
from buffers.wire.address import WireAddress
from buffers.wire.client import Client

ANSWER_S = 30.0
"""Seconds without a word, after which the other side counts as lost: it says every second that it waits."""


class LedgerClient(Client):
    """See `Client`. `on_state` gets what the ledger says of itself."""

    def __init__(
        self, address: str | WireAddress, *, secret: bytes, on_state: Callable[[LedgerState], None] = lambda _: None
    ) -> None:
        super().__init__(address, LedgerServer, secret=secret, answer_s=ANSWER_S, on_state=on_state)

    def put_rounds(self, rounds: Iterable[Round]) -> list[EpisodeError | None]:
        """Sends rounds as `put_stored`. Raises EpisodeError for numbers that could not be trained."""
        return self.put_stored([stored_round(round_) for round_ in rounds])

    def put_stored(self, rounds: Sequence[StoredRound]) -> list[EpisodeError | None]:
        """Store rounds: why each was refused, None for those that are on disk. Raises what the ledger says when it takes none of
        them."""
        refusals = self.call(LedgerServer.put_rounds, rounds=[WireRound.of(stored) for stored in rounds])
        errors = [refusal and refusal.error() for refusal in refusals]
        return [error if error is None or isinstance(error, EpisodeError) else EpisodeError(error) for error in errors]

    def apply(self, jobs: Sequence[Job], *, caller: str, number: int) -> list[tuple[Any, Exception | None]]:
        """Run operations in their order: (answer, None) or (None, error) of each."""
        packed = [(job.name, msgspec.Raw(job.arguments)) for job in jobs]
        outcomes = self.call(LedgerServer.apply, caller=caller, number=number, jobs=packed)
        return [
            (None, refusal.error()) if refusal is not None else (unpack_answer(job.name, answer), None)
            for job, (answer, refusal) in zip(jobs, outcomes, strict=True)
        ]

    def events(self, cursor: tuple[str, int], *, wait_s: float) -> EventPage:
        """The events after `cursor`; waits up to `wait_s` for one."""
        page: EventPage = self.call(LedgerServer.events, life=cursor[0], number=cursor[1], wait_s=wait_s)
        return page

    def forget(self, caller: str) -> None:
        """This caller has all its answers and leaves."""
        self.tell(LedgerServer.forget, caller=caller)
