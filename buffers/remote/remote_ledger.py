"""`RemoteLedger`: a ledger that is in another process, on this machine or another, used like `Ledger`.

Made by `learner.startup.run_buffers`. It sends what is submitted in its order, on one connection (`ledger_server`), by which it is
told events, too; the ledger's Ray actor (`ray_actor`) says where that leads. Invariants: a future is done once its operation is on
disk; a round may overtake operations of other episodes, and nothing overtakes a round of its own: an acknowledged score implies
that the episode's earlier rounds are stored. Watchers hear of a commit after its futures are done.

When the actor's process dies, callers see a delay: all that was not answered is sent again in its order, and what was done already
is answered again as it was (`idempotency`; a round that is there counts as stored). No operation ends with an unknown outcome,
unless the actor is gone for good: then all that waits fails with LedgerGone, and so does what is submitted later.
"""

from __future__ import annotations

import asyncio
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

from buffers.errors import UnderstudyError
from buffers.ledger import episodes
from buffers.ledger.encode import stored_round
from buffers.ledger.group_commit import DEFAULT_RULES, Rules
from buffers.ledger.ledger import Ledger, LedgerEvent
from buffers.records import Episode, Round
from buffers.remote.host import LedgerAddress, LedgerGone
from buffers.remote.ledger_server import LedgerServer
from buffers.remote.messages import (
    EventPage,
    Job,
    LedgerState,
    Outgoing,
    check_round,
    job_of,
    together,
    unpack_answer,
)
from buffers.wire.address import OtherVersion, WireError, WireLost
from buffers.wire.client import AsyncClient
from buffers.wire.connection import Connection
from buffers.wire.rpc import NOTHING, RemoteError

if TYPE_CHECKING:
    from buffers.remote.ledger_actor import ActorHandle

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_WAITING = 4096
_UNREACHABLE_S = 60.0
ANSWER_S = 30.0
"""Seconds without a word, after which the other side counts as lost: it says every second that it is there."""
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
        self._where = actor.where()
        self._begin(path, drop_zero_variance=drop_zero_variance, counts={})
        self._state = self._where.state
        self._counts = self._state.counts
        self._moved = threading.Condition()
        self._outbox: deque[Outgoing] = deque()
        self._num_waiting = 0
        """What is not answered yet, sent or not."""
        self._closing = False
        self._broken: UnderstudyError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="ledger client", daemon=True)
        # The fields below are that thread's.
        self._client: AsyncClient | None = None
        self._changed = asyncio.Event()
        self._number = 0
        self._sent: dict[int, list[Outgoing]] = {}
        """Calls that are not answered yet, by number, in their order."""
        self._pages: deque[tuple[int, EventPage]] = deque()
        """News that wait for the answers to all calls up to a number."""
        self._cursor = self._where.cursor
        self._heard_at = time.monotonic()
        self._running_ids: set[str] = set()
        """Episodes that this process started and whose end was not published yet."""
        self._thread.start()

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
        self._soon(self._changed.set)
        self._thread.join()
        if self._owns:
            self._owns = False
            self._actor.end()

    def run(self, operation: Callable[..., T | UnderstudyError], *, rules: Rules = DEFAULT_RULES) -> Future[T]:
        try:
            item = Outgoing(job_of(operation))
        except (TypeError, ValueError, OverflowError) as error:  # as a ledger here would answer
            refused: Future[T] = Future()
            refused.set_exception(error)
            return refused
        return self._post(item)

    def put_round(self, round_: Round, /) -> Future[None]:
        stored = stored_round(round_)
        check_round(stored)
        return self._post(Outgoing(stored))

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

    def _post(self, item: Outgoing) -> Future[Any]:
        with self._moved:
            self._moved.wait_for(lambda: self._num_waiting < _MAX_WAITING or self._closing or self._broken)
            if self._broken is not None:
                raise self._broken
            if self._closing:
                raise UnderstudyError(f"ledger {self.path} must be open, got an operation after it was closed")
            self._num_waiting += 1
            self._outbox.append(item)
            is_first = len(self._outbox) == 1
        if is_first:
            self._soon(self._send_waiting)
        return item.future

    def _soon(self, work: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the thread has ended
            if self._loop is not None:  # else it looks at all of it when it begins
                self._loop.call_soon_threadsafe(work)

    # In the thread

    def _run(self) -> None:
        gone = LedgerGone(f"ledger {self.path}: its sender stopped before this was stored")
        try:
            asyncio.run(self._live())
        except LedgerGone as error:
            gone = LedgerGone(f"ledger {self.path}: {error}")
            logger.error("%s", gone)
        finally:
            self._break(gone)

    async def _live(self) -> None:
        """Keep a connection, until this is closed and all is answered. Raises LedgerGone when the actor is gone, is of another
        version, or cannot be reached for a minute."""
        self._loop = asyncio.get_running_loop()
        life = self._where.cursor[0]
        while True:
            try:
                return await self._talk()
            except OtherVersion as error:
                raise LedgerGone(str(error)) from error
            except WireError as error:
                logger.warning("the ledger did not answer, asking again: %s", error)
                last = error
            where = await asyncio.to_thread(self._actor.where)
            if where.cursor[0] != life:
                self._heard_at, life = time.monotonic(), where.cursor[0]
            elif time.monotonic() - self._heard_at > _UNREACHABLE_S:
                raise LedgerGone(
                    f"the ledger at {where.address} must be reachable, but for {_UNREACHABLE_S:.0f} s: {last}; open that way, then "
                    f"resume with --resume auto"
                ) from last
            self._where = where
            self._keep_state(where.state)
            await asyncio.sleep(_RETRY_S)

    async def _talk(self) -> None:
        """One connection: send what has no answer yet, then what comes. Raises WireError when it is lost."""
        connection = await asyncio.to_thread(Connection, self._where.address, secret=self._secret)
        self._client = client = AsyncClient(
            connection, LedgerServer, name="the ledger", silent_s=ANSWER_S, on_state=self._hear,
            on_lost=self._changed.set, lost_as=WireLost,
        )  # fmt: skip
        try:
            life, number = self._cursor
            client.begin(LedgerServer.events, self._take_page, life=life, number=number)
            for number, items in self._sent.items():
                self._begin_call(client, number, items)
            self._send_waiting()
            while client.lost is None and not (self._closing and not self._num_waiting):
                if self._closing and self.is_full:
                    raise LedgerGone("it was closed while its disk was full, and what waited is not stored")
                self._changed.clear()
                await self._changed.wait()
            if client.lost is not None:
                raise WireLost(client.lost)
            with suppress(UnderstudyError):  # gone: its successor forgets all callers
                await client.call(LedgerServer.forget, caller=self._caller)
        finally:
            self._client = None
            await client.close()

    def _send_waiting(self) -> None:
        """Send all that waits, once what was sent before is answered: so much goes together. While the disk is full it goes at
        once, as it may be refused."""
        if self._client is None or self._client.lost is not None or (self._sent and not self.is_full):
            return
        with self._moved:
            items, self._outbox = self._outbox, deque()
        kept = [item for item in items if item.future.set_running_or_notify_cancel()]
        self._count_down(len(items) - len(kept))
        for some in together(kept):
            self._number += 1
            self._sent[self._number] = some
            self._begin_call(self._client, self._number, some)

    def _begin_call(self, client: AsyncClient, number: int, items: list[Outgoing]) -> None:
        take = partial(self._take, number)
        if not isinstance(items[0].what, Job):
            client.begin(LedgerServer.put_rounds, take, rounds=[item.what for item in items])
            return
        jobs = [(item.what.name, item.what.arguments) for item in items if isinstance(item.what, Job)]
        oldest = next(iter(self._sent))
        client.begin(LedgerServer.apply, take, caller=self._caller, number=number, oldest=oldest, jobs=jobs)

    def _take(self, number: int, answer: Any, error: UnderstudyError | None, _: bool) -> None:
        """The answer to a call."""
        if isinstance(error, WireLost):
            return  # it is sent again
        items = self._sent.pop(number)
        for item, (value, refusal) in zip(items, answer or [(NOTHING, error and RemoteError.of(error))] * len(items)):
            if refusal is not None:
                item.future.set_exception(refusal.error())
            else:
                item.future.set_result(unpack_answer(item.what.name, value) if isinstance(item.what, Job) else None)
        self._count_down(len(items))
        self._publish_pages()
        self._send_waiting()

    def _count_down(self, number: int) -> None:
        with self._moved:
            self._num_waiting -= number
            self._moved.notify_all()
        self._changed.set()

    def _hear(self, state: LedgerState) -> None:
        """Called with each answer, and every second while there is none."""
        self._heard_at = time.monotonic()
        self._keep_state(state)
        self._changed.set()
        if self.is_full:
            self._send_waiting()

    def _keep_state(self, state: LedgerState) -> None:
        if state.number > self._state.number:
            self._state, self._counts = state, state.counts

    def _break(self, gone: LedgerGone) -> None:
        with self._moved:
            waiting = [item for items in (*self._sent.values(), self._outbox) for item in items]
            self._broken = gone if waiting or not self._closing else None
            self._sent, self._closing = {}, True
            self._outbox.clear()
            self._moved.notify_all()
        for item in waiting:
            if not item.future.done():
                item.future.set_exception(gone)

    # Events

    def _take_page(self, page: EventPage, error: UnderstudyError | None, _: bool) -> None:
        if error is None:  # else the connection is lost
            self._pages.append((self._number, page))
            self._publish_pages()

    def _publish_pages(self) -> None:
        """What was sent before news came may be what they are about: first it is answered."""
        while self._pages and self._pages[0][0] < next(iter(self._sent), self._number + 1):
            self._tell(self._pages.popleft()[1])

    def _tell(self, page: EventPage) -> None:
        self._cursor = page.cursor
        for event in page.events:
            self._publish_one(event)
        if page.lost:
            operation = partial(episodes.ended, episode_ids=sorted(self._running_ids))
            asked = Outgoing(job_of(operation))
            asked.future.add_done_callback(self._publish_ended)
            with self._moved:
                self._num_waiting += 1
                self._outbox.append(asked)
            self._send_waiting()

    def _publish_ended(self, asked: Future[Any]) -> None:
        if asked.exception() is None:
            self._publish_one(LedgerEvent(closed=tuple(asked.result()), counts=self.counts()))

    def _publish_one(self, event: LedgerEvent) -> None:
        self._running_ids.difference_update(episode.episode_id for episode in event.closed)
        self._publish(event, recovered=True)
