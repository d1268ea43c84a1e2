"""Effects that many rows share: a metric's values, what a file holds, a refusal, other weights with a neighbour of the value.

Each gives a function of the ended run that says what was seen, and raises NoEffect with what was seen instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.matrix.records import Effect, Ended, NoEffect

SAME = 1e-6
"""Largest mean difference of weights that were computed from the same numbers in another process."""


def expect(condition: object, seen: str) -> str:
    """`seen`, where it is what it should be. Raises NoEffect with it where it is not."""
    if not condition:
        raise NoEffect(seen)
    return seen


def metric(name: str, holds: Callable[[list[float]], object]) -> Effect:
    """The metric's values, by step, for which `holds` must be true."""
    return lambda ended: expect(holds(values := ended.metric(name)), f"{name}: {short(values)}")


def moves(name: str) -> Effect:
    """The metric has at least two values, all finite."""
    return metric(name, lambda values: len(set(values)) > 1)


def always(name: str, value: float) -> Effect:
    """The metric has this value in every step."""
    return metric(name, lambda values: all(abs(each - value) < 1e-9 for each in values))


def warms(ended: Ended) -> str:
    """The learning rate of three steps, the first of which is one of warm-up."""
    rates, rate = ended.metric("learner/lr"), ended.config["learner.lr"]
    return expect(rates == [rate / 2, rate, rate], f"learner/lr: {short(rates)}, of learner.lr={rate}")


def absent(name: str) -> Effect:
    """The metric is in no line of a run that made steps."""

    def effect(ended: Ended) -> str:
        found = [line for line in ended.lines if name in line]
        return expect(ended.lines and not found, f"{name} is in {len(found)} of {len(ended.lines)} lines")

    return effect


def all_of(*effects: Effect) -> Effect:
    """Each of them."""
    return lambda ended: "; ".join(effect(ended) for effect in effects)


def counted(query: str, value: Any) -> Effect:
    """The ledger answers the query with one value."""
    return lambda ended: expect((found := ended.sql(query)) == [value], f"the ledger has {found} for {query!r}")


def prints(*words: str) -> Effect:
    """What the run printed has these words."""
    return lambda ended: expect(all(word in ended.output for word in words), f"printed: {last_line(ended.output)}")


def refused(*words: str) -> Effect:
    """The run was refused, in one line that has these words."""

    def effect(ended: Ended) -> str:
        lines = ended.output.strip().splitlines()
        expect(len(lines) == 1, f"a refusal is one line, got {len(lines)}: {' | '.join(lines)[:300]}")
        missing = [word for word in words if word not in lines[0]]
        return expect(not missing, f"refused: {lines[0][:300]}" + (f" (without {missing})" if missing else ""))

    return effect


def trains(key: str, neighbour: Any, *, least: float = 1e-7) -> Effect:
    """The run's weights are those that its ledger and this value give; with a neighbour of the value they are others."""

    def effect(ended: Ended) -> str:
        from tests.matrix.replay import largest_difference, mean_difference, replay, trained_weights

        value = ended.config[key]
        expect(value != neighbour, f"{key}={value} has no neighbour {neighbour}")
        own = mean_difference(replay(ended).weights, trained_weights(ended))
        expect(own < SAME, f"trained again as it was, the weights differ by {own:.1e} in the mean from the run's")
        other = largest_difference(replay(ended, {key: neighbour}).weights, replay(ended).weights)
        seen = f"with {neighbour} instead of {value} the weights differ by {other:.1e}; as it was by {own:.0e}"
        return expect(other > least, seen)

    return effect


def changes_no_weight(key: str, neighbour: Any) -> Effect:
    """The key concerns how it is computed, not what: the same weights with a neighbour of the value."""

    def effect(ended: Ended) -> str:
        from tests.matrix.replay import mean_difference, replay

        other = mean_difference(replay(ended, {key: neighbour}).weights, replay(ended).weights)
        return expect(other < SAME, f"with {neighbour} the weights differ by {other:.1e} in the mean")

    return effect


def has_config(key: str) -> Effect:
    """The run's own config.yaml has the value."""
    return lambda ended: f"{key}={ended.config[key]!r}"


def short(values: list[float]) -> str:
    """Up to six values, with four digits."""
    return ", ".join(f"{value:.4g}" for value in values[:6]) + (", ..." if len(values) > 6 else "")


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")[:300]
