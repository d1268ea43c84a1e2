"""The rules that a buffer of episodes keeps, each as a function that fails with an AssertionError.

Run by the tests of our buffers, and by yours of a buffer of your own. A buffer offers the methods of `Buffer`, with the meaning
that `buffers.ledger.ledger.Ledger` documents; each changing one returns a future that is done when the change is
stored. The rules ask for nothing else: no files, no SQL, no threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from buffers.errors import EpisodeClosed, EpisodeError, LeaseError, ScoreConflict, ScoreError, UnknownEpisode
from buffers.records import Episode, Position, Replay, Round, ScoreDetail, Task, TrainBatch

PATIENCE_S = 10.0


class Buffer(Protocol):
    """What the rules ask of a buffer; it is also a context manager that closes it."""

    def close(self) -> None: ...
    def balance(self) -> dict[str, int]: ...
    def put_tasks(self, tasks: Iterable[Task]) -> Future[int]: ...
    def open_group(
        self, task_id: str, *, instance: int, group_size: int, min_size: int | None = None
    ) -> Future[list[Episode]]: ...
    def start_episode(self, episode_id: str, *, version: int) -> Future[None]: ...
    def start_pending(self, *, limit: int, version: int) -> Future[list[Episode]]: ...
    def put_round(self, round_: Round, /) -> Future[None]: ...
    def notify_score(
        self,
        episode_id: str,
        score: float,
        *,
        max_attempts: int = 1,
        detail: ScoreDetail = ScoreDetail(),  # noqa: B008
    ) -> Future[bool]: ...
    def fail_episode(self, episode_id: str, reason: str, *, max_attempts: int) -> Future[Episode | None]: ...
    def claim(
        self, num_groups: int, *, min_version: int, replay: Replay | None = None
    ) -> Future[TrainBatch | None]: ...
    def count_stored(self, replay: Replay) -> Future[int]: ...
    def commit_step(self, lease_id: int, *, step: int, version: int) -> Future[int]: ...
    def release(self, lease_id: int) -> Future[int]: ...
    def evict_stale(self, min_version: int) -> Future[int]: ...
    def position(self) -> Future[Position]: ...
    def restore(self, target: Position) -> Future[int]: ...


class Site:
    """A place for one buffer. `open` may be called again after the buffer was closed: it is the same one then."""

    def __init__(self, open_buffer: Callable[[Path], Any], *, path: Path, durable: bool) -> None:
        self._open = open_buffer
        self._path = path
        self.durable = durable

    def open(self) -> Any:
        """A `Buffer`, as a context manager."""
        buffer: AbstractContextManager[Buffer] = self._open(self._path)
        return buffer


Rule = Callable[[Site], None]


def batches_hold_complete_groups_in_whatever_order_scores_arrive(site: Site) -> None:
    chance = random.Random(0)
    with site.open() as buffer:
        episodes = [episode for task in range(6) for episode in running(buffer, task=task, size=3)]
        chance.shuffle(episodes)
        trained = 0
        for episode in episodes:
            score(buffer, episode, value=chance.random())
            batch = buffer.claim(1, min_version=0).result()
            if batch is not None:
                members = [row.episode_id for row in batch.rows]
                assert len(members) == 3 and len({row.group_id for row in batch.rows}) == 1, members
                trained += 1
                buffer.commit_step(batch.lease_id, step=trained, version=trained).result()
            balanced(buffer)
        assert trained == 6


def a_batch_holds_exactly_what_was_sampled(site: Site) -> None:
    with site.open() as buffer:
        (episode,) = running(buffer, task=0, size=1)
        buffer.put_round(a_round(episode, sampled=(7, 8))).result()
        buffer.put_round(a_round(episode, index=1, parent=0, tail=(5,), sampled=(9,), version=3)).result()
        buffer.notify_score(episode.episode_id, 0.5).result()
        (row,) = claimed(buffer, number=1).rows
        assert row.ids.tolist() == [1, 2, 7, 8, 5, 9] and row.mask.tolist() == [0, 0, 1, 1, 0, 1]
        assert row.versions.tolist() == [-1, -1, 0, 0, -1, 3] and row.score == 0.5
        assert row.logprobs[row.mask == 1].tolist() == [-0.125, -0.25, -0.125]


def scores_of_branches_and_rounds_reach_their_rows(site: Site) -> None:
    with site.open() as buffer:
        (episode,) = running(buffer, task=0, size=1)
        buffer.put_round(a_round(episode)).result()
        buffer.put_round(a_round(episode, index=1, tail=(4,))).result()
        buffer.notify_score(episode.episode_id, 0.25, detail=ScoreDetail(round_index=0)).result()
        buffer.notify_score(episode.episode_id, -1.0, detail=ScoreDetail(branch=1)).result()
        buffer.notify_score(episode.episode_id, 1.0).result()
        first, second = claimed(buffer, number=1).rows
        assert (first.branch_score, first.round_scores) == (None, {0: 0.25})
        assert (second.branch_score, second.round_scores, second.score) == (-1.0, {}, 1.0)


def a_score_is_stored_once_and_another_value_is_refused(site: Site) -> None:
    with site.open() as buffer:
        (episode,) = running(buffer, task=0, size=1)
        buffer.put_round(a_round(episode)).result()
        answers = [buffer.notify_score(episode.episode_id, 1.0).result() for _ in range(3)]
        assert answers == [True, False, False]
        refused(ScoreConflict, lambda: buffer.notify_score(episode.episode_id, 0.5))
        assert buffer.notify_score(episode.episode_id, 0.5, detail=ScoreDetail(revise=True)).result() is True
        batch = claimed(buffer, number=1)
        refused(EpisodeError, lambda: buffer.notify_score(episode.episode_id, 2.0, detail=ScoreDetail(revise=True)))
        assert batch.rows[0].score == 0.5


def only_finite_numbers_are_scores(site: Site) -> None:
    with site.open() as buffer:
        (episode,) = running(buffer, task=0, size=1)
        buffer.put_round(a_round(episode)).result()
        for value in (float("nan"), float("inf"), -float("inf"), 1e40, True, "1", None, [1.0]):
            refused(ScoreError, partial(buffer.notify_score, episode.episode_id, value))
        assert buffer.balance()["scored"] == 0


def who_is_unknown_or_has_ended_takes_nothing(site: Site) -> None:
    with site.open() as buffer:
        (episode,) = running(buffer, task=0, size=1)
        buffer.fail_episode(episode.episode_id, "broken", max_attempts=1).result()
        refused(EpisodeClosed, lambda: buffer.notify_score(episode.episode_id, 1.0))
        refused(EpisodeClosed, lambda: buffer.put_round(a_round(episode)))
        refused(UnknownEpisode, lambda: buffer.notify_score("nobody", 1.0))
        balanced(buffer)


def a_failed_member_is_tried_again_and_then_its_group_is_given_up(site: Site) -> None:
    with site.open() as buffer:
        first, second = running(buffer, task=0, size=2)
        score(buffer, first, value=1.0)
        retry = buffer.fail_episode(second.episode_id, "lost", max_attempts=2).result()
        assert retry is not None and (retry.attempt, retry.sample_index) == (1, 1)
        refused(EpisodeClosed, lambda: buffer.notify_score(second.episode_id, 1.0))
        buffer.start_pending(limit=1, version=0).result()
        assert buffer.fail_episode(retry.episode_id, "lost", max_attempts=2).result() is None
        assert buffer.claim(1, min_version=0).result() is None
        assert buffer.balance()["dead"] == 1
        balanced(buffer)


def a_group_may_go_on_without_a_lost_member(site: Site) -> None:
    with site.open() as buffer:
        episodes = running(buffer, task=0, size=3, min_size=2)
        for episode in episodes[:2]:
            score(buffer, episode, value=1.0)
        assert buffer.claim(1, min_version=0).result() is None
        buffer.fail_episode(episodes[2].episode_id, "lost", max_attempts=1).result()
        assert len(claimed(buffer, number=1).rows) == 2
        balanced(buffer)


def the_oldest_groups_are_claimed_first_and_a_batch_is_full_or_none(site: Site) -> None:
    with site.open() as buffer:
        groups = [ready(buffer, task=task) for task in range(3)]
        assert claimed(buffer, number=2).group_ids == tuple(groups[:2])
        assert buffer.claim(2, min_version=0).result() is None
        assert claimed(buffer, number=1).group_ids == (groups[2],)


def a_batch_that_was_given_back_is_claimed_first_and_as_it_was(site: Site) -> None:
    with site.open() as buffer:
        for task in range(4):
            ready(buffer, task=task)
        claimed(buffer, number=2)
        second = claimed(buffer, number=2)
        assert buffer.release(second.lease_id).result() == 2
        refused(LeaseError, lambda: buffer.commit_step(second.lease_id, step=1, version=1))
        assert claimed(buffer, number=2).group_ids == second.group_ids


def a_step_is_committed_once_and_answers_again(site: Site) -> None:
    with site.open() as buffer:
        ready(buffer, task=0)
        ready(buffer, task=1)
        first, second = claimed(buffer, number=1), claimed(buffer, number=1)
        assert [buffer.commit_step(first.lease_id, step=1, version=1).result() for _ in range(2)] == [1, 1]
        refused(LeaseError, lambda: buffer.commit_step(first.lease_id, step=2, version=2))
        refused(LeaseError, lambda: buffer.commit_step(second.lease_id, step=1, version=1))
        assert buffer.balance()["trained"] == 1 and buffer.balance()["leased"] == 1


def a_group_whose_tokens_are_all_too_old_never_enters_a_batch(site: Site) -> None:
    with site.open() as buffer:
        ready(buffer, task=0, version=0)
        fresh = ready(buffer, task=1, version=2)
        batch = buffer.claim(1, min_version=1).result()
        assert batch is not None and batch.group_ids == (fresh,)
        assert buffer.balance()["evicted"] == 1
        old, long = running(buffer, task=2, size=2)
        score(buffer, old, value=1.0)
        buffer.put_round(a_round(long)).result()
        assert buffer.evict_stale(1).result() == 0, "what it samples from now on is fresh"
        buffer.put_round(a_round(long, index=1, parent=0, version=1)).result()
        buffer.notify_score(long.episode_id, 0.0).result()
        assert buffer.evict_stale(1).result() == 0
        batch = buffer.claim(1, min_version=1).result()
        assert batch is not None and {version for row in batch.rows for version in row.versions.tolist()} == {-1, 0, 1}
        ready(buffer, task=3, version=1)
        assert buffer.evict_stale(2).result() == 1
        balanced(buffer)


def going_back_gives_back_what_was_trained_after_the_checkpoint(site: Site) -> None:
    with site.open() as buffer:
        for task in range(3):
            ready(buffer, task=task)
        buffer.commit_step(claimed(buffer, number=1).lease_id, step=1, version=1).result()
        checkpoint = buffer.position().result()
        lost = claimed(buffer, number=1)
        buffer.commit_step(lost.lease_id, step=2, version=2).result()
        assert buffer.restore(checkpoint).result() == 1
        again = claimed(buffer, number=1)
        assert again.group_ids == lost.group_ids
        buffer.commit_step(again.lease_id, step=2, version=2).result()
        assert buffer.balance()["trained"] == 2
        balanced(buffer)


def stored_groups_take_places_of_a_batch_as_often_as_they_may(site: Site) -> None:
    replay = Replay(num_groups=1, min_version=0, only="solved", times=2)
    with site.open() as buffer:
        stored = ready(buffer, task=0)
        first = claimed(buffer, number=1)
        buffer.commit_step(first.lease_id, step=1, version=1).result()
        fresh = [ready(buffer, task=task, version=1) for task in (1, 2, 3)]
        checkpoint = buffer.position().result()
        assert buffer.count_stored(replay).result() == 1
        batch = buffer.claim(2, min_version=1, replay=replay).result()
        assert batch is not None and batch.group_ids == (fresh[0], stored)
        assert [row.times_trained for row in batch.rows] == [0, 1]
        assert np.array_equal(batch.rows[1].logprobs, first.rows[0].logprobs)
        assert buffer.commit_step(batch.lease_id, step=2, version=2).result() == 2
        balanced(buffer)
        assert buffer.restore(checkpoint).result() == 1
        again = buffer.claim(2, min_version=1, replay=replay).result()
        assert again is not None and again.group_ids == batch.group_ids, "a batch is made again as it was"
        buffer.commit_step(again.lease_id, step=2, version=2).result()
        last = buffer.claim(2, min_version=1, replay=replay).result()
        assert last is not None and last.group_ids == (fresh[1], fresh[0]), "no group is trained more often than it may"
        balanced(buffer)


def what_was_acknowledged_survives_closing_and_a_lease_does_not(site: Site) -> None:
    if not site.durable:
        return
    with site.open() as buffer:
        group = ready(buffer, task=0)
        lost = claimed(buffer, number=1)
        (episode,) = running(buffer, task=1, size=1)
        buffer.put_round(a_round(episode)).result()
    with site.open() as buffer:
        refused(LeaseError, lambda: buffer.commit_step(lost.lease_id, step=1, version=1))
        again = claimed(buffer, number=1)
        assert again.group_ids == (group,) and again.lease_id > lost.lease_id
        assert np.array_equal(again.rows[0].ids, lost.rows[0].ids)
        (retry,) = buffer.start_pending(limit=1, version=0).result()
        assert (retry.group_id, retry.attempt) == (episode.group_id, 1)
        balanced(buffer)


def a_round(
    episode: Episode,
    *,
    index: int = 0,
    parent: int | None = None,
    tail: tuple[int, ...] = (1, 2),
    sampled: tuple[int, ...] = (7, 8, 9),
    version: int = 0,
) -> Round:
    """A round with numbers that are exact in float32."""
    return Round(
        episode_id=episode.episode_id,
        round_index=index,
        parent=parent,
        tail_ids=np.array(tail, dtype=np.int32),
        sampled_ids=np.array(sampled, dtype=np.int32),
        logprobs=np.array([-(place + 1) / 8 for place in range(len(sampled))], dtype=np.float32),
        versions=np.full(len(sampled), version, dtype=np.int32),
    )


def running(buffer: Buffer, *, task: int, size: int, version: int = 0, min_size: int | None = None) -> list[Episode]:
    """A group whose members run."""
    buffer.put_tasks([Task(task_id=f"t:{task}", prompt=[{"role": "user", "content": "?"}])]).result()
    sizes: dict[str, Any] = {"group_size": size, "min_size": min_size}
    episodes = buffer.open_group(f"t:{task}", instance=0, **sizes).result()
    for episode in episodes:
        buffer.start_episode(episode.episode_id, version=version).result()
    return episodes


def score(buffer: Buffer, episode: Episode, *, value: float, version: int = 0) -> None:
    """One round, then its score."""
    buffer.put_round(a_round(episode, version=version)).result()
    assert buffer.notify_score(episode.episode_id, value).result() is True


def ready(buffer: Buffer, *, task: int, version: int = 0) -> int:
    """A group of one that waits; its id."""
    (episode,) = running(buffer, task=task, size=1, version=version)
    score(buffer, episode, value=1.0, version=version)
    return episode.group_id


def claimed(buffer: Buffer, *, number: int) -> TrainBatch:
    """A batch, which must be there."""
    batch = buffer.claim(number, min_version=0).result()
    assert batch is not None, f"{number} groups must be ready"
    return batch


def refused(kind: type[Exception], act: Callable[[], Future[Any]]) -> None:
    """The act must fail with this kind of error, at once or in its future."""
    try:
        act().result()
    except kind:
        return
    raise AssertionError(f"must be refused with {kind.__name__}")


def balanced(buffer: Buffer) -> None:
    """Every scored episode is counted once."""
    balance = buffer.balance()
    places = ("open", "ready", "leased", "trained", "evicted", "dead", "validation")
    assert balance["scored"] == sum(balance[place] for place in places) and balance["difference"] == 0, balance


RULES: tuple[Rule, ...] = (
    batches_hold_complete_groups_in_whatever_order_scores_arrive,
    a_batch_holds_exactly_what_was_sampled,
    scores_of_branches_and_rounds_reach_their_rows,
    a_score_is_stored_once_and_another_value_is_refused,
    only_finite_numbers_are_scores,
    who_is_unknown_or_has_ended_takes_nothing,
    a_failed_member_is_tried_again_and_then_its_group_is_given_up,
    a_group_may_go_on_without_a_lost_member,
    the_oldest_groups_are_claimed_first_and_a_batch_is_full_or_none,
    a_batch_that_was_given_back_is_claimed_first_and_as_it_was,
    a_step_is_committed_once_and_answers_again,
    a_group_whose_tokens_are_all_too_old_never_enters_a_batch,
    going_back_gives_back_what_was_trained_after_the_checkpoint,
    stored_groups_take_places_of_a_batch_as_often_as_they_may,
    what_was_acknowledged_survives_closing_and_a_lease_does_not,
)
