"""Sessions of users in the ledger: one running episode each, feedback of their own users, whenever it comes."""

from __future__ import annotations

import pytest

from buffers.errors import UnknownEpisode
from buffers.ledger.ledger import Ledger
from tests.support.buffer_parts import make_round


@pytest.fixture
def ledger():
    with Ledger(None) as ledger:
        yield ledger


def opened(
    ledger: Ledger, episode_id: str, *, user: str = "ann", name: str = "s", rounds: int = 1, is_side: bool = False
) -> str:
    ledger.open_session(episode_id=episode_id, user=user, name=name, is_side=is_side, version=3).result()
    for index in range(rounds):
        ledger.put_round(make_round(episode_id, index=index)).result()
        ledger.name_answer(request_id=f"{episode_id}-{index}", episode_id=episode_id, round_index=index).result()
    return episode_id


def told(ledger: Ledger, *, user: str | None = "ann", session: str = "", response_id: str = "", **said):
    words = {"round_index": None, "score": None, "text": "", "source": "", **said}
    return ledger.give_feedback(user=user, session=session, response_id=response_id, **words).result()


def settled(ledger: Ledger, episode_id: str, *, words_count: bool = False) -> bool:
    return ledger.settle_session(episode_id=episode_id, words_count=words_count).result()


def test_a_session_without_feedback_goes_on(ledger):
    opened(ledger, "e1")
    assert not settled(ledger, "e1")
    assert [each.episode_id for each in ledger.running_sessions(user="ann", name="s").result()] == ["e1"]


def test_a_session_with_a_score_is_trained_by_it_and_its_name_goes_on(ledger):
    opened(ledger, "e1")
    assert told(ledger, session="s", score=0.25)._asdict() == {
        "episode_id": "e1", "round_index": None, "is_new": True, "trains": True
    }  # fmt: skip
    assert settled(ledger, "e1")
    assert ledger.running_sessions(user="ann", name="s").result() == []
    opened(ledger, "e2")
    batch = ledger.claim(1, min_version=0).result()
    assert {(row.episode_id, row.score) for row in batch.rows} == {("e1", 0.25)}


def test_answers_are_scored_by_their_ids_and_the_session_by_their_mean(ledger):
    opened(ledger, "e1", rounds=3)
    told(ledger, response_id="e1-0", score=1.0)
    told(ledger, response_id="e1-2", score=0.0)
    told(ledger, response_id="e1-2", score=0.5)  # thought better of it
    assert settled(ledger, "e1")
    rows = ledger.claim(1, min_version=0).result().rows
    assert {row.score for row in rows} == {0.75}
    assert {index: value for row in rows for index, value in row.round_scores.items()} == {0: 0.25, 2: -0.25}


def test_a_session_is_compared_with_those_of_its_user_that_were_trained_before(ledger):
    baselines = []
    for number, (user, score) in enumerate([("ann", 1.0), ("ann", 0.0), ("bob", 0.25), ("ann", 1.0), ("bob", 1.0)]):
        opened(ledger, f"e{number}", user=user)
        told(ledger, user=user, session="s", score=score)
        assert settled(ledger, f"e{number}")
        batch = ledger.claim(1, min_version=0).result()
        baselines.append(batch.rows[0].baseline)
        ledger.commit_step(batch.lease_id, step=number + 1, version=number + 1).result()
    assert baselines == [None, 1.0, None, 0.5, 0.25]


def test_two_sources_of_one_answer_are_told_apart(ledger):
    opened(ledger, "e1")
    told(ledger, response_id="e1-0", score=1.0, source="tests")
    told(ledger, response_id="e1-0", score=0.0, source="ann")
    assert settled(ledger, "e1")
    assert ledger.claim(1, min_version=0).result().rows[0].score == 0.5


def test_words_alone_train_only_where_words_are_learned_from(ledger):
    opened(ledger, "e1")
    assert told(ledger, session="s", text="shorter").is_new
    assert not told(ledger, session="s", text="shorter").is_new
    assert not settled(ledger, "e1")
    assert settled(ledger, "e1", words_count=True)
    (row,) = ledger.claim(1, min_version=0).result().rows
    assert (row.score, row.hint) == (0.0, "shorter")


def test_words_beside_a_score_leave_the_score_alone(ledger):
    opened(ledger, "e1")
    told(ledger, session="s", score=0.5)
    told(ledger, session="s", text="kinder")
    assert settled(ledger, "e1")
    (row,) = ledger.claim(1, min_version=0).result().rows
    assert (row.score, row.hint) == (0.5, "kinder")


@pytest.mark.parametrize("what", [{"session": "s"}, {"session": "e1"}, {"response_id": "e1-0"}])
def test_feedback_is_of_the_users_own_sessions(ledger, what):
    opened(ledger, "e1")
    with pytest.raises(UnknownEpisode, match="must be"):
        told(ledger, user="bob", score=1.0, **what)
    assert not settled(ledger, "e1")
    assert told(ledger, user=None, score=1.0, **what).trains


def test_feedback_of_what_was_never_said_is_refused(ledger):
    with pytest.raises(UnknownEpisode, match="got 'chatcmpl-1'"):
        told(ledger, response_id="chatcmpl-1", score=1.0)


def test_feedback_after_training_is_recorded_and_says_so(ledger):
    opened(ledger, "e1")
    told(ledger, session="s", score=1.0)
    assert settled(ledger, "e1")
    batch = ledger.claim(1, min_version=0).result()
    ledger.commit_step(batch.lease_id, step=1, version=1).result()
    assert not told(ledger, session="s", score=0.0).trains
    assert not told(ledger, session="s", text="no").trains
    verdicts = [each["verdict"] for each in ledger.score_history("e1").result()]
    assert verdicts == ["stored", "conflict", "words"]


def test_a_side_call_is_no_session_that_feedback_can_mean(ledger):
    opened(ledger, "e1")
    opened(ledger, "e2", is_side=True)
    assert told(ledger, session="s", score=1.0).episode_id == "e1"
    assert [each.episode_id for each in ledger.running_sessions(user="ann", name="s").result()] == ["e1"]


def test_a_restart_finds_what_runs(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        opened(ledger, "e1")
    with Ledger(tmp_path / "ledger.sqlite", resume_episodes=True) as ledger:
        (session,) = ledger.running_sessions(user="ann", name="s").result()
        assert session.episode_id == "e1"
        assert len(ledger.rounds("e1").result()) == 1
        assert told(ledger, session="s", score=1.0).trains
