"""What travels between a ledger's process and those who use it: operations with their answers, rounds, events. Pure, but for the
futures of what waits.

Used by `ledger_server` and `remote_ledger`. An operation travels as its name and its arguments; both sides read their types from
the signature of the function of that name in `buffers.ledger`, so what is not of these types is refused before it runs.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from buffers.errors import EpisodeError, UnderstudyError
from buffers.ledger import batches, checkpoints, episodes, scores, validation
from buffers.ledger.encode import task_payload
from buffers.ledger.episodes import MAX_NUMBER, MAX_REASON, StoredRound
from buffers.ledger.ledger import LedgerEvent
from buffers.records import Episode, Task
from buffers.wire.listener import MAX_MESSAGE_BYTES
from buffers.wire.rpc import arguments_of, decoder_of, pack

MAX_FRAME_BYTES = 64 << 20
"""Most that is asked for in one call, which is in memory on both sides."""
_MAX_ENTRIES = 1024
_ENTRY_BYTES = 128
"""Bytes of a round or an operation in a message, beside its texts and arrays."""

OPERATIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        episodes.put_tasks, episodes.open_group, episodes.adopt_episode, episodes.start_episode, episodes.start_pending,
        episodes.running_episodes, episodes.failure_details, episodes.ended, episodes.mask_tokens, episodes.fail_episode,
        batches.read_rounds, batches.claim, batches.commit_step, batches.release, batches.evict_stale,
        batches.count_stored,
        scores.notify_score, scores.settle, scores.score_history, validation.open_validation, validation.validated,
        checkpoints.position, checkpoints.restore, checkpoints.times_opened,
        checkpoints.group_outcomes,
    )
}  # fmt: skip
"""All that may be asked of a ledger, beside storing rounds: what is not here does not exist for another process."""


@dataclass(frozen=True, slots=True)
class Job:
    """One operation on its way. `episode_id`: the one that it belongs to; None: to none, or to several."""

    name: str
    arguments: msgspec.Raw
    episode_id: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """What is sent, and gets an answer: an operation, or a round."""

    what: Job | StoredRound
    future: Future[Any] = field(default_factory=Future)

    @property
    def size(self) -> int:
        """Bytes in a message, at most."""
        if isinstance(self.what, Job):
            return len(self.what.arguments) + _ENTRY_BYTES
        return size_of(self.what)


def together(items: Iterable[Outgoing]) -> Iterator[list[Outgoing]]:
    """Items of one kind together, as far as a call holds them. Those of one episode stay in their order, and so do all operations;
    a round goes ahead of operations of other episodes, so that many episodes at once need few calls."""
    rounds: list[Outgoing] = []
    jobs: list[Outgoing] = []
    named: set[str | None] = set()
    for item in items:
        if isinstance(item.what, Job):
            jobs.append(item)
            named.add(item.what.episode_id)
            continue
        if item.what.episode_id in named:
            yield from (*_calls(rounds), *_calls(jobs))
            rounds, jobs, named = [], [], set()
        rounds.append(item)
    yield from (*_calls(rounds), *_calls(jobs))


def _calls(items: list[Outgoing]) -> Iterator[list[Outgoing]]:
    total = start = 0
    for place, item in enumerate(items):
        if place > start and (total + item.size > MAX_FRAME_BYTES or place - start == _MAX_ENTRIES):
            yield items[start:place]
            total, start = 0, place
        total += item.size
    if items:
        yield items[start:]


def size_of(stored: StoredRound) -> int:
    """Bytes of a round in a message, at most."""
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
    if (size := size_of(stored)) > MAX_FRAME_BYTES or len(stored.finish_reason) > MAX_REASON:
        raise EpisodeError(
            f"round {stored.round_index} of episode {stored.episode_id:.100} must have at most {MAX_FRAME_BYTES} bytes, and "
            f"{MAX_REASON} characters of why it ended, got {size} and {len(stored.finish_reason)}; record it with finish_reason "
            f"abort and without tokens"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """What a ledger says of itself, with each answer and while there is none. A higher `number` is as new or newer,
    across restarts on one machine too."""

    number: int
    counts: dict[str, int]
    waits_for: str
    """See `Ledger.waits_for`."""
    room: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """Events after a cursor, and the cursor after them. `lost`: earlier ones are no longer kept."""

    events: list[LedgerEvent]
    cursor: tuple[str, int]
    """Position in the events: (id of the process's start, number of events so far)."""
    lost: bool


class WireEpisode(msgspec.Struct, array_like=True, frozen=True):
    """An episode; its task as the JSON that the ledger stores, which holds what msgpack does not (whole numbers of any size)."""

    episode_id: str
    group_id: int
    sample_index: int
    attempt: int
    greedy: bool
    task_id: str
    task: str

    @classmethod
    def of(cls, episode: Episode) -> WireEpisode:
        return cls(
            episode.episode_id, episode.group_id, episode.sample_index, episode.attempt, episode.greedy,
            episode.task.task_id, task_payload(episode.task),
        )  # fmt: skip

    def episode(self) -> Episode:
        return Episode(
            episode_id=self.episode_id,
            task=Task(task_id=self.task_id, **json.loads(self.task)),
            group_id=self.group_id,
            sample_index=self.sample_index,
            attempt=self.attempt,
            greedy=self.greedy,
        )


def job_of(operation: Callable[..., Any]) -> Job:
    """An operation whose arguments are bound by name. Raises UnderstudyError for what no other process may ask for, or no message
    could hold, ValueError and TypeError for arguments that cannot travel."""
    function, keywords = getattr(operation, "func", operation), getattr(operation, "keywords", {})
    name = getattr(function, "__name__", str(function))
    if OPERATIONS.get(name) is not function:
        raise UnderstudyError(
            f"a ledger in another process must be asked for one of its own operations, got {name:.60}"
        )
    arguments = pack(keywords)
    if len(arguments) > MAX_MESSAGE_BYTES - _ENTRY_BYTES:
        raise UnderstudyError(
            f"the arguments of {name} must have at most {MAX_MESSAGE_BYTES} bytes, got {len(arguments)}; ask for less"
        )
    return Job(name, arguments, keywords.get("episode_id"))


def operation_of(name: str, arguments: msgspec.Raw) -> Callable[..., Any]:
    """The operation with its arguments bound. Raises UnderstudyError for one that does not exist, or arguments of other types."""
    if name not in OPERATIONS:
        raise UnderstudyError(f"an operation must be one of {', '.join(OPERATIONS)}, got {name:.60}")
    try:
        return partial(OPERATIONS[name], **arguments_of(OPERATIONS[name], arguments))
    except msgspec.MsgspecError as error:
        raise UnderstudyError(f"the arguments of {name} must be of its types: {error}") from error


def pack_answer(answer: Any) -> msgspec.Raw:
    """The answer of an operation."""
    match answer:
        case Episode():
            answer = WireEpisode.of(answer)
        case [Episode(), *_]:
            answer = [WireEpisode.of(each) for each in answer]
    return pack(answer)


def unpack_answer(name: str, answer: msgspec.Raw) -> Any:
    """The answer of the operation of this name, as its function returned it."""
    found = _answer_of(name).decode(answer)
    if isinstance(found, WireEpisode):
        return found.episode()
    if isinstance(found, list) and found and isinstance(found[0], WireEpisode):
        return [each.episode() for each in found]
    return found


@cache
def _answer_of(name: str) -> msgspec.msgpack.Decoder[Any]:
    return decoder_of(_wire_type(get_type_hints(OPERATIONS[name])["return"]))


def _wire_type(hint: Any) -> Any:
    """A type as it travels: an episode has another form, errors travel apart."""
    if hint is Episode:
        return WireEpisode
    if get_origin(hint) is list:
        return list[_wire_type(get_args(hint)[0])]  # type: ignore[misc]
    if isinstance(hint, types.UnionType):
        kept = [each for each in get_args(hint) if not (isinstance(each, type) and issubclass(each, Exception))]
        return Union[tuple(map(_wire_type, kept))]  # noqa: UP007
    return hint
