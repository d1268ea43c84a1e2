"""What waits to be sent to a ledger elsewhere, and how it is put together for the way.

Called by `remote_ledger`, in the thread of its sender. Invariant: what belongs to one episode stays in its order. Pure, but for
the futures that it carries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from buffers.errors import EpisodeError, UnderstudyError
from buffers.ledger.episodes import MAX_NUMBER, MAX_REASON, StoredRound
from buffers.remote.messages import Job
from buffers.wire.listener import MAX_MESSAGE_BYTES

T = TypeVar("T")

MAX_FRAME_BYTES = 64 << 20
"""Most that is sent at once: one message, which is in memory on both sides."""
_MAX_ENTRIES = 1024
_ENTRY_BYTES = 128
"""Bytes of a round or an operation in a message, beside its texts and arrays."""


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
        return None if self.job is None else self.job.episode_id


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
    """Rounds in their order, as many together as a message holds."""
    return _together(rounds, size=_size)


def batches(items: Sequence[Outgoing]) -> Iterator[list[Outgoing]]:
    """Operations in their order, as many together as a message holds."""
    return _together(items, size=lambda item: (len(item.job.arguments) if item.job else 0) + _ENTRY_BYTES)


def _together(entries: Sequence[T], *, size: Callable[[T], int]) -> Iterator[list[T]]:
    group: list[T] = []
    total = 0
    for entry in entries:
        if group and (total + size(entry) > MAX_FRAME_BYTES or len(group) == _MAX_ENTRIES):
            yield group
            group, total = [], 0
        group.append(entry)
        total += size(entry)
    if group:
        yield group


def check_job(job: Job) -> None:
    """Raises UnderstudyError for an operation that no message could hold."""
    if len(job.arguments) > MAX_MESSAGE_BYTES - _ENTRY_BYTES:
        raise UnderstudyError(
            f"the arguments of {job.name} must have at most {MAX_MESSAGE_BYTES} bytes, got {len(job.arguments)}; ask for less"
        )


def _size(stored: StoredRound) -> int:
    """Bytes in a message, at most."""
    arrays = len(stored.body) + len(stored.memo or b"") + len(stored.trained or b"")
    return arrays + _ENTRY_BYTES + 4 * (len(stored.episode_id) + len(stored.finish_reason))


def check_round(stored: StoredRound) -> None:
    """Raises EpisodeError for a round that no message could hold."""
    numbers = (stored.round_index, stored.parent or 0)
    if max(map(abs, numbers)) > MAX_NUMBER:
        raise EpisodeError(
            f"round_index of episode {stored.episode_id:.100} must be between 0 and {MAX_NUMBER}, got {stored.round_index} with "
            f"parent {stored.parent}; count rounds as generations end"
        )
    if (size := _size(stored)) > MAX_FRAME_BYTES or len(stored.finish_reason) > MAX_REASON:
        raise EpisodeError(
            f"round {stored.round_index} of episode {stored.episode_id:.100} must have at most {MAX_FRAME_BYTES} bytes, and "
            f"{MAX_REASON} characters of why it ended, got {size} and {len(stored.finish_reason)}; record it with finish_reason "
            f"abort and without tokens"
        )
