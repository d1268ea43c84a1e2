"""The ledger of a run: every task, group, episode, round, score and step, in one SQLite file or in memory.

Called by the task pool, the server and the learner, from any thread. Each changing method queues an operation and
returns a future: `.result()`, or `await asyncio.wrap_future(future)`. Operations are applied in the order of the calls,
and a future is done once its operation is on disk: an acknowledged score implies that the episode's earlier rounds are
stored.
The counts balance at every commit: scored episodes = scored in open + ready + leased + trained + evicted groups.
While the disk is full, scores are refused with StorageFull and all else waits; storing resumes by itself once there is room.
With `path=None` the same code runs in memory and promises nothing beyond the process.

It does not schedule (`task_pool`), does not wait for batches (`multi_round`) and knows no tensors.
"""

from __future__ import annotations

import inspect
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, Self, TypeVar

from buffers.errors import UnderstudyError
from buffers.ledger import batches, checkpoints, episodes, forgetting, scores, sessions, validation
from buffers.ledger.encode import checked_score, stored_round, task_payload
from buffers.ledger.episodes import ClosedEpisode
from buffers.ledger.group_commit import DEFAULT_RULES, GroupCommit, Rules, rules_of, why_not_stored
from buffers.ledger.schema import open_database, overwrite
from buffers.records import Episode, EpisodeState, Replay, Round, ScoreDetail, Task, TrainBatch, UInt8

P = ParamSpec("P")
T = TypeVar("T")

_MAX_REASON = 500
_WHOLE = ScoreDetail()
_PROBE_BYTES = 1 << 18
_RESERVE_BYTES = 1 << 26
"""Kept free for what runs already: 64 MiB, or a twentieth of a small disk."""
_RESERVE_INODES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEvent:
    """What a transaction changed, for those who wait."""

    closed: tuple[ClosedEpisode, ...]
    counts: dict[str, int]


def _method(
    operation: Callable[Concatenate[sqlite3.Connection, P], T | UnderstudyError],
) -> Callable[Concatenate[Ledger, P], Future[T]]:
    """The operation as a method of the ledger, with its words and arguments."""
    _, *names = inspect.signature(operation).parameters

    @wraps(operation)
    def method(self: Ledger, /, *arguments: P.args, **options: P.kwargs) -> Future[T]:
        # By name, as the operations of a ledger in another process travel.
        named = {**dict(zip(names, arguments)), **options}
        return self.run(partial(operation, **named), rules=rules_of(operation))  # type: ignore[arg-type,call-arg]

    return method


class Ledger:
    """See the module. Errors of one operation are raised by its own future and do not touch its neighbours."""

    def __init__(
        self,
        path: Path | None,
        *,
        drop_zero_variance: bool = False,
        resume_episodes: bool = False,
        keep_leases: bool = False,
    ) -> None:
        """Open or make the file. Leased groups of a dead process are ready again or, with `keep_leases`, stay with their learner,
        which has outlived it; its running episodes are retried or, with `resume_episodes`, stay running.

        `drop_zero_variance`: evict a group whose episodes all scored the same, instead of training it (DAPO,
        arXiv:2503.14476).
        """
        db, self._owner = open_database(path)
        name = "in memory" if path is None else str(path)
        try:
            db.execute("BEGIN IMMEDIATE")
            episodes.recover(db, resume_episodes=resume_episodes, keep_leases=keep_leases)
            event = _read_event(db)
            db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            for connection in filter(None, (db, self._owner)):
                connection.close()
            raise UnderstudyError(f"ledger {name} cannot be written: {why_not_stored(error, name=name)}") from error
        self._begin(path, drop_zero_variance=drop_zero_variance, counts=event.counts)
        self._writer = GroupCommit(
            db, name=name, read_event=_read_event, keep_event=self._keep, publish=self._publish, probe=_probe,
        )  # fmt: skip

    def _begin(self, path: Path | None, *, drop_zero_variance: bool, counts: dict[str, int]) -> None:
        self.path = path
        self._drop_equal = drop_zero_variance
        self._counts = counts
        self._watchers: list[Callable[[LedgerEvent], None]] = []
        self._watchers_lock = threading.Lock()
        self._announced = _states(counts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Store what was submitted and close the file. Idempotent."""
        self._writer.close()
        if self._owner is not None:
            self._owner.close()

    @property
    def waits_for(self) -> str:
        """Why nothing can be stored for now (a full disk, another program that holds the file), and the remedy; empty: it can."""
        return self._writer.waits_for

    @property
    def is_full(self) -> bool:
        """Nothing more can be stored for now."""
        return bool(self.waits_for)

    def has_room(self) -> bool:
        """Whether the disk has space for new tasks; it runs out of that before it runs out of space for scores."""
        if self.path is None:
            return True
        disk = os.statvfs(self.path.parent)
        free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        inodes = disk.f_favail >= min(_RESERVE_INODES, disk.f_files // 20) or not disk.f_files
        return not self.is_full and inodes and free >= min(_RESERVE_BYTES, total // 20)

    def counts(self) -> dict[str, int]:
        """The counts after the latest commit; costs nothing.

        `groups/<state>`, `episodes/<state>`, `scored/<group state>` (scored episodes by the state of their group),
        `evicted/<kind>`, `failed/<kind>` (a reason up to its first colon), `lost/<kind>` (scored episodes of evicted
        groups), `rounds`, `tokens` (sampled ones).
        """
        return dict(self._counts)

    def balance(self) -> dict[str, int]:
        """The scored episodes by the state of their group; `difference` is 0 unless the ledger is broken."""
        counts = self._counts
        dead = counts.get("lost/failed", 0)
        states = ("open", "ready", "leased", "trained")
        return {
            "scored": counts["episodes/scored"],
            **{state: counts[f"scored/{state}"] for state in states},
            "evicted": counts["scored/evicted"] - dead,
            "dead": dead,
            "validation": counts["scored/validating"] + counts["scored/validated"],
            "difference": self.imbalance(),
        }

    def imbalance(self) -> int:
        """Scored episodes that no group counts; 0 unless the ledger is broken."""
        counts = self._counts
        return counts["episodes/scored"] - sum(n for name, n in counts.items() if name.startswith("scored/"))

    def watch(self, watcher: Callable[[LedgerEvent], None]) -> Callable[[], None]:
        """Call `watcher` after each commit that moved a group or an episode; returns the call that ends this.

        It runs in whichever thread committed, after the futures of that commit are done: it must return at once, must not
        raise, and must neither wait for the ledger nor for a thread that does.
        """
        with self._watchers_lock:
            self._watchers.append(watcher)

        def unwatch() -> None:
            with self._watchers_lock:
                if watcher in self._watchers:
                    self._watchers.remove(watcher)

        return unwatch

    def run(
        self, operation: Callable[[sqlite3.Connection], T | UnderstudyError], *, rules: Rules = DEFAULT_RULES
    ) -> Future[T]:
        """Queue an operation of `buffers.ledger` whose arguments are bound; every method below does it through this."""
        return self._writer.submit(operation, rules=rules)

    def _call(
        self,
        operation: Callable[Concatenate[sqlite3.Connection, P], T | UnderstudyError],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> Future[T]:
        # The operations take all but the connection by name, so that `arguments` is empty.
        return self.run(partial(operation, *arguments, **options), rules=rules_of(operation))  # type: ignore[arg-type]

    # Operations that are methods as they are; those below check and encode what they are given, in the caller's thread.
    validated = _method(validation.validated)
    adopt_episode = _method(episodes.adopt_episode)
    start_episode = _method(episodes.start_episode)
    start_pending = _method(episodes.start_pending)
    running_episodes = _method(episodes.running_episodes)
    failure_details = _method(episodes.failure_details)
    ended = _method(episodes.ended)
    put_rounds = _method(episodes.put_rounds)
    rounds = _method(batches.read_rounds)
    score_history = _method(scores.score_history)
    release = _method(batches.release)
    evict_stale = _method(batches.evict_stale)
    count_stored = _method(batches.count_stored)
    position = _method(checkpoints.position)
    restore = _method(checkpoints.restore)
    times_opened = _method(checkpoints.times_opened)
    group_outcomes = _method(checkpoints.group_outcomes)
    open_session = _method(sessions.open_session)
    running_sessions = _method(sessions.running_sessions)
    take_over = _method(sessions.take_over)
    session_scores = _method(sessions.session_scores)
    commit_lesson = _method(batches.commit_lesson)
    name_answer = _method(sessions.name_answer)
    give_feedback = _method(sessions.give_feedback)
    settle_session = _method(sessions.settle_session)
    episodes_of = _method(forgetting.episodes_of)
    expired_sessions = _method(forgetting.expired_sessions)
    forget_episodes = _method(forgetting.forget_episodes)

    def overwrite(self, *, whole: bool, wait_s: float = 10.0) -> None:
        """Leave nothing of what was forgotten in the file and its log; blocks, and nothing is stored meanwhile. `whole`: the file
        is written anew, which gives its space back, too. Raises UnderstudyError."""
        if self.path is not None:
            self._writer.apart(partial(overwrite, self.path, whole=whole, wait_s=wait_s))

    def put_tasks(self, tasks: Iterable[Task]) -> Future[int]:
        """Store tasks; how many were new. Raises TaskError for one that JSON cannot hold."""
        rows = [(task.task_id, task_payload(task)) for task in tasks]
        return self._call(episodes.put_tasks, rows=rows)

    def open_group(
        self, task_id: str, *, instance: int, group_size: int, min_size: int | None = None, num_greedy: int = 0
    ) -> Future[list[Episode]]:
        """The pending episodes of a new group; an empty list when (task_id, instance) was opened before.

        `min_size`: members that must score when others have no attempt left (None: all). `num_greedy`: the first so many are
        sampled at temperature 0: the baseline of the others, without which the group is given up.
        """
        _require(group_size >= 1, f"group_size must be >= 1, got {group_size}")
        min_size = group_size if min_size is None else min_size
        _require(1 <= min_size <= group_size, f"min_size must be between 1 and group_size={group_size}, got {min_size}")
        return self._call(
            episodes.open_group,
            task_id=task_id,
            instance=instance,
            group_size=group_size,
            min_size=min_size,
            num_greedy=num_greedy,
        )

    def open_validation(
        self, tasks: Iterable[Task], *, group_size: int, greedy: bool, min_size: int | None = None
    ) -> Future[tuple[int, ...]]:
        """Store tasks and open a group of pending episodes for each, which is scored and never trained; the groups' ids.

        Tasks of a task file that is also trained need other ids than there. `min_size`: members that must score, else the group is
        given up (None: all).
        """
        tasks = list(tasks)
        self.put_tasks(tasks)
        task_ids = [task.task_id for task in tasks]
        min_size = group_size if min_size is None else min_size
        return self._call(
            validation.open_validation, task_ids=task_ids, group_size=group_size, min_size=min_size, greedy=greedy
        )

    def put_round(self, round_: Round, /) -> Future[None]:
        """Store a round of a running episode. Raises EpisodeError for numbers that could not be trained."""
        return self._call(episodes.put_round, stored=stored_round(round_))

    def mask_tokens(self, episode_id: str, trained: Mapping[int, UInt8]) -> Future[None]:
        """Some tokens that a running episode sampled are not to be trained: round index -> [S] 1 where they are, else 0."""
        flags = {index: each.astype("uint8").tobytes() for index, each in trained.items()}
        return self._call(episodes.mask_tokens, episode_id=episode_id, trained=flags)

    def notify_score(
        self, episode_id: str, score: float, *, max_attempts: int = 1, detail: ScoreDetail = _WHOLE
    ) -> Future[bool]:
        """Store a score, of a running episode or of one whose group is in no batch yet: True; False when this judge said
        this before. The first final score of a whole episode ends it.

        Raises ScoreError, UnknownEpisode, ScoreConflict (another value is stored and stays), EpisodeClosed, or StorageFull.
        An episode that sampled nothing fails with reason `no rounds` instead (EpisodeClosed), and is tried again while it
        has had fewer than `max_attempts`.
        """
        value = checked_score(score, episode_id=episode_id)
        return self._call(
            scores.notify_score,
            episode_id=episode_id,
            score=value,
            detail=detail,
            max_attempts=max_attempts,
            drop_zero_variance=self._drop_equal,
        )

    def settle_scores(self, episode_id: str) -> Future[bool]:
        """End a running episode with what its judges said without calling it final; False when none has."""
        return self._call(scores.settle, episode_id=episode_id, drop_zero_variance=self._drop_equal)

    def fail_episode(self, episode_id: str, reason: str, *, max_attempts: int) -> Future[Episode | None]:
        """End an episode as failed: its next attempt, or None when it has none left. Then the group is trained without it if
        enough members are left, or is given up (its members are closed).

        `reason`: a short kind, then optionally a colon and the detail; kinds are counted.
        """
        return self._call(
            episodes.fail_episode,
            episode_id=episode_id,
            reason=reason[:_MAX_REASON],
            max_attempts=max_attempts,
            drop_zero_variance=self._drop_equal,
        )

    def claim(
        self, num_groups: int, *, min_version: int, replay: Replay | None = None, fewest: int | None = None
    ) -> Future[TrainBatch | None]:
        """Lease a full batch of ready groups, the oldest first; None when there are fewer. `replay`: stored ones take places of it.
        `fewest`: so many ready ones will do, at least 1.

        Ready groups whose trained tokens are all older than `min_version` are evicted first. A lease lives as long as the process.
        """
        _require(num_groups >= 1, f"num_groups must be >= 1, got {num_groups}")
        return self._call(batches.claim, num_groups=num_groups, min_version=min_version, replay=replay, fewest=fewest)

    def commit_step(self, lease_id: int, *, step: int, version: int) -> Future[int]:
        """The leased groups are trained by `step`, which made policy `version`; how many. Raises LeaseError.

        Also raises UnderstudyError when the counts do not balance: nothing may be trained from a broken ledger.
        """
        _require(self.imbalance() == 0, f"each scored episode must be counted with a group, {self.imbalance()} are not")
        return self._call(batches.commit_step, lease_id=lease_id, step=step, version=version)

    def _keep(self, event: LedgerEvent) -> None:
        """Keeps the counts before the futures are done, so that a caller finds its own change in `counts`."""
        self._counts = event.counts

    def _publish(self, event: LedgerEvent, *, recovered: bool) -> None:
        states = _states(event.counts)
        if not recovered and not event.closed and states == self._announced:
            return
        self._announced = states
        with self._watchers_lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher(event)


def _read_event(db: sqlite3.Connection) -> LedgerEvent:
    closed = tuple(
        ClosedEpisode(episode_id=episode_id, state=EpisodeState(state), reason=reason)
        for episode_id, state, reason in db.execute("SELECT episode_id, state, reason FROM temp.closed")
    )
    if closed:
        db.execute("DELETE FROM temp.closed")
    counts = dict(db.execute("SELECT name, n FROM counter").fetchall())
    return LedgerEvent(closed=closed, counts=counts)


def _probe(db: sqlite3.Connection) -> None:
    """Stays stored: what is removed again in the same transaction would never reach the disk."""
    db.execute("INSERT OR REPLACE INTO meta VALUES ('probe', hex(zeroblob(?)))", (_PROBE_BYTES // 2,))


def _states(counts: dict[str, int]) -> dict[str, int]:
    return {name: n for name, n in counts.items() if name not in ("rounds", "tokens")}


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise UnderstudyError(f"ledger: {rule}")
