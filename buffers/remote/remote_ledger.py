"""`RemoteLedger`: a ledger that is in another process, on this machine or another, used like `Ledger`.

Made by `learner.startup.run_buffers`. It sends what is submitted in its order, from one thread, over the wire
(`ledger_server`); the ledger's Ray actor (`ray_actor`) says where that leads. Invariants: a future is done once its
operation is on disk; a round may overtake operations of other episodes, and nothing overtakes a round of its own: an
acknowledged score implies that the episode's earlier rounds are stored. Watchers hear of a commit after its futures are
done.

When the actor's process dies, callers see a delay: all that was not answered is sent again, and what was done already is
answered again as it was (`idempotency`; a round that is there counts as stored). No operation ends with an unknown
outcome, unless the actor is gone for good: then all that waits fails with LedgerGone, and so does what is submitted
later.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from buffers.errors import EpisodeError, StorageFull, UnderstudyError
from buffers.ledger.encode import stored_round
from buffers.ledger.episodes import StoredRound
from buffers.ledger.group_commit import DEFAULT_RULES, Rules
from buffers.ledger.ledger import Ledger, LedgerEvent
from buffers.records import Episode, Round
from buffers.remote.host import LedgerAddress, LedgerGone
from buffers.remote.ledger_server import LedgerServer
from buffers.remote.messages import EventPage, LedgerState, job_of, unpack_answer
from buffers.remote.outbox import Outgoing, batches, check_job, check_round, frames, parcels
from buffers.wire.address import OtherVersion, WireError
from buffers.wire.client import Client

if TYPE_CHECKING:
    from buffers.remote.ledger_actor import ActorHandle

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_WAITING = 4096
_MAX_JOBS = 1024
_POLL_S = 1.0
"""How long one poll for events waits: the age of what is known of the disk."""
_UNREACHABLE_S = 60.0
ANSWER_S = 30.0
"""Seconds without a word, after which the other side counts as lost: it says every second that it waits."""
_RETRY_S = 0.2


class RemoteLedger(Ledger):
    """See the module. `path`: where the file is, on the disk's node. `owns`: `close` ends the actor too."""

    def __init__(
        self, actor: ActorHandle, *, path: Path, secret: bytes, drop_zero_variance: bool = False, owns: bool = False
    ) -> None:
        self._actor = actor
        self._secret = secret
        self._owns = owns
        self._caller = secrets.token_hex(8)
        self._number = 0
        self._client: Client | None = None
        """The sender's."""
        self._news: Client | None = None
        """The listener's."""
        self._where = actor.where()
        self._begin(path, drop_zero_variance=drop_zero_variance, counts={})
        self._state_lock = threading.Lock()
        self._state = self._where.state
        self._counts = self._state.counts
        self._outbox: deque[Outgoing] = deque()
        self._moved = threading.Condition()
        self._begun = self._finished = 0
        """Parcels that the sender took up, and those whose futures are done."""
        self._closing = False
        self._broken: UnderstudyError | None = None
        self._stopped = threading.Event()
        self._running_ids: set[str] = set()
        """Episodes that this process started and whose end was not published yet."""
        self._cursor = self._where.cursor
        self._sender = threading.Thread(target=self._send_all, name="ledger sender", daemon=True)
        self._listener = threading.Thread(target=self._listen, name="ledger events", daemon=True)
        self._sender.start()
        self._listener.start()

    @property
    def where(self) -> LedgerAddress:
        """The ledger's address, as last known."""
        return self._where

    @property
    def waits_for(self) -> str:
        return self._state.waits_for

    def has_room(self) -> bool:
        """See `Ledger.has_room`; at most a second old."""
        return self._state.room

    def close(self) -> None:
        """See `Ledger.close`; while the disk is full, what waits is not stored."""
        with self._moved:
            self._closing = True
            self._moved.notify_all()
        self._sender.join()
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._client is not None:
            if self._broken is None:
                with suppress(WireError):  # gone: its successor forgets all callers
                    self._client.tell(LedgerServer.forget, caller=self._caller)
            self._client.close()
        if self._owns:
            self._actor.end()
        self._listener.join(2 * _POLL_S)

    def run(self, operation: Callable[..., T | UnderstudyError], *, rules: Rules = DEFAULT_RULES) -> Future[T]:
        try:
            job = job_of(operation, rules=rules)
        except (TypeError, ValueError, OverflowError) as error:  # as a ledger here would answer
            refused: Future[T] = Future()
            refused.set_exception(error)
            return refused
        check_job(job)
        return self._post(Outgoing(future=Future(), job=job))

    def put_round(self, round_: Round, /) -> Future[None]:
        stored = stored_round(round_)
        check_round(stored)
        return self._post(Outgoing(future=Future(), rounds=[stored], single=True))

    def put_rounds(self, rounds: Sequence[StoredRound]) -> Future[list[EpisodeError | None]]:
        for stored in rounds:
            check_round(stored)
        return self._post(Outgoing(future=Future(), rounds=list(rounds)))

    def start_episode(self, episode_id: str, *, version: int) -> Future[None]:
        started = super().start_episode(episode_id, version=version)
        started.add_done_callback(lambda done: self._note(done, [episode_id]))
        return started

    def start_pending(self, *, limit: int, version: int) -> Future[list[Episode]]:
        started = super().start_pending(limit=limit, version=version)
        started.add_done_callback(self._note)
        return started

    def running_episodes(self) -> Future[list[Episode]]:
        running = super().running_episodes()
        running.add_done_callback(self._note)
        return running

    def _note(self, done: Future[Any], episode_ids: Sequence[str] | None = None) -> None:
        if not done.cancelled() and done.exception() is None:
            self._running_ids.update(
                [episode.episode_id for episode in done.result()] if episode_ids is None else episode_ids
            )

    # The sender's thread

    def _post(self, item: Outgoing) -> Future[Any]:
        with self._moved:
            self._moved.wait_for(lambda: len(self._outbox) < _MAX_WAITING or self._closing or self._broken)
            if self._broken is not None:
                raise self._broken
            if self._closing:
                raise UnderstudyError(f"ledger {self.path} must be open, got an operation after it was closed")
            self._outbox.append(item)
            self._moved.notify_all()
        return item.future

    def _send_all(self) -> None:
        why = "its sender stopped before this was stored"
        items: list[Outgoing] = []
        try:
            while self._wait():
                items = self._collect()
                for rounds, operations in parcels(items):
                    self._put(rounds)
                    for together in batches(operations):
                        self._apply(together)
                with self._moved:
                    self._finished = self._begun
                    self._moved.notify_all()
        except LedgerGone as gone:
            why = str(gone)
            logger.error("%s", gone)
        finally:
            self._break(LedgerGone(f"ledger {self.path}: {why}"), items)

    def _wait(self) -> bool:
        """Wait until there is something to send; False when closed and all is sent."""
        with self._moved:
            self._moved.wait_for(lambda: self._outbox or self._closing)
            return bool(self._outbox)

    def _collect(self) -> list[Outgoing]:
        with self._moved:
            items = [self._outbox.popleft() for _ in range(min(len(self._outbox), _MAX_JOBS))]
            self._begun += 1
            self._moved.notify_all()
        return [item for item in items if item.future.set_running_or_notify_cancel()]

    def _put(self, items: Sequence[Outgoing]) -> None:
        """Store rounds, in frames, however often the connection breaks."""
        rounds = [stored for item in items for stored in item.rounds]
        outcomes: list[UnderstudyError | None] = []
        for frame in frames(rounds):
            try:
                outcomes += self._until_answered(partial(put_stored, rounds=frame))
            except LedgerGone:
                raise
            except UnderstudyError as error:  # none of this frame
                outcomes += [error] * len(frame)
        done = iter(outcomes)
        for item in items:
            errors = [next(done) for _ in item.rounds]
            refusal = next(
                (e for e in errors if e is not None and (item.single or not isinstance(e, EpisodeError))), None
            )
            if refusal is not None:
                item.future.set_exception(refusal)
            else:
                item.future.set_result(None if item.single else errors)

    def _apply(self, items: Sequence[Outgoing]) -> None:
        jobs = [item.job for item in items if item.job is not None]
        self._number += 1
        packed = [(job.name, msgspec.Raw(job.arguments)) for job in jobs]

        def ask(client: Client) -> list[tuple[Any, Exception | None]]:
            outcomes = client.call(LedgerServer.apply, caller=self._caller, number=self._number, jobs=packed)
            return [
                (None, refusal.error()) if refusal is not None else (unpack_answer(job.name, answer), None)
                for job, (answer, refusal) in zip(jobs, outcomes, strict=True)
            ]

        for item, (answer, error) in zip(items, self._until_answered(ask), strict=True):
            if error is None:
                item.future.set_result(answer)
            else:
                item.future.set_exception(error)

    def _until_answered(self, ask: Callable[[Client], T]) -> T:
        """Ask until there is an answer. Raises LedgerGone when the actor is gone, is of another version, or cannot be reached for a
        minute."""
        since, life = time.monotonic(), ""
        while True:
            try:
                if self._client is None:
                    self._client = self._connect(on_state=self._hear)
                return ask(self._client)
            except OtherVersion as error:
                raise LedgerGone(f"ledger {self.path}: {error}") from error
            except (WireError, msgspec.MsgspecError) as error:
                logger.warning("the ledger did not answer, asking again: %s", error)
                last = error
            if self._client is not None:
                self._client.close()
                self._client = None
            where, now = self._actor.where(), time.monotonic()
            if where.cursor[0] != life:
                since, life = now, where.cursor[0]
            elif now - since > _UNREACHABLE_S:
                raise LedgerGone(
                    f"the ledger at {where.address} must be reachable, but for {_UNREACHABLE_S:.0f} s: {last}; open that way, then "
                    f"resume with --resume auto"
                ) from last
            self._where = where
            self._keep_state(where.state)
            self._stopped.wait(_RETRY_S)

    def _connect(self, *, on_state: Callable[[LedgerState], object]) -> Client:
        return Client(self._where.address, LedgerServer, secret=self._secret, answer_s=ANSWER_S, on_state=on_state)

    def _hear(self, state: LedgerState) -> None:
        """Called with each answer, and every second while there is none."""
        self._keep_state(state)
        self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        """Refuse what may be refused while the disk is full, instead of having it wait behind what may not."""
        if not self.is_full:
            return
        if self._closing:
            raise LedgerGone("it was closed while its disk was full, and what waited is not stored")
        with self._moved:
            refused = [item for item in self._outbox if item.job is not None and item.job.rules.refusable]
            for item in refused:
                self._outbox.remove(item)
        for item in refused:
            if item.future.set_running_or_notify_cancel():
                item.future.set_exception(
                    StorageFull(
                        f"ledger {self.path} could not store: {self.waits_for}, storing resumes by itself; send again later"
                    )
                )

    def _break(self, gone: LedgerGone, items: Sequence[Outgoing]) -> None:
        with self._moved:
            self._broken = None if self._closing and not self._outbox else gone
            waiting = [*items, *self._outbox]
            self._outbox.clear()
            self._finished = self._begun
            self._moved.notify_all()
        for item in waiting:
            if not item.future.done():
                item.future.set_exception(gone)

    # The listener's thread

    def _listen(self) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    if self._news is None:
                        self._news = self._connect(on_state=self._keep_state)
                    life, number = self._cursor
                    self._tell(self._news.call(LedgerServer.events, life=life, number=number, wait_s=_POLL_S))
                except WireError as error:
                    logger.info("the ledger told no events: %s", error)
                    self._close_news()
                    if self._stopped.wait(_RETRY_S):
                        return
                    self._where = self._actor.where()
        except SystemExit:  # by which Ray ends a thread that asks it while it is shut down
            pass
        except UnderstudyError as error:  # closed, or gone: the sender tells
            logger.info("no more events of the ledger: %s", error)
        finally:
            self._close_news()

    def _close_news(self) -> None:
        if self._news is not None:
            self._news.close()
            self._news = None

    def _tell(self, page: EventPage) -> None:
        self._cursor = page.cursor
        if page.lost:
            closed = tuple(self.ended(sorted(self._running_ids)).result())
            self._publish_one(LedgerEvent(closed=closed, counts=self.counts()))
            return
        if page.events:
            # What the sender is waiting for may be older than the news: first its futures are done.
            with self._moved:
                begun = self._begun
                self._moved.wait_for(lambda: self._finished >= begun)
        for event in page.events:
            self._publish_one(event)

    def _publish_one(self, event: LedgerEvent) -> None:
        self._running_ids.difference_update(episode.episode_id for episode in event.closed)
        self._publish(event, recovered=True)

    def _keep_state(self, state: LedgerState) -> None:
        with self._state_lock:
            if state.number > self._state.number:
                self._state, self._counts = state, state.counts


def put_stored(client: Client, rounds: Sequence[StoredRound]) -> list[EpisodeError | None]:
    """Store rounds in the ledger elsewhere: why each was refused, None for those that are on disk. Raises WireError, and what the
    ledger says when it takes none of them."""
    refusals = client.call(LedgerServer.put_rounds, rounds=rounds)
    errors = [refusal and refusal.error() for refusal in refusals]
    return [error if error is None or isinstance(error, EpisodeError) else EpisodeError(error) for error in errors]
