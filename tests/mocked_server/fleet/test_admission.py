"""Slots follow what engines hold: each rule of mocked_server/fleet/admission.py on a trace of figures."""

from __future__ import annotations

from typing import Any

import pytest

from mocked_server.fleet.admission import Admission
from mocked_server.fleet.member import EngineFigures
from tests.mocked_server.fleet.scripted_figures import figures


class Pool:
    """A pool whose slots are all in use and an engine beside it, whose cache of 1,000 tokens holds 20 episodes of 50. A look is a
    second later than the one before."""

    def __init__(
        self, *, most: int = 1000, episode_tokens: int = 50, engines: list[EngineFigures] | None = None
    ) -> None:
        self.admission = Admission(episode_tokens=episode_tokens, most=most)
        self.now = 100.0
        self.ended = 0
        self.look(engines=engines or [figures()])

    def look(
        self,
        *,
        turnovers: float = 0.0,
        running: int | None = None,
        after_s: float = 1.0,
        engines: list[EngineFigures] | None = None,
        **figures_: Any,
    ) -> int:
        """`turnovers`: episodes that end before the look, as a share of the slots; `running`: as many as before, or all slots."""
        self.now += after_s
        self.ended += round(turnovers * self.admission.slots)
        running = self.admission.slots if running is None else running
        given = [figures(**{"running": running, **figures_})] if engines is None else engines
        return self.admission.look(given, running=running, ended=self.ended, now=self.now)


def test_it_begins_with_what_the_caches_hold_of_the_longest_episodes() -> None:
    assert Pool().admission.slots == 20
    assert Pool(most=7).admission.slots == 7
    assert Pool(engines=[figures("e0"), figures("e1", kv_capacity=500)]).admission.slots == 30
    assert Pool(engines=[figures(kv_capacity=20)]).admission.slots == 1


def test_slots_grow_by_a_quarter_with_each_turnover() -> None:
    pool = Pool()
    assert [pool.look(turnovers=1.0, kv=0.5) for _ in range(4)] == [25, 31, 39, 48]
    pool = Pool()
    assert [pool.look(turnovers=0.5, kv=0.5) for _ in range(4)][1::2] == [25, 31]  # 1.25 ** 0.5 twice
    assert pool.look(kv=0.5) == 31, "nothing grows while no episode ends"


def test_one_look_lets_in_no_more_than_a_turnover_does() -> None:
    assert Pool().look(turnovers=10.0, kv=0.1) == 25


def test_slots_end_at_the_most() -> None:
    pool = Pool(most=30)
    assert [pool.look(turnovers=1.0) for _ in range(4)] == [25, 30, 30, 30]


@pytest.mark.parametrize(
    ("seen", "slots"),
    [
        ({"kv": 0.59}, 25),
        ({"kv": 0.6}, 20),
        ({"kv": 0.8}, 20),
        ({"waiting": 1}, 20),
        ({"running": 17}, 25),  # 18 of 20 bind, give or take one
        ({"running": 16}, 20),
    ],
)
def test_slots_grow_only_while_engines_have_room_and_the_slots_are_in_use(seen: dict[str, Any], slots: int) -> None:
    pool = Pool()
    pool.look(**{key: value for key, value in seen.items() if key != "running"})
    assert pool.look(turnovers=1.0, **seen) == slots


def test_one_full_engine_holds_all_back() -> None:
    pool = Pool(engines=[figures("e0"), figures("e1")])
    assert pool.look(turnovers=1.0, engines=[figures("e0", kv=0.1), figures("e1", kv=0.7)]) == 40
    assert pool.look(turnovers=1.0, engines=[figures("e0", kv=0.1), figures("e1", kv=0.1)]) == 40, "seen full just now"
    assert pool.look(turnovers=1.0, engines=[figures("e0", kv=0.1), figures("e1", kv=0.1)]) == 50


def test_usage_must_have_been_low_for_a_turnover() -> None:
    pool = Pool()
    assert pool.look(kv=0.61) == 20
    assert [pool.look(kv=0.1, turnovers=0.25) for _ in range(4)] == [20] * 4, "the fourth look allows it"
    assert pool.look(kv=0.1, turnovers=0.25) == 21


def test_episodes_that_start_and_end_together_leave_an_empty_cache_that_says_nothing() -> None:
    pool = Pool()
    for _ in range(10):
        waves = [pool.look(kv=kv) for kv in (0.2, 0.4, 0.65)] + [pool.look(kv=0.0, turnovers=0.9)]
    assert waves == [20] * 4


def test_what_a_look_allowed_expires() -> None:
    pool = Pool()
    assert pool.look(turnovers=1.0, after_s=14.9) == 25
    assert pool.look(turnovers=1.0, after_s=15.0) == 25
    assert pool.look(turnovers=1.0) == 31


def test_above_four_fifths_slots_are_trimmed_to_what_uses_seven_tenths_once_until_the_pool_has_drained() -> None:
    pool = Pool()
    assert pool.look(kv=0.84) == 16  # 20 * 0.7 / 0.84
    assert pool.look(kv=0.85, running=18) == 16, "the trim is under way"
    assert pool.look(kv=0.81, running=16) == 13
    assert pool.look(kv=0.7, running=13) == 13


def test_above_nine_tenths_slots_are_trimmed_at_each_look() -> None:
    pool = Pool()
    assert pool.look(kv=1.0) == 14
    assert pool.look(kv=1.0, running=18) == 12
    assert pool.look(kv=2.0, running=18) == 6, "prompts that wait for room are held too, where engines count them"


def test_a_preemption_cuts_to_four_fifths_of_what_runs_and_again_only_after_that_has_drained() -> None:
    pool = Pool()
    assert pool.look(preemptions=3) == 16
    assert pool.look(preemptions=5, running=20) == 16, "preemptions while the pool drains"
    assert pool.look(preemptions=7, running=16) == 16, "drained, and its backlog preempts still"
    assert pool.look(preemptions=7, running=16) == 16
    assert pool.look(preemptions=8, running=16) == 8, "it preempts after a drain: half"


def test_a_preemption_that_is_told_when_the_episodes_have_ended_cuts_what_ran_before() -> None:
    pool = Pool()
    pool.look(running=20)
    assert pool.look(running=4, preemptions=1) == 16


def test_half_of_it_goes_only_in_the_half_minute_after_a_drain() -> None:
    pool = Pool()
    assert pool.look(preemptions=1) == 16
    assert pool.look(preemptions=1, running=16) == 16
    assert pool.look(preemptions=2, running=16, after_s=30.0) == 12


def test_preemptions_before_the_first_look_are_no_news() -> None:
    assert Pool(engines=[figures(preemptions=9)]).look(preemptions=9, turnovers=1.0) == 25
    pool = Pool()
    assert pool.look(engines=[figures(), figures("e1", preemptions=4)]) == 40, "nor those of an engine that joins"


def test_a_queue_cuts_to_nine_tenths_when_it_lasts() -> None:
    pool = Pool()
    looks = [pool.look(running=20, waiting=7) for _ in range(31)]  # 7 wait, 13 have room
    assert looks == [20] * 30 + [18]
    pool = Pool()
    assert {pool.look(waiting=6) for _ in range(60)} == {20}  # 6 of 14: less than half


def test_a_short_queue_is_a_burst() -> None:
    pool = Pool()
    for _ in range(5):
        assert {pool.look(waiting=10) for _ in range(29)} == {20}
        assert pool.look(waiting=0) == 20


def test_an_engine_that_only_waits_is_paused_and_has_no_queue() -> None:
    pool = Pool()
    assert {pool.look(running=20, waiting=20) for _ in range(60)} == {20}


def test_engines_that_come_and_go_bring_and_take_their_share() -> None:
    pool = Pool(engines=[figures("e0"), figures("e1")])
    both = [figures("e0"), figures("e1")]
    assert pool.look(engines=[figures("e0"), figures("e1", is_up=False)]) == 20
    assert pool.look(engines=both) == 40
    assert pool.look(engines=[*both, figures("e2")]) == 60


def test_without_an_engine_nothing_changes_and_nothing_grows_right_after() -> None:
    pool = Pool()
    assert pool.look(engines=[figures(is_up=False, preemptions=9)], turnovers=1.0) == 20
    assert pool.look(engines=[], turnovers=1.0) == 20
    assert pool.look(engines=[figures(kv_capacity=0)], turnovers=1.0) == 20
    assert pool.look(turnovers=1.0) == 20
    assert pool.look(turnovers=1.0) == 25


def test_there_is_a_slot_for_each_engine_at_least() -> None:
    pool = Pool(engines=[figures("e0"), figures("e1"), figures("e2")])
    for _ in range(20):
        slots = pool.look(engines=[figures("e0", kv=4.0), figures("e1"), figures("e2")])
    assert slots == 3


def test_a_pool_of_growing_contexts_fills_the_cache_without_a_preemption() -> None:
    """Episodes of 10 looks hold 5 more tokens with each, 27.5 in the mean; the longest possible one would hold 200."""
    pool = Pool(episode_tokens=200)
    ages = [0, 2, 4, 6, 8]
    assert pool.admission.slots == len(ages)
    preemptions, shares = 0, []
    for _ in range(400):
        before, ages = len(ages), [age + 1 for age in ages if age < 10]
        pool.ended += before - len(ages)
        ages += [0] * max(0, pool.admission.slots - len(ages))
        held = sum(5 * age for age in ages)
        preemptions += held > 1000
        shares.append(held / 1000)
        pool.look(running=len(ages), tokens_held=held, preemptions=preemptions)
    assert preemptions == 0
    assert 0.5 < sum(shares[200:]) / 200 < 0.8 and 18 <= pool.admission.slots <= 30


@pytest.mark.parametrize("given", [{"episode_tokens": 0, "most": 1}, {"episode_tokens": 1, "most": 0}])
def test_sizes_below_one_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        Admission(**given)
