"""Answers of the page that are put together from a run's parts: its index, columns of figures, spreads of scores, groups.

Used by `learner.page.routes` and `learner.page.export`. Functions of a `RunView`; they give what JSON can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np

from buffers.ledger.reading import views
from buffers.ledger.reading.episode_filter import FilterError
from buffers.ledger.reading.episode_index import EPISODE_STATES, GROUP_STATES
from buffers.ledger.reading.reader import LedgerUnreadable, counts, trained_steps
from learner.page.episode_parts import untrained as why
from learner.page.run_files.metric_columns import MetricColumns, Points, plain
from learner.page.run_files.run_folders import read_summary, without_secrets
from learner.page.run_view import RunView

QUANTILES = {"min": 0.0, "p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "max": 1.0}


def run_index(view: RunView) -> dict[str, Any]:
    """What a page fetches first of a run."""
    ledger = view.ledger_state()
    found: tuple[dict[str, int] | None, int, int] = (None, view.entry()["step"], 0)
    if ledger["available"]:
        try:
            found = view.counted()
        except LedgerUnreadable as error:
            ledger = {"available": False, "why": str(error)}
    return {
        **view.entry(),
        "reward_optimum": view.setting("run.reward_optimum", None),
        "counts": found[0],
        "ledger": ledger,
        "version": found[1],
        "lineages": found[2],
        "max_policy_lag": int(view.setting("buffer.max_policy_lag", 0)),
        "groups_per_step": int(view.setting("buffer.groups_per_step", 0)),
        "group_size": int(view.setting("buffer.group_size", 0)),
        "max_tokens": view.setting("rollout.max_tokens", None),
        "summary": read_summary(view.folder),
        "machine": view.machine_now(),
    }


def run_config(view: RunView) -> dict[str, Any]:
    """Its configuration, without secrets."""
    return {"config": without_secrets(view.config)}


def metrics(
    runs: Sequence[RunView],
    *,
    names: Sequence[str] | None,
    first: int | None,
    last: int | None,
    most: int,
    about: Mapping[str, str],
) -> dict[str, Any]:
    """Columns of each run; see `Points`."""

    def read(columns: MetricColumns) -> tuple[Points, list[str]]:
        return columns.points(names, first=first, last=last, most=most), columns.names

    found, listed = {}, set()
    for view in runs:
        points, own = view.metrics(read)
        listed.update(own)
        shown = asdict(points)
        if points.bucket == 1:
            del shown["low"], shown["high"]
        found[view.run_id] = shown
    return {
        "runs": found,
        "names": sorted(listed),
        "about": {name: about[name] for name in sorted(listed) if name in about},
    }


def score_spread(view: RunView, *, first: int | None, last: int | None, most: int) -> dict[str, list[Any]]:
    """Quantiles of the scores that each step trained; in buckets of steps where there are more than `most`."""
    with view.indexed() as index:
        table = index.episodes
        group = index.groups[table["group"]]
        keep = table["there"] & (group["state"] == GROUP_STATES.index("trained"))
        keep &= table["state"] == EPISODE_STATES.index("scored")
        keep &= group["step"] >= (0 if first is None else first)
        if last is not None:
            keep &= group["step"] <= last
        steps, scores = group["step"][keep], table["score"][keep]
    found: dict[str, list[Any]] = {name: [] for name in ("step", "n", *QUANTILES, "mean")}
    if not len(steps):
        return found
    known = np.unique(steps)
    bucket = -(-len(known) // most)
    slots = np.searchsorted(known, steps) // bucket
    order = np.argsort(slots, kind="stable")
    borders = np.searchsorted(slots[order], np.arange(slots.max() + 2))
    for number, (low, high) in enumerate(pairwise(borders.tolist())):
        some = scores[order[low:high]]
        found["step"].append(int(known[min((number + 1) * bucket, len(known)) - 1]))
        found["n"].append(len(some))
        for name, value in zip(QUANTILES, plain(np.quantile(some, list(QUANTILES.values())))):
            found[name].append(value)
        found["mean"] += plain(np.array([some.mean()]))
    return found


def groups(view: RunView, *, states: Sequence[str], after: int | None, limit: int) -> dict[str, Any]:
    """Groups in these states, newest first."""
    if unknown := set(states) - set(GROUP_STATES):
        raise FilterError(f"state must be of {', '.join(GROUP_STATES)}, got {min(unknown)!r:.40}")
    with view.ledger() as db:
        found = views.groups(db, states=states, after=1 << 60 if after is None else after, limit=limit)
        version, _ = trained_steps(db)
    now = view.age_until()
    shown = [_group_record(view, one, version=version, now=now) for one in found]
    return {"groups": shown, "next": str(found[-1].group_id) if len(found) == limit else None}


def _group_record(view: RunView, one: views.GroupView, *, version: int, now: float) -> dict[str, Any]:
    """A group with its age at `now`, and after how many updates it is too old: 0, it is evicted at the next claim."""
    max_lag = int(view.setting("buffer.max_policy_lag", 0))
    waits = one.state in ("open", "ready") and one.max_version is not None
    return {
        **asdict(one),
        "age_s": None if one.opened_at is None else max(0.0, now - one.opened_at),
        "updates_until_stale": max(0, (one.max_version or 0) + max_lag + 1 - version) if waits else None,
    }


def group(view: RunView, group_id: int, *, record: Callable[[views.EpisodeView], dict[str, Any]]) -> dict[str, Any]:
    """One group with its task and all attempts."""
    with view.ledger() as db:
        one = views.group(db, group_id=group_id)
        members = views.episodes_of(db, group_id=group_id)
        task = views.task_of(db, task_id=one.task_id)
        version, _ = trained_steps(db)
    return {
        "group": _group_record(view, one, version=version, now=view.age_until()),
        "task": task,
        "episodes": [record(each) for each in members],
    }


def untrained(view: RunView) -> dict[str, Any]:
    """Reasons why something was not trained."""

    def read(columns: MetricColumns) -> dict[str, float | None]:
        return {name: columns.last(name) for name in (*why.LEFT_OUT, "generation/aborted")}

    figures = view.metrics(read)
    with view.ledger() as db:
        number, evicted = counts(db), views.evictions(db)
    return {
        "reasons": why.reasons(
            number, evictions=evicted, aborted=int(figures["generation/aborted"] or 0), figures=figures
        )
    }
