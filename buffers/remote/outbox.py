"""What waits to be sent to a ledger elsewhere, and how it is put together for the way.

Called by `remote_ledger`, in the thread of its sender. Invariant: what belongs to one episode stays in its order. Pure, but for
the futures that it carries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from buffers.errors import EpisodeError
from buffers.ledger.episodes import StoredRound
from buffers.remote.host import Job
from buffers.remote.round_socket import MAX_FRAME_BYTES, MAX_HEADER_BYTES

_MAX_FRAME_ROUNDS = 1024
_ENTRY_BYTES = 128
"""Bytes of a round in a frame's header, beside its episode's name."""


@dataclass(slots=True, kw_only=True)
class Outgoing:
    """What waits to be sent: an operation, or rounds."""

    future: Future[Any]
    job: Job | None = None
    rounds: Sequence[StoredRound] = ()
    single: bool = False
    """The future is of one round, which is stored or raises."""

    @property
    def episode_id(self) -> str | None:
        """The episode that the operation belongs to; None where it belongs to none, or to several."""
        keywords = getattr(self.job and self.job.operation, "keywords", {})
        name: str | None = keywords.get("episode_id")
        return name


def parcels(items: Sequence[Outgoing]) -> Iterator[tuple[list[Outgoing], list[Outgoing]]]:
    """Items in their order as (rounds, then operations): a round goes ahead of operations of other episodes only, so that many
    episodes at once need few turns."""
    rounds: list[Outgoing] = []
    operations: list[Outgoing] = []
    named: set[str | None] = set()
    for item in items:
        if item.job is None:
            if any(stored.episode_id in named for stored in item.rounds):
                yield rounds, operations
                rounds, operations, named = [], [], set()
            rounds.append(item)
        else:
            operations.append(item)
            named.add(item.episode_id)
    yield rounds, operations


def frames(rounds: Sequence[StoredRound]) -> Iterator[list[StoredRound]]:
    """Rounds in their order, as many together as a frame holds."""
    frame: list[StoredRound] = []
    head = body = 0
    for stored in rounds:
        more_head, more_body = _sizes(stored)
        full = head + more_head > MAX_HEADER_BYTES or body + more_body > MAX_FRAME_BYTES
        if frame and (full or len(frame) == _MAX_FRAME_ROUNDS):
            yield frame
            frame, head, body = [], 0, 0
        frame.append(stored)
        head, body = head + more_head, body + more_body
    if frame:
        yield frame


def _sizes(stored: StoredRound) -> tuple[int, int]:
    """(header, body) bytes in a frame, at most."""
    body = len(stored.body) + len(stored.memo or b"") + len(stored.trained or b"")
    return _ENTRY_BYTES + 6 * len(stored.episode_id) + 6 * len(stored.finish_reason), body


def check_size(stored: StoredRound) -> None:
    """Raises EpisodeError for a round that no frame could hold."""
    head, body = _sizes(stored)
    if head > MAX_HEADER_BYTES // 2 or body > MAX_FRAME_BYTES:
        raise EpisodeError(
            f"round {stored.round_index} of episode {stored.episode_id:.100} must have at most {MAX_FRAME_BYTES} "
            f"bytes, got {body}; record it with finish_reason abort and without tokens"
        )
