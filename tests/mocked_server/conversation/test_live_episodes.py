"""Rules of mocked_server/conversation/live_episodes.py: what is remembered of a running episode, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from buffers.errors import EpisodeClosed, RequestRefused, UnknownEpisode
from buffers.records import Episode, Task
from mocked_server.conversation import live_episodes
from mocked_server.conversation.chat_history import ChatOptions
from mocked_server.conversation.live_episodes import MAX_KEPT_BYTES, ROUND_BYTES, Episodes, LiveEpisode
from tests.mocked_server.conversation.test_continuation import NEXT, TOOLS, USER, add, chat, episode, said


def record(episode_id: str) -> Episode:
    return Episode(episode_id=episode_id, task=Task(task_id="t", prompt=[]), group_id=1, sample_index=0)


def test_a_round_knows_its_chain_and_its_own_ids() -> None:
    live = episode()
    root = add(live, 1, 2, 3, num_sampled=2)
    child = add(live, 4, 5, parent=root)
    grandchild = add(live, 6, parent=child)
    assert [each.total for each in (root, child, grandchild)] == [3, 5, 6]
    assert root.tail_ids.tolist() == [1] and grandchild.tail_ids.tolist() == []
    assert grandchild.chain() == [root, child, grandchild]
    assert grandchild.chain_ids().tolist() == [1, 2, 3, 4, 5, 6]
    assert (live.rounds, live.roots, root.children, child.children) == (
        [root, child, grandchild], [root], [child], [grandchild],
    )  # fmt: skip


def causes(live: LiveEpisode) -> list[str | None]:
    return [each.cause for each in live.rounds]


def test_a_round_beside_another_has_a_cause() -> None:
    live = episode()
    root = add(live, 1, 2, chat=chat(USER))
    add(live, 3, 4, parent=root, chat=chat(USER, said("ok"), NEXT))
    add(live, 9, 4, parent=root, chat=chat(USER, said("ok"), USER))
    add(live, 3, 5, parent=root)
    add(live, 8, 9, chat=chat(NEXT))
    add(live, 7, 9)
    add(live, 1, 6)
    add(live, 5, 5, chat=chat(USER))
    assert causes(live) == [
        None, None, "forked", "resampled", "new_conversation", "prompt_differs", "resampled", "resampled",
    ]  # fmt: skip
    assert live.branch_causes == {"forked": 1, "resampled": 3, "new_conversation": 1, "prompt_differs": 1}


def test_a_cause_that_was_found_already_stays_and_is_counted() -> None:
    live = episode()
    add(live, 1, 2)
    add(live, 1, 3, cause="content_edited")
    add(live, 1, 3, cause="content_edited")
    assert causes(live) == [None, "content_edited", "content_edited"] and live.branch_causes == {"content_edited": 2}


def test_an_aborted_round_is_not_remembered() -> None:
    live = episode()
    add(live, 1, 2, chat=chat(USER), finish_reason="abort")
    assert (live.rounds, live.roots, live.by_history, live.kept_bytes) == ([], [], {}, 0)


def test_a_history_leads_to_the_rounds_that_answered_it() -> None:
    live = episode()
    asked, longer = chat(USER), chat(NEXT, said("ok"), USER)
    first, second = add(live, 1, 2, chat=asked), add(live, 1, 3, chat=asked)
    third = add(live, 8, 9, chat=longer)
    add(live, 7, 9, chat=chat())
    add(live, 6, 9)
    assert live.by_history == {asked.digests[-1]: [first, second], longer.digests[-1]: [third]}
    assert live.openings == {chat(USER).digests[1], chat(NEXT).digests[1]} and live.longest == 3


def test_what_is_kept_is_counted_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    live = episode()
    add(live, 1, 2, 3, text="four")
    assert live.kept_bytes == 3 * 4 + 4 + ROUND_BYTES
    before = live.kept_bytes
    first = add(live, 1, 2, chat=chat(USER, asked=TOOLS), text="")
    assert live.kept_bytes - before == 8 + ROUND_BYTES + TOOLS.num_chars
    again = ChatOptions.of(dict(TOOLS.template_kwargs), None)
    before = live.kept_bytes
    second = add(live, 1, 2, chat=chat(USER, asked=again), text="")
    assert live.kept_bytes - before == 8 + ROUND_BYTES, "equal tools are kept once"
    assert second.asked is first.asked is TOOLS and live.known(again) is TOOLS
    other = ChatOptions.of({"tools": ["sub"]}, None)
    assert live.known(other) is other
    monkeypatch.setattr(live_episodes, "MAX_KEPT_BYTES", live.kept_bytes)
    live.check_room()
    live.kept_bytes += 1
    with pytest.raises(RequestRefused, match="end it and lease a new task") as refusal:
        live.check_room()
    assert refusal.value.status == 413 and MAX_KEPT_BYTES == 64 * 2**20 and ROUND_BYTES == 1024


def test_requests_are_counted_while_they_are_answered_and_are_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(live_episodes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    live = episode()
    live.heard = now[0]
    with live.answering(), live.answering():
        now[0] = 105.0
        assert (live.requests, live.heard) == (2, 100.0)
    assert (live.requests, live.heard) == (0, 105.0)
    with pytest.raises(RuntimeError), live.answering():
        raise RuntimeError
    assert live.requests == 0


def test_silent_are_leased_episodes_without_a_request_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(live_episodes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    episodes = Episodes()
    for name, worker in (("leased", "w"), ("nameless", ""), ("ours", None), ("busy", "w")):
        episodes.open(record(name), worker=worker).heard = now[0]
    episodes.get("busy").requests = 1
    now[0] = 110.0
    assert episodes.silent(10.0) == []
    assert episodes.silent(9.0) == ["leased", "nameless"]
    assert episodes.ids() == ["leased", "nameless", "ours", "busy"]
    assert episodes.ids(worker="w") == ["leased", "busy"] and episodes.ids(worker="") == ["nameless"]


def test_an_ended_episode_is_forgotten_and_its_first_reason_is_told() -> None:
    episodes = Episodes()
    live = episodes.open(record("a"))
    assert episodes.get("a") is live and len(episodes) == 1 and live.episode_id == "a"
    add(live, 1, 2, chat=chat(USER))
    answers = live.answers
    episodes.close("a", "scored")
    episodes.close("a", "failed")
    assert (live.rounds, live.roots, live.by_history, live.openings, live._asked) == ([], [], {}, set(), {})
    assert live.answers is not answers and len(episodes) == 0
    with pytest.raises(EpisodeClosed, match=r"episode a has ended \(scored\); lease a new task"):
        episodes.get("a")
    with pytest.raises(UnknownEpisode, match="no episode b; use the api_key"):
        episodes.get("b")
    episodes.close("never opened", "stale")
    with pytest.raises(EpisodeClosed, match="stale"):
        episodes.get("never opened")
    episodes.open(record("c"))
    assert episodes.metrics() == {"episodes/open": 1, "episodes/closed": 2, "episodes/stops_kept": 0}


def test_rounds_with_equal_ids_under_other_parents_are_no_resampling() -> None:
    live = episode()
    one, two = add(live, 1, 2), add(live, 3, 4)
    children: list[Any] = [add(live, 5, 6, parent=parent) for parent in (one, two)]
    assert [each.cause for each in children] == [None, None]
    np.testing.assert_array_equal(children[1].chain_ids(), [3, 4, 5, 6])
