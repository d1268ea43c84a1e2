"""Rules of mocked_server/fleet/routing.py."""

from __future__ import annotations

import random

from mocked_server.fleet.routing import OVERLOAD_EPISODES, Routes


def routes(*engines: str, **options: int) -> Routes:
    made = Routes(**options)
    for engine in engines:
        made.join(engine, version=0)
    return made


def test_first_calls_go_where_the_fewest_tokens_are_held_and_later_ones_stay() -> None:
    here = routes("a", "b")
    assert here.choose("long", group=None, tokens=1000) == "a"
    assert {here.choose(f"short-{n}", group=None, tokens=10) for n in range(5)} == {"b"}
    assert here.choose("long", group=None, tokens=1200) == "a"
    here.forget("long")
    assert here.choose("next", group=None, tokens=10) == "a"


def test_a_group_prefers_one_engine_until_that_is_overloaded() -> None:
    here = routes("a", "b", "c")
    for group in range(3):
        assert len({here.choose(f"{group}-{n}", group=group, tokens=100) for n in range(8)}) == 1
    engines = [here.choose(f"one-{n}", group=9, tokens=100) for n in range(64)]
    assert set(engines) == {"a", "b", "c"}, "a group that is larger than an engine's share is spread"
    assert engines[:OVERLOAD_EPISODES] == [engines[0]] * OVERLOAD_EPISODES


def test_an_episode_is_moved_when_both_thresholds_are_passed_and_not_by_one_of_them() -> None:
    here = routes("a", "b")
    assert here.choose("x", group=None, tokens=100) == "a"
    assert here.choose("y", group=None, tokens=10) == "b"
    assert here.choose("x", group=None, tokens=1000) == "a", "100 times the load, and one episode: nothing to gain"
    many = routes("a")
    for n in range(40):
        many.choose(f"{n}", group=None, tokens=100)
    many.join("b", version=0)
    where = [many.choose(f"{n}", group=None, tokens=100) for n in range(40)]
    assert 8 <= where.count("b") <= 20 and many.moved_in("b") == where.count("b"), "an engine that joins gets its share"


def test_an_engine_that_leaves_or_lags_takes_no_calls() -> None:
    here = routes("a", "b", max_policy_lag=1)
    assert here.choose("x", group=None, tokens=5) == "a"
    here.leave("a")
    assert here.choose("x", group=None, tokens=6) == "b" and here.moved_in("b") == 1
    here.publish(2)
    assert here.choose("x", group=None, tokens=6) is None, "version 0 is two behind"
    here.join("a", version=1)
    assert here.choose("x", group=None, tokens=6) == "a"


def test_counts_are_those_of_the_live_episodes_whatever_happens() -> None:
    draw = random.Random(0)
    here, live = routes("a", "b", "c"), dict[str, int]()
    for number in range(3000):
        match draw.randrange(6):
            case 0:
                here.leave(draw.choice("abc"))
            case 1:
                here.join(draw.choice("abc"), version=0)
            case 2 if live:
                here.forget(live.popitem()[0])
            case _:
                name = draw.choice([*live, f"e{number}"])
                live[name] = draw.randrange(1, 100)
                if here.choose(name, group=draw.choice([None, 1, 2]), tokens=live[name]) is None:
                    del live[name]
                    here.forget(name)
    for engine in "abc":
        here.join(engine, version=0)
    assert sum(seat.episodes for seat in here._seats.values()) == len(live)
    assert sum(seat.tokens for seat in here._seats.values()) == sum(e.tokens for e in here._episodes.values())
    for name in list(live):
        here.forget(name)
    assert all(seat.episodes == seat.tokens == 0 for seat in here._seats.values()) and not here._groups
