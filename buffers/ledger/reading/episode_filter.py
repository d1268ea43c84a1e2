"""Filters, orders and counts over an `EpisodeIndex`; a place in a list that grows is a cursor, never a number of rows to skip.

Used by `learner.page`. Pure functions of the index: nothing is read from the ledger here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from buffers.errors import UnderstudyError
from buffers.ledger.reading.episode_index import EPISODE_STATES, GROUP_STATES, EpisodeIndex, Places

Chosen = npt.NDArray[np.bool_]
ORDERS: dict[str, tuple[str, bool]] = {
    "newest": ("seq", True),
    "oldest": ("seq", False),
    "score": ("score", False),
    "-score": ("score", True),
    "tokens": ("tokens", False),
    "-tokens": ("tokens", True),
    "rounds": ("rounds", False),
    "-rounds": ("rounds", True),
}
"""Name -> column, and whether the largest comes first."""


class FilterError(UnderstudyError):
    """A filter that says nothing, or names what there is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFilter:
    """What episodes must be; None or empty: anything."""

    steps: tuple[int, int] | None = None
    """First and last."""
    task: str | None = None
    text: str = ""
    """A part of the task's id, or the beginning of the episode's."""
    group: int | None = None
    states: tuple[str, ...] = ()
    group_states: tuple[str, ...] = ()
    score: tuple[float | None, float | None] = (None, None)
    reason: str | None = None
    """The kind, of the episode or of its group."""
    agent: str | None = None
    tokens: tuple[int | None, int | None] = (None, None)
    rounds: tuple[int | None, int | None] = (None, None)
    causes: int = 0
    """Bits of `round_causes`: at least one of them."""
    untrained: bool = False
    """It ended, or its group did, and it was not trained and will not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A part of the episodes that match, in order."""

    places: Sequence[int]
    total: int
    next: str | None
    """Cursor of the rest; None: there is none."""
    facets: dict[str, dict[str, int]] = field(default_factory=dict)


def ordered(index: EpisodeIndex, wanted: EpisodeFilter, *, order: str) -> tuple[Places, npt.NDArray[np.float64]]:
    """All that match, in order, and what each is ordered by. Raises FilterError for an order that is none."""
    if order not in ORDERS:
        raise FilterError(f"sort must be one of {', '.join(ORDERS)}, got {order!r:.40}; leave it out for newest")
    matching = np.flatnonzero(chosen(index, wanted))
    column, descends = ORDERS[order]
    keys = (matching if column == "seq" else index.episodes[column][matching]).astype(np.float64)
    if column == "score":
        keys = np.where(np.isnan(keys), -np.inf if descends else np.inf, keys)
    sign = -1 if descends else 1
    ranked = np.lexsort((sign * matching, sign * keys))
    return matching[ranked], keys[ranked]


def search(index: EpisodeIndex, wanted: EpisodeFilter, *, order: str, limit: int, cursor: str | None) -> Found:
    """The first `limit` after the cursor. Raises FilterError for an order or cursor that is none."""
    places, keys = ordered(index, wanted, order=order)
    sign = -1 if ORDERS[order][1] else 1
    start = 0
    if cursor:
        value, seq = _read_cursor(cursor)
        start = int(np.searchsorted(sign * keys, sign * value, side="left"))
        end = int(np.searchsorted(sign * keys, sign * value, side="right"))
        start += int(np.searchsorted(sign * places[start:end], sign * seq, side="right"))
    end = min(start + limit, len(places))
    return Found(
        places=[int(place) for place in places[start:end]],
        total=len(places),
        next=f"{float(keys[end - 1])!r}_{int(places[end - 1])}" if start < end < len(places) else None,
        facets={} if cursor else facets(index, places),
    )


def _read_cursor(cursor: str) -> tuple[float, int]:
    value, _, seq = cursor.rpartition("_")
    try:
        return float(value), int(seq)
    except ValueError:
        raise FilterError(f"cursor must be that of an answer before, got {cursor!r:.40}; leave it out") from None


def chosen(index: EpisodeIndex, wanted: EpisodeFilter) -> Chosen:
    """Entry `seq`: whether the episode matches."""
    table = index.episodes
    group = index.groups[table["group"]]
    keep: Chosen = table["there"].copy()
    if wanted.group is not None:
        keep &= table["group"] == wanted.group
    if wanted.states:
        keep &= np.isin(table["state"], _numbers(EPISODE_STATES, wanted.states, name="state"))
    if wanted.group_states:
        keep &= np.isin(group["state"], _numbers(GROUP_STATES, wanted.group_states, name="group_state"))
    if wanted.steps is not None:
        keep &= (group["state"] == GROUP_STATES.index("trained")) & _between(group["step"], *wanted.steps)
    for column, (low, high) in (("score", wanted.score), ("tokens", wanted.tokens), ("rounds", wanted.rounds)):
        if low is not None or high is not None:
            keep &= _between(table[column], low, high)
    if wanted.reason is not None:
        number = index.reasons.find(wanted.reason)
        keep &= False if number is None else (table["reason"] == number) | (group["reason"] == number)
    if wanted.causes:
        keep &= (table["causes"] & np.uint32(wanted.causes)) != 0
    if wanted.untrained:
        keep &= untrained(index)
    if wanted.task is not None:
        number = index.tasks.find(wanted.task)
        keep &= False if number is None else group["task"] == number
    if wanted.agent is not None:
        keep &= np.isin(group["task"], _tasks_of(index, wanted.agent))
    if wanted.text:
        keep &= _mentions(index, wanted.text, group=group)
    return keep


def untrained(index: EpisodeIndex) -> Chosen:
    """Entry `seq`: it failed, or its group was given up."""
    table = index.episodes
    evicted = index.groups[table["group"]]["state"] == GROUP_STATES.index("evicted")
    lost: Chosen = table["there"] & ((table["state"] == EPISODE_STATES.index("failed")) | evicted)
    return lost


def facets(index: EpisodeIndex, places: Places) -> dict[str, dict[str, int]]:
    """How many of these there are of each state, reason and agent."""
    table = index.episodes[places]
    group = index.groups[table["group"]]
    agents = np.array([*index.agent_of, *([-1] * (len(index.tasks.texts) + 1 - len(index.agent_of)))], dtype=np.int64)
    reasons = np.where(table["reason"] >= 0, table["reason"], group["reason"])
    return {
        "state": _counted(table["state"], EPISODE_STATES),
        "group_state": _counted(group["state"], GROUP_STATES),
        "reason": _counted(reasons, index.reasons.texts),
        "agent": _counted(agents[group["task"]], index.agents.texts),
    }


def _counted(numbers: npt.NDArray[Any], texts: Sequence[str]) -> dict[str, int]:
    found = np.bincount(numbers[numbers >= 0].astype(np.int64), minlength=len(texts))
    return {texts[number]: int(found[number]) for number in np.argsort(-found, kind="stable") if found[number]}


def _between(values: npt.NDArray[Any], low: float | None, high: float | None) -> Chosen:
    keep = np.ones(len(values), bool)
    with np.errstate(invalid="ignore"):
        if low is not None:
            keep &= values >= low
        if high is not None:
            keep &= values <= high
    return keep


def _numbers(states: Sequence[str], wanted: Sequence[str], *, name: str) -> list[int]:
    if unknown := set(wanted) - set(states):
        raise FilterError(f"{name} must be of {', '.join(states)}, got {min(unknown)!r:.40}; leave it out for all")
    return [states.index(state) for state in wanted]


def _tasks_of(index: EpisodeIndex, agent: str) -> list[int]:
    number = index.agents.find(agent)
    return [] if number is None else [task for task, whose in enumerate(index.agent_of) if whose == number]


def _mentions(index: EpisodeIndex, text: str, *, group: npt.NDArray[np.void]) -> Chosen:
    tasks = [number for number, name in enumerate(index.tasks.texts) if text in name]
    keep: Chosen = np.isin(group["task"], tasks)
    first, *rest = text.split("-")
    if (
        first.isascii()
        and first.isdigit()
        and len(first) < 16
        and all(part.isascii() and part.isdigit() for part in rest if part)
    ):
        own = index.episodes["group"] == int(first)
        if rest and rest[0]:
            own &= index.episodes["sample"] == int(rest[0][:9])
        keep |= own
    return keep
