"""The score ledger: of episodes, rounds and branches, by one judge or several, early, late and revised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from buffers.errors import EpisodeClosed, EpisodeError, ScoreConflict, ScoreError, UnknownEpisode
from buffers.ledger import batches, checkpoints, scores
from buffers.ledger.group_commit import Rules, rules_of
from buffers.ledger.ledger import Ledger
from buffers.records import Episode, Row, ScoreDetail
from tests.support.buffer_parts import make_round, make_task, open_running


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with Ledger(None) as ledger:
        yield ledger


def running(ledger: Ledger) -> Episode:
    """An episode of two branches: rounds 0 -> 1, and 2 by itself."""
    (episode,) = open_running(ledger, task=0)
    ledger.put_round(make_round(episode.episode_id))
    ledger.put_round(make_round(episode.episode_id, index=1, parent=0))
    ledger.put_round(make_round(episode.episode_id, index=2, tail=(5,))).result()
    return episode


def rows(ledger: Ledger) -> list[Row]:
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None
    return batch.rows


def test_scores_of_branches_and_rounds_reach_their_rows(ledger: Ledger) -> None:
    episode = running(ledger).episode_id
    assert ledger.notify_score(episode, 0.25, detail=ScoreDetail(round_index=1)).result() is True
    assert ledger.notify_score(episode, -1.0, detail=ScoreDetail(branch=2)).result() is True
    assert ledger.notify_score(episode, 1.0).result() is True
    assert ledger.notify_score(episode, 0.5, detail=ScoreDetail(round_index=2)).result() is True  # late
    first, second = rows(ledger)
    assert (first.score, first.branch_score, first.round_scores) == (1.0, None, {1: 0.25})
    assert (second.score, second.branch_score, second.round_scores) == (1.0, -1.0, {2: 0.5})


def test_a_roles_score_is_the_latest_of_each_judge_and_stays_unless_it_is_revised(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    for index, role in enumerate(("a", "b")):
        ledger.put_round(make_round(episode.episode_id, index=index, tail=(index,), role=role)).result()
    tell = lambda score, **detail: ledger.notify_score(episode.episode_id, score, detail=ScoreDetail(**detail)).result()  # noqa: E731
    assert tell(2.0, role="a") and tell(4.0, role="a", judge="other")
    assert not tell(2.0, role="a")
    with pytest.raises(ScoreConflict):
        tell(3.0, role="a")
    assert tell(6.0, role="a", revise=True)
    assert ledger.counts()["episodes/running"] == 1
    assert tell(0.5)
    assert [(row.role, row.role_score, row.score) for row in rows(ledger)] == [("a", 5.0, 0.5), ("b", None, 0.5)]
    told = ledger.score_history(episode.episode_id).result()
    assert [(each["part"], each["role"]) for each in told][-2:] == [("role", "a"), ("whole", "")]


def test_a_roles_score_is_of_its_episode_only(ledger: Ledger) -> None:
    episodes = open_running(ledger, task=0, group_size=2)
    for number, episode in enumerate(episodes):
        ledger.put_round(make_round(episode.episode_id, role="a")).result()
        ledger.notify_score(episode.episode_id, 3.0 + number, detail=ScoreDetail(role="a")).result()
        ledger.notify_score(episode.episode_id, float(number)).result()
    assert sorted(row.role_score for row in rows(ledger)) == [3.0, 4.0]


def test_what_judges_said_of_another_episode_settles_nothing(ledger: Ledger) -> None:
    one, other = open_running(ledger, task=0, group_size=2)
    for episode in (one, other):
        ledger.put_round(make_round(episode.episode_id)).result()
    ledger.notify_score(one.episode_id, 1.0, detail=ScoreDetail(judge="a", final=False)).result()
    assert ledger.settle_scores(other.episode_id).result() is False
    assert ledger.settle_scores(one.episode_id).result() is True
    assert ledger.counts()["episodes/scored"] == 1 == ledger.counts()["episodes/running"]


def test_an_episode_without_rounds_is_not_settled(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    ledger.notify_score(episode.episode_id, 1.0, detail=ScoreDetail(judge="a", final=False)).result()
    assert ledger.settle_scores(episode.episode_id).result() is False
    assert ledger.counts()["episodes/running"] == 1


def test_rows_carry_what_each_judge_said_last_of_their_whole_episode(ledger: Ledger) -> None:
    one, other = open_running(ledger, task=0, group_size=2)
    for episode in (one, other):
        ledger.put_round(make_round(episode.episode_id)).result()
    told = [
        (one, 0.0, ScoreDetail(judge="b", final=False)),
        (one, 0.25, ScoreDetail(judge="b", final=False, revise=True)),
        (one, 5.0, ScoreDetail(judge="c", round_index=0)),
        (one, 6.0, ScoreDetail(judge="c", round_index=0, revise=True)),
        (one, 1.0, ScoreDetail(judge="a")),
        (other, 3.0, ScoreDetail(judge="d")),
    ]
    for episode, score, detail in told:
        assert ledger.notify_score(episode.episode_id, score, detail=detail).result() is True
    first, second = rows(ledger)
    assert first.judges is not None and list(first.judges.items()) == [("a", 1.0), ("b", 0.25)]
    assert first.round_scores == {0: 6.0} and second.judges == {"d": 3.0}


def test_a_score_of_an_episode_that_was_not_started_is_refused_and_not_on_record(ledger: Ledger) -> None:
    ledger.put_tasks([make_task(0)])
    (episode,) = ledger.open_group("t:0", instance=0, group_size=1).result()
    with pytest.raises(EpisodeError, match=r"cannot score episode .*: it is pending; start it once"):
        ledger.notify_score(episode.episode_id, 1.0).result()
    assert ledger.score_history(episode.episode_id).result() == []


def test_a_score_of_an_episode_that_failed_is_refused(ledger: Ledger) -> None:
    episode = running(ledger).episode_id
    ledger.fail_episode(episode, "broken", max_attempts=1).result()
    with pytest.raises(EpisodeClosed, match=r"cannot score episode .*: it ended as failed \(broken\)"):
        ledger.notify_score(episode, 1.0).result()
    assert [entry["verdict"] for entry in ledger.score_history(episode).result()] == ["closed"]


def test_a_hint_is_of_its_episode_and_its_latest(ledger: Ledger) -> None:
    episodes = open_running(ledger, task=0, group_size=3)
    for number, episode in enumerate(episodes):
        ledger.put_round(make_round(episode.episode_id)).result()
        hints = ("first", "second") if number == 0 else ("",) if number == 1 else ("another",)
        for place, hint in enumerate(hints):
            last = place == len(hints) - 1
            detail = ScoreDetail(judge=str(place), final=last, hint=hint)
            ledger.notify_score(episode.episode_id, float(number), detail=detail).result()
    assert [row.hint for row in sorted(rows(ledger), key=lambda row: row.episode_id)] == ["second", None, "another"]


def test_an_episode_that_is_not_there_has_no_history(ledger: Ledger) -> None:
    with pytest.raises(UnknownEpisode):
        ledger.score_history("no-such-0-0").result()


def test_a_score_of_a_part_does_not_end_the_episode(ledger: Ledger) -> None:
    episode = running(ledger).episode_id
    ledger.notify_score(episode, 0.25, detail=ScoreDetail(round_index=0)).result()
    ledger.put_round(make_round(episode, index=3, tail=(6,))).result()
    assert ledger.counts()["episodes/running"] == 1


def test_a_round_that_was_not_sampled_has_no_score(ledger: Ledger) -> None:
    episode = running(ledger).episode_id
    ledger.put_round(make_round(episode, index=3, tail=(6,), finish_reason="abort")).result()
    for index in (3, 9, -1):
        with pytest.raises(EpisodeError, match=f"must name a round that it sampled, got round {index}"):
            ledger.notify_score(episode, 1.0, detail=ScoreDetail(round_index=index)).result()
    with pytest.raises(ValueError, match="of a round or of a branch"):
        ScoreDetail(round_index=1, branch=1)


def test_an_episodes_score_is_the_mean_of_its_judges(ledger: Ledger) -> None:
    episode = running(ledger).episode_id
    assert ledger.notify_score(episode, 0.0, detail=ScoreDetail(judge="style", final=False)).result() is True
    assert ledger.counts()["episodes/running"] == 1
    assert ledger.notify_score(episode, 1.0, detail=ScoreDetail(judge="tests")).result() is True
    assert ledger.counts()["groups/ready"] == 1
    assert ledger.notify_score(episode, 0.5, detail=ScoreDetail(judge="late")).result() is True
    assert rows(ledger)[0].score == 0.5
    told = [(entry["judge"], entry["value"], entry["verdict"]) for entry in ledger.score_history(episode).result()]
    assert told == [("style", 0.0, "stored"), ("tests", 1.0, "stored"), ("late", 0.5, "stored")]


def test_the_last_judge_may_repeat_what_it_said_before(ledger: Ledger) -> None:
    episode = running(ledger).episode_id
    assert ledger.notify_score(episode, 0.5, detail=ScoreDetail(final=False)).result() is True
    assert ledger.notify_score(episode, 0.5, detail=ScoreDetail(final=False)).result() is False
    assert ledger.notify_score(episode, 0.5).result() is True
    assert ledger.counts()["episodes/scored"] == 1 and len(ledger.score_history(episode).result()) == 1


def test_another_value_is_a_conflict_unless_it_is_a_revision_before_training(ledger: Ledger) -> None:
    episode = running(ledger).episode_id
    ledger.notify_score(episode, 1.0).result()
    with pytest.raises(ScoreConflict, match=r"is 1\.0 and stays, got 0\.5"):
        ledger.notify_score(episode, 0.5).result()
    revision = ScoreDetail(revise=True)
    assert ledger.notify_score(episode, 0.5, detail=revision).result() is True
    assert ledger.notify_score(episode, 0.5, detail=revision).result() is False
    assert ledger.notify_score(episode, 0.5).result() is False
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None and batch.rows[0].score == 0.5
    with pytest.raises(ScoreConflict, match=r"is 0\.5 and stays, got 2\.0"):
        ledger.notify_score(episode, 2.0, detail=revision).result()
    ledger.commit_step(batch.lease_id, step=1, version=1).result()
    assert ledger.notify_score(episode, 0.5).result() is False
    told = [(entry["value"], entry["verdict"]) for entry in ledger.score_history(episode).result()]
    assert told == [(1.0, "stored"), (0.5, "conflict"), (0.5, "revised"), (2.0, "conflict")]


@pytest.mark.parametrize(
    "detail",
    [ScoreDetail(revise=True, final=False), ScoreDetail(final=False), ScoreDetail(), ScoreDetail(judge="other")],
)
def test_judges_that_never_end_do_not_fill_the_ledger(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, detail: ScoreDetail
) -> None:
    monkeypatch.setattr("buffers.ledger.scores.MAX_REPORTS", 5)
    episode = running(ledger).episode_id
    ledger.notify_score(episode, 0.0, detail=ScoreDetail(final=False)).result()
    if detail.judge:
        ledger.notify_score(episode, 0.0).result()
    for number in range(1, 6):
        with suppress(ScoreConflict, ScoreError):
            ledger.notify_score(episode, float(number), detail=detail).result()
    with pytest.raises(ScoreError, match="must be at most 5 reports, got one more; report its final score"):
        ledger.notify_score(episode, 6.0, detail=detail).result()
    assert len(ledger.score_history(episode).result()) == 5
    last = [entry["value"] for entry in ledger.score_history(episode).result() if entry["verdict"] != "conflict"][-1]
    ledger.notify_score(episode, last, detail=ScoreDetail(judge=detail.judge)).result()  # what it said before ends it
    assert ledger.counts()["episodes/scored"] == 1


def test_a_score_after_the_group_is_in_a_batch_is_recorded_and_refused(ledger: Ledger) -> None:
    episode = running(ledger).episode_id
    ledger.notify_score(episode, 1.0).result()
    batch = ledger.claim(1, min_version=0).result()
    assert batch is not None
    with pytest.raises(EpisodeClosed, match="its group is leased"):
        ledger.notify_score(episode, 0.0, detail=ScoreDetail(judge="slow")).result()
    ledger.release(batch.lease_id).result()
    with pytest.raises(EpisodeClosed, match="its group was in a batch"):
        ledger.notify_score(episode, 0.0, detail=ScoreDetail(round_index=0)).result()
    assert [entry["verdict"] for entry in ledger.score_history(episode).result()] == ["stored", "closed", "closed"]


def test_a_score_of_an_episode_that_sampled_nothing_fails_it_and_is_on_record(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    with pytest.raises(EpisodeClosed, match="got none: it failed; check that its agent reached the model"):
        ledger.notify_score(episode.episode_id, 1.0).result()
    told = [(entry["value"], entry["verdict"]) for entry in ledger.score_history(episode.episode_id).result()]
    assert told == [(1.0, "no rounds")]
    assert ledger.counts()["failed/no rounds"] == 1 and ledger.counts()["episodes/scored"] == 0


def test_a_score_of_an_episode_whose_every_round_was_constrained_fails_it_for_that(ledger: Ledger) -> None:
    (episode,) = open_running(ledger, task=0)
    out = np.zeros(3, dtype=np.uint8)
    ledger.put_round(replace(make_round(episode.episode_id), trained=out)).result()
    with pytest.raises(EpisodeClosed, match="each of its model calls constrained what was sampled"):
        ledger.notify_score(episode.episode_id, 1.0).result()
    assert ledger.counts()["failed/all rounds constrained"] == 1
    (silent,) = open_running(ledger, task=1)
    with pytest.raises(EpisodeClosed, match="check that its agent reached the model"):
        ledger.notify_score(silent.episode_id, 1.0).result()


def test_how_each_operation_may_be_stored() -> None:
    """What is repeatable may run again after its answer was lost; what is refusable is sent again by its caller."""
    functions = (
        batches.claim, batches.commit_step, batches.release, batches.evict_stale, batches.read_rounds, scores.notify_score,
        scores.score_history, checkpoints.position, checkpoints.restore, checkpoints.times_opened,
        checkpoints.group_outcomes,
    )  # fmt: skip
    assert {function.__name__: rules_of(function) for function in functions} == {
        "claim": Rules(transient=True),
        "commit_step": Rules(repeatable=True),
        "release": Rules(),
        "evict_stale": Rules(),
        "read_rounds": Rules(repeatable=True),
        "notify_score": Rules(refusable=True),
        "score_history": Rules(repeatable=True),
        "position": Rules(repeatable=True),
        "restore": Rules(),
        "times_opened": Rules(repeatable=True),
        "group_outcomes": Rules(repeatable=True),
    }


def test_a_group_may_lose_members_down_to_its_least_size(ledger: Ledger) -> None:
    ledger.put_tasks([])
    episodes = open_running(ledger, task=0, group_size=4, min_size=2)
    ledger.fail_episode(episodes[0].episode_id, "broken", max_attempts=1).result()
    for episode, score in ((episodes[1], 1.0), (episodes[2], 0.0)):
        ledger.put_round(make_round(episode.episode_id))
        ledger.notify_score(episode.episode_id, score).result()
    assert ledger.counts()["groups/ready"] == 0
    ledger.fail_episode(episodes[3].episode_id, "broken", max_attempts=1).result()
    counts = ledger.counts()
    assert counts["groups/ready"] == 1 and counts["scored/ready"] == 2 and counts["failed/broken"] == 2
    assert [row.episode_id for row in rows(ledger)] == [episodes[1].episode_id, episodes[2].episode_id]
    assert ledger.imbalance() == 0


def test_a_group_that_lost_too_many_is_given_up(ledger: Ledger) -> None:
    episodes = open_running(ledger, task=0, group_size=3, min_size=2)
    ledger.put_round(make_round(episodes[0].episode_id))
    ledger.notify_score(episodes[0].episode_id, 1.0).result()
    for episode in episodes[1:]:
        ledger.fail_episode(episode.episode_id, "broken", max_attempts=1).result()
    counts = ledger.counts()
    assert counts["evicted/failed"] == 1 and counts["lost/failed"] == 1 == counts["scored/evicted"]
    assert ledger.imbalance() == 0


@pytest.mark.parametrize("ending", ["failed", "sampled nothing"])
def test_equal_scores_are_dropped_too_where_the_last_member_is_lost(ending: str) -> None:
    with Ledger(None, drop_zero_variance=True) as ledger:
        episodes = open_running(ledger, task=0, group_size=3, min_size=2)
        for episode in episodes[:2]:
            ledger.put_round(make_round(episode.episode_id))
            ledger.notify_score(episode.episode_id, 1.0).result()
        if ending == "failed":
            ledger.fail_episode(episodes[2].episode_id, "broken", max_attempts=1).result()
        else:
            with pytest.raises(EpisodeClosed):
                ledger.notify_score(episodes[2].episode_id, 1.0).result()
        assert ledger.counts()["evicted/no variance"] == 1


def test_equal_scores_of_a_whole_group_are_dropped() -> None:
    with Ledger(None, drop_zero_variance=True) as ledger:
        for episode in open_running(ledger, task=0, group_size=2):
            ledger.put_round(make_round(episode.episode_id))
            ledger.notify_score(episode.episode_id, 1.0).result()
        assert ledger.counts()["evicted/no variance"] == 1
