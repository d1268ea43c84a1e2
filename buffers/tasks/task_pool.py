"""`TaskPool` (the RFC's ServerWithTask): decides which episode starts next, and when one may start at all.

Agents (or the server on their behalf) lease episodes from it; `run()` is its loop, on the event loop that owns it:

    takes: tasks from its sources          waits for: an agent that asks, and room for an episode
    gives: running episodes to agents      unblocked by: a lease, new tasks, an ended episode, a new policy version

Room (AReaL's capacity rule, arXiv:2505.24298): groups opened - groups evicted < (version + 1 + max_policy_lag) *
groups_per_step, so that what is trained is rarely older than `max_policy_lag`; and at most `max_running` episodes at once.
Invariant: an episode that starts takes a slot, and the slot is released exactly once, with a reason: scored or failed
(or closed, with the pool). The ledger's state decides, however the episode ended. The pool trains nothing and
speaks no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from buffers.errors import EpisodeClosed, UnderstudyError
from buffers.ledger.ledger import Ledger, LedgerEvent
from buffers.records import Episode, EpisodeState, GroupState, Task, UInt8
from buffers.tasks.curriculum import Curriculum
from buffers.tasks.parquet import agent_names, read_tasks

logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 500
MAX_KINDS = 64
_SLICE = 1024
_LOOK_S = 1.0


class PoolClosed(UnderstudyError):
    """There are no more tasks: agents may end."""


class Timer(Protocol):
    """What `call_later` returns."""

    def cancel(self) -> None: ...


class TaskPool:
    """Owned by the event loop on which it is made; only `enqueue_task` may be called from other threads."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        group_size: int,
        groups_per_step: int,
        max_policy_lag: int | None,
        max_running: int,
        deadline_s: float,
        max_attempts: int,
        min_group_size: int | None = None,
        num_greedy: int = 0,
        version: int = 0,
        num_stored: int | None = None,
        times_opened: Mapping[str, int] | None = None,
        curriculum: Curriculum | None = None,
        paused: bool = False,
        on_closed: Callable[[str, str], None] | None = None,
        call_later: Callable[[float, Callable[[], None]], Timer] | None = None,
        has_room: Callable[[], bool] | None = None,
    ) -> None:
        """`max_policy_lag=None`: no learner drives versions, admission is unlimited. `min_group_size`, `num_greedy`: see
        `Ledger.open_group`; greedy members come beside the `group_size` others.
        `num_stored`: places that stored groups take in the batches for which groups may open; None: no batch has any.
        `times_opened`: groups of each task that an earlier process of this run opened. `curriculum`: draws the tasks of a source,
        by what groups scored. `paused`: nothing starts before `unpause`. `on_closed(episode_id, reason)` is called on the pool's
        loop when a started episode ends. `call_later` and `has_room` stand in for the loop's and the ledger's, in tests."""
        self._ledger = ledger
        self._loop = asyncio.get_running_loop()
        self._group_size = group_size
        self._groups_per_step = groups_per_step
        self._max_policy_lag = max_policy_lag
        self._max_running = max_running
        self._deadline_s = deadline_s
        self._max_attempts = max_attempts
        self._num_greedy = num_greedy
        self._min_group_size = group_size if min_group_size is None else min_group_size
        self._has_room = has_room or ledger.has_room
        self._looking: Timer | None = None
        self._version = version
        self._num_stored = num_stored or 0
        self.on_closed = on_closed
        self._call_later: Callable[[float, Callable[[], None]], Timer] = call_later or self._loop.call_later
        before = ledger.counts()
        # Of earlier runs on this ledger: what `version` steps have trained does not count against the capacity.
        self._trained_before = before["groups/trained"] - version * groups_per_step
        self._woken = asyncio.Event()
        self._task_ids: deque[str] = deque()
        self._sources: deque[Iterator[Task]] = deque()
        self._times_opened: Counter[str] = Counter(times_opened or {})
        self._curriculum = curriculum
        self._waiting: deque[asyncio.Future[Episode]] = deque()
        self._unclaimed: dict[str, Episode] = {}
        self._slots: dict[str, Timer] = {}
        self._overdue: list[str] = []
        # A run that is resumed counts on.
        self._released: Counter[str] = Counter(scored=before["episodes/scored"], failed=before["episodes/failed"])
        self._num_started = self._released.total()
        self._paused = paused
        self._sealed = False
        self._closed = False

    @property
    def is_full(self) -> bool:
        """The ledger's disk takes nothing more for now."""
        return self._ledger.is_full

    @property
    def is_closed(self) -> bool:
        """Nothing is given out any more."""
        return self._closed

    async def run(self) -> None:
        """Serve until `close`, or until `seal` and nothing is left to do. Takes, waits, gives: see the module."""
        unwatch = self._ledger.watch(partial(self._post, self._apply_news))  # called in the thread that commits
        try:
            while not self._closed:
                self._woken.clear()  # before looking: what changes during the look is seen by the next one
                await self._end_overdue()
                await self._serve()
                if self._is_exhausted():
                    break
                await self._woken.wait()
        finally:
            unwatch()
            self._end()

    async def put(self, tasks: Iterable[Task]) -> None:
        """Store tasks and queue each of them for one group."""
        tasks = list(tasks)
        await asyncio.wrap_future(self._ledger.put_tasks(tasks))
        self._queue_tasks([task.task_id for task in tasks])

    def add_source(self, tasks: Iterator[Task]) -> None:
        """Queue tasks that are read only when they are needed (in a thread); may be endless. A task that comes again is
        a new instance of it: one group per instance."""
        self._sources.append(tasks)
        self._wake()

    def enqueue_task(self, path: Path | str) -> int:
        """RFC: `threading.Thread(target=enqueue_task, args=("xxx.parquet",))`. From any thread; blocks until stored.

        Returns the number of tasks. Raises TaskError, and then none of them is queued.
        """
        agent_names(Path(path))  # reads every row
        number = 0
        tasks = read_tasks(Path(path))
        while some := list(islice(tasks, _SLICE)):
            self._ledger.put_tasks(some).result()
            self._post(self._queue_tasks, [task.task_id for task in some])
            number += len(some)
        return number

    def unpause(self) -> None:
        """Let episodes start, if the pool was made `paused`."""
        self._paused = False
        self._wake()

    @property
    def max_running(self) -> int:
        """Episodes that may run at once."""
        return self._max_running

    @max_running.setter
    def max_running(self, number: int) -> None:
        """May change at any time. Episodes that run beyond a lower number are played to their end; none starts until then."""
        if number < 1:
            raise ValueError(f"max_running must be >= 1, got {number}; set the most episodes that may run at once")
        self._max_running = number
        self._wake()

    def seal(self) -> None:
        """No more tasks will be added: once all are done, `run` ends and `lease` raises PoolClosed."""
        self._sealed = True
        self._wake()

    def close(self) -> None:
        """Give out nothing any more: `run` ends and waiting leases raise PoolClosed."""
        self._closed = True
        self._wake()

    async def lease(self, *, wait_s: float) -> Episode | None:
        """The next episode, started; None when none may start within `wait_s`. Raises PoolClosed."""
        if self._closed:
            raise PoolClosed("task pool was closed: no more tasks")
        waiter: asyncio.Future[Episode] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._wake()
        try:
            await asyncio.wait([waiter], timeout=wait_s)
        except asyncio.CancelledError:
            if waiter.done() and waiter.exception() is None:  # given while its agent left: the next one gets it
                self._keep(waiter.result())
            waiter.cancel()
            raise
        if waiter.done():
            return waiter.result()
        waiter.cancel()
        return None

    def adopt_running(self, episodes: Iterable[Episode]) -> None:
        """Take over episodes that an earlier process started and whose agents live: each takes a slot, and its deadline starts
        now."""
        for episode in episodes:
            self._num_started += 1
            self._slots[episode.episode_id] = self._start_timer(episode.episode_id)

    def renew(self, episode_id: str) -> bool:
        """Start an episode's deadline now; False when it has ended."""
        timer = self._slots.get(episode_id)
        if timer is None:
            return False
        timer.cancel()
        self._slots[episode_id] = self._start_timer(episode_id)
        return True

    def mask_tokens(self, episode_id: str, trained: Mapping[int, UInt8]) -> Future[None]:
        """See `Ledger.mask_tokens`."""
        return self._ledger.mask_tokens(episode_id, trained)

    async def fail(self, episode_id: str, reason: str) -> None:
        """End an episode without a score and release its slot; it is tried again, or its group is given up. `reason` may be
        anything that a program said: it becomes one line, and its kind one of `MAX_KINDS`."""
        reason = "".join(each if each.isprintable() else " " for each in reason[:MAX_REASON_CHARS])
        if ":" in reason.partition(": ")[0]:  # that of an address, say: no kind ends there
            reason = f"error: {reason}"
        reason = self._countable(reason)
        await asyncio.wrap_future(self._ledger.fail_episode(episode_id, reason, max_attempts=self._max_attempts))
        self._release(episode_id, reason=EpisodeState.FAILED)

    async def set_version(self, version: int, *, oldest: int | None = None, num_stored: int | None = None) -> None:
        """A new policy is in place: what is too old is evicted, and there is room for new groups. `oldest`: of several policies
        with versions of their own, the lowest; None: there is one. `num_stored`: as at the start."""
        if self._curriculum is not None:  # before there is room: what the new version opens is drawn by it
            groups = await asyncio.wrap_future(self._ledger.group_outcomes(self._curriculum.since))
            self._curriculum.learn(groups, version=version)
        self._version = version
        if num_stored is not None:  # then a batch has trained fewer groups than it has places
            self._num_stored = num_stored
            self._trained_before = self._ledger.counts()["groups/trained"] - version * self._groups_per_step
        if self._max_policy_lag is not None:
            least = version if oldest is None else oldest
            await asyncio.wrap_future(self._ledger.evict_stale(least - self._max_policy_lag))
        self._wake()

    def admissible(self) -> int | None:
        """Groups that the capacity rule allows to open now; None: any number."""
        if self._max_policy_lag is None:
            return None
        counts = self._ledger.counts()
        states = (GroupState.OPEN, GroupState.READY, GroupState.LEASED, GroupState.TRAINED)
        admitted = sum(counts[f"groups/{state}"] for state in states) - self._trained_before
        wanted = (self._version + 1 + self._max_policy_lag) * self._groups_per_step - self._num_stored
        return max(0, wanted - admitted)

    def metrics(self) -> dict[str, float]:
        """Started and released episodes (in total), slots and those in use, agents that wait, groups that may open; the ledger's
        counts."""
        admissible = self.admissible()
        return {
            "pool/started": self._num_started,
            "pool/slots": self._max_running,
            "pool/running": len(self._slots),
            "pool/agents_waiting": sum(not waiter.done() for waiter in self._waiting),
            **{f"pool/{reason}": self._released[reason] for reason in ("scored", "failed", "closed")},
            **({} if admissible is None else {"pool/admissible_groups": admissible}),
            **(self._curriculum.figures() if self._curriculum else {}),
            **{f"ledger/{name}": number for name, number in self._ledger.balance().items()},
        }

    async def _serve(self) -> None:
        """Give episodes to those who wait while there is room: pending ones first, then new groups."""
        while (room := self._room()) > 0:
            started = self._ledger.start_pending(limit=room, version=self._version)
            # Registered in the thread that commits: the slot exists before any event of the episode's end can arrive.
            started.add_done_callback(partial(self._post, self._on_started))
            if not await asyncio.wrap_future(started) and not await self._open_groups(-(-room // self._group_size)):
                return

    def _room(self) -> int:
        """Episodes that may start now for agents that wait."""
        for episode_id, episode in list(self._unclaimed.items()):
            if self._pop_waiter(give=episode):
                del self._unclaimed[episode_id]
        self._waiting = deque(waiter for waiter in self._waiting if not waiter.done())
        if self._closed or self._paused or not self._waiting or not self._has_disk():
            return 0
        return min(len(self._waiting), self._max_running - len(self._slots))

    def _has_disk(self) -> bool:
        """Whether the disk has room for new episodes; asked again and again, since no event says when it has."""
        if self._has_room():
            return True
        if self._looking is None:
            logger.warning(
                "the ledger's disk is nearly full: no new episode starts; free some space, episodes start again by themselves"
            )
            self._looking = self._call_later(_LOOK_S, self._look_again)
        return False

    def _look_again(self) -> None:
        self._looking = None
        self._wake()

    async def _open_groups(self, wanted: int) -> bool:
        """Open up to `wanted` groups; False when the capacity rule or the tasks allow none."""
        admissible = self.admissible()
        task_ids = await self._next_tasks(wanted if admissible is None else min(wanted, admissible))
        opened = []
        for task_id in task_ids:
            instance = self._times_opened[task_id]
            self._times_opened[task_id] += 1
            opened.append(
                self._ledger.open_group(
                    task_id,
                    instance=instance,
                    group_size=self._group_size + self._num_greedy,
                    min_size=self._min_group_size + self._num_greedy,
                    num_greedy=self._num_greedy,
                )
            )
        for group in opened:
            await asyncio.wrap_future(group)
        return bool(task_ids)

    async def _next_tasks(self, number: int) -> list[str]:
        task_ids = [self._task_ids.popleft() for _ in range(min(number, len(self._task_ids)))]
        while len(task_ids) < number and self._sources:
            wanted = number - len(task_ids)
            some = await asyncio.to_thread(list, islice(self._sources[0], wanted))
            if len(some) < wanted:
                self._sources.popleft()
            await asyncio.wrap_future(self._ledger.put_tasks(some))
            task_ids += [task.task_id for task in some]
        return task_ids

    async def _end_overdue(self) -> None:
        """Past its deadline an episode has the scores that its judges gave until now, or fails."""
        while self._overdue:
            episode_id = self._overdue.pop()
            with suppress(EpisodeClosed):  # it ended in the same moment; the news of that releases the slot
                if not await asyncio.wrap_future(self._ledger.settle_scores(episode_id)):
                    await self.fail(episode_id, "deadline")

    def _countable(self, reason: str) -> str:
        """Failures are counted by kind, and all counts are read at each commit."""
        kinds = [name for name in self._ledger.counts() if name.startswith("failed/")]
        is_known = f"failed/{reason.partition(':')[0]}" in kinds
        return reason if is_known or len(kinds) < MAX_KINDS else f"other: {reason}"

    def _is_exhausted(self) -> bool:
        if not self._sealed or self._task_ids or self._sources:
            return False
        counts = self._ledger.counts()
        return counts["episodes/pending"] + counts["episodes/running"] == 0

    def _on_started(self, started: Future[list[Episode]]) -> None:
        if started.cancelled() or started.exception() is not None:
            return  # raised where it is awaited
        for episode in started.result():
            self._num_started += 1
            self._slots[episode.episode_id] = self._start_timer(episode.episode_id)
            self._keep(episode)
        if self._closed:
            self._end()

    def _keep(self, episode: Episode) -> None:
        """Give a started episode to the next waiter, or hold it for the one after."""
        if episode.episode_id in self._slots and not self._pop_waiter(give=episode):
            self._unclaimed[episode.episode_id] = episode

    def _pop_waiter(self, *, give: Episode) -> bool:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(give)
                return True
        return False

    def _start_timer(self, episode_id: str) -> Timer:
        return self._call_later(self._deadline_s, partial(self._on_deadline, episode_id))

    def _on_deadline(self, episode_id: str) -> None:
        self._overdue.append(episode_id)
        self._wake()

    def _apply_news(self, news: LedgerEvent) -> None:
        for episode in news.closed:
            self._release(episode.episode_id, reason=episode.state)
        self._wake()

    def _release(self, episode_id: str, *, reason: str) -> None:
        timer = self._slots.pop(episode_id, None)
        if timer is None:
            return  # not a slot of this pool, or released before
        timer.cancel()
        self._unclaimed.pop(episode_id, None)
        self._released[str(reason)] += 1
        if self.on_closed is not None:
            self.on_closed(episode_id, str(reason))
        self._wake()

    def _queue_tasks(self, task_ids: list[str]) -> None:
        self._task_ids.extend(task_ids)
        self._wake()

    def _wake(self) -> None:
        self._woken.set()

    def _post(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run `call` on the pool's loop, in the order of posting."""
        with suppress(RuntimeError):  # the loop has ended, and what waited with it
            self._loop.call_soon_threadsafe(call, *arguments)

    def _end(self) -> None:
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(PoolClosed("task pool was closed: no more tasks"))
        for episode_id in list(self._slots):
            self._release(episode_id, reason="closed")
