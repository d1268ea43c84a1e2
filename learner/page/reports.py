"""The page's answers about a run: its index, columns of figures, spreads of scores, groups, episodes, what was not trained.

Used by `learner.page.serve` and `learner.page.snapshot`. Functions of a run and of a query, which is bounded whatever it asks for;
they give what JSON can hold, or bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from buffers.errors import UnderstudyError
from buffers.ledger import episode_views
from buffers.ledger.episode_query import LARGEST_NUMBER, MOST_DIGITS, MOST_POINTS, Query, number_of
from buffers.ledger.episode_views import FilterError, GroupView
from buffers.ledger.reader import LedgerUnreadable, counts, trained_steps
from learner.page.episode_page import (
    LEFT_OUT_FIGURES,
    RunPages,
    reasons_of,
)
from learner.page.metric_columns import plain
from learner.reporting.run_record import VERSIONS, DamagedFile, figures, read_object

QUANTILES = {"min": 0.0, "p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "max": 1.0}
MOST_EPISODES = 500
MOST_VERSIONS = 500
LEFT_OUT = "(left out)"
_SECRET_NAME = re.compile(r"(?:^|_)(?:key|token|secret|password|passwd|credentials?)s?$", re.IGNORECASE)
_NOT_SECRET = frozenset({"max_tokens", "min_tokens", "overlong_tokens"})


def index(run: RunPages, _: Query) -> dict[str, Any]:
    """What a page fetches first of a run."""
    ledger, entry = run.ledger_state(), run.entry()
    found: tuple[dict[str, int] | None, int, int] = (None, entry["step"], 0)
    if ledger["available"]:
        try:
            found = run.counted()
        except LedgerUnreadable as error:
            ledger = {"available": False, "why": str(error)}
    return {
        **entry,
        "reward_optimum": run.setting("run.reward_optimum", None),
        "counts": found[0],
        "ledger": ledger,
        "version": found[1],
        "lineages": found[2],
        "max_policy_lag": run.max_policy_lag,
        "groups_per_step": int(run.setting("buffer.groups_per_step", 0)),
        "group_size": int(run.setting("buffer.group_size", 0)),
        "max_tokens": run.setting("rollout.max_tokens", None),
        "summary": run.summary,
        "machine": run.machine_now(),
    }


def config(run: RunPages, _: Query) -> dict[str, Any]:
    """Its configuration, without secrets."""
    return {"config": without_secrets(run.config)}


def metrics(runs: Sequence[RunPages], query: Query, *, about: Mapping[str, str]) -> dict[str, Any]:
    """Columns of each run; see `Points`. `about`: what a figure is, in a sentence."""
    names, first, last = query.texts("names") or None, query.maybe("from", int), query.maybe("to", int)
    most = query.number("points", 2000, most=MOST_POINTS, least=1)
    found, listed = {}, set()
    for run in runs:
        with run.metrics() as columns:
            points = columns.points(names, first=first, last=last, most=most)
            listed.update(columns.names)
        found[run.run_id] = asdict(points)
        if points.bucket == 1:
            del found[run.run_id]["low"], found[run.run_id]["high"]
    return {
        "runs": found,
        "names": sorted(listed),
        "about": {name: about[name] for name in sorted(listed) if name in about},
    }


def scores(run: RunPages, query: Query) -> dict[str, list[Any]]:
    """Quantiles of the scores that each step trained; in buckets of steps where there are more than so many points."""
    first, last = query.maybe("from", int), query.maybe("to", int)
    most = query.number("points", 500, most=MOST_POINTS, least=1)
    with run.ledger() as db:
        trained = episode_views.trained_scores(
            db, first=0 if first is None else first, last=LARGEST_NUMBER if last is None else last
        )
    found: dict[str, list[Any]] = {name: [] for name in ("step", "n", *QUANTILES, "mean")}
    steps, values = (np.array(column) for column in zip(*trained)) if trained else (np.zeros(0), np.zeros(0))
    known, starts = np.unique(steps, return_index=True)
    bucket = max(1, -(-len(known) // most))
    for low, high in pairwise([*starts[::bucket].tolist(), len(values)]):
        some = values[low:high]
        found["step"].append(int(steps[high - 1]))
        found["n"].append(len(some))
        for name, value in zip(QUANTILES, plain(np.quantile(some, list(QUANTILES.values())))):
            found[name].append(value)
        found["mean"] += plain(np.array([some.mean()]))
    return found


def machine(run: RunPages, query: Query) -> dict[str, Any]:
    """The machine now and before."""
    points = query.number("points", 600, most=MOST_POINTS, least=1)
    return run.machine(since=query.maybe("since", float) or 0.0, points=points)


def groups(run: RunPages, query: Query) -> dict[str, Any]:
    """Groups in some states, newest first."""
    states, after = query.texts("state") or ("open", "ready"), query.maybe("cursor", int)
    limit = query.number("limit", 200, most=MOST_EPISODES, least=1)
    if unknown := set(states) - set(episode_views.GROUP_STATES):
        raise FilterError(f"state must be of {', '.join(episode_views.GROUP_STATES)}, got {min(unknown)!r:.40}")
    with run.ledger() as db:
        found = episode_views.groups(db, states=states, after=1 << 60 if after is None else after, limit=limit)
        version, _ = trained_steps(db)
    now = run.age_until()
    shown = [_group_record(run, one, version=version, now=now) for one in found]
    return {"groups": shown, "next": str(found[-1].group_id) if len(found) == limit else None}


def group(run: RunPages, query: Query) -> dict[str, Any]:
    """One group with its task and all attempts."""
    group_id = number_of(query.text("group"), name="group", kind=int)
    with run.ledger() as db:
        one = episode_views.group(db, group_id=group_id)
        members = episode_views.episodes_of(db, group_id=group_id)
        task = episode_views.task_of(db, task_id=one.task_id)
        version, _ = trained_steps(db)
    return {
        "group": _group_record(run, one, version=version, now=run.age_until()),
        "task": task,
        "episodes": [asdict(each) for each in members],
    }


def _group_record(run: RunPages, one: GroupView, *, version: int, now: float) -> dict[str, Any]:
    """A group with its age at `now`, and after how many updates it is too old: 0, it is evicted at the next claim."""
    waits = one.state in ("open", "ready") and one.max_version is not None
    return {
        **asdict(one),
        "age_s": None if one.opened_at is None else max(0.0, now - one.opened_at),
        "updates_until_stale": max(0, (one.max_version or 0) + run.max_policy_lag + 1 - version) if waits else None,
    }


def episode_list(run: RunPages, query: Query) -> dict[str, Any]:
    """A part of the episodes that match, or those of `seqs`."""
    run.look_on()
    if seqs := query.texts("seqs")[:MOST_EPISODES]:
        known = [int(seq) for seq in seqs if seq.isascii() and seq.isdigit() and len(seq) < MOST_DIGITS]
        with run.ledger() as db:
            return {"episodes": [asdict(one) for one in episode_views.episodes_at(db, known)]}
    wanted, cursor = query.episode_filter(), query.text("cursor") or None
    limit = query.number("limit", 100, most=MOST_EPISODES, least=1)
    with run.ledger() as db:
        found = asdict(episode_views.search(db, wanted, order=query.text("sort", "newest"), limit=limit, cursor=cursor))
    facets = found.pop("facets")
    return {**found, "indexed": run.looked_at, "facets": facets}


def order(run: RunPages, query: Query) -> bytes:
    """The numbers of all episodes that match, in order, as little-endian int32."""
    with run.ledger() as db:
        found = episode_views.ordered(db, query.episode_filter(), order=query.text("sort", "newest"))
    return np.array(found, dtype="<i4").tobytes()


def untrained(run: RunPages, _: Query) -> dict[str, Any]:
    """Reasons why something was not trained."""
    with run.metrics() as columns:
        known = {name: columns.last(name) for name in (*LEFT_OUT_FIGURES, "generation/aborted")}
    with run.ledger() as db:
        number, evicted = counts(db), episode_views.evictions(db)
    aborted = int(known["generation/aborted"] or 0)
    return {"reasons": reasons_of(number, evictions=evicted, aborted=aborted, figures=known)}


def versions(run: RunPages, _: Query) -> dict[str, Any]:
    """The versions of a live run that are kept, the newest first, each with its gate and who is on it; and what was served when."""
    served = _object_in(run.folder / VERSIONS / "served.json")
    kept = sorted(((int(name), path) for path, name in _version_folders(run.folder / VERSIONS)), reverse=True)
    sessions: list[tuple[int, str, int, float]] = []
    with suppress(UnderstudyError), run.ledger() as db:
        sessions = episode_views.served_sessions(db)
    history = [figures(each) | {"why": str(each.get("why", ""))} for each in _objects(served.get("history"))]
    number = served.get("version")
    return {
        "served": number if isinstance(number, int) else None,
        "margin": run.setting("serve.gate.margin", None),
        "has_tasks": bool(run.setting("serve.gate.tasks", "")),
        "history": history[-MOST_VERSIONS:][::-1],
        "versions": [
            {**_version(_object_in(path / "version.json")), "version": number} for number, path in kept[:MOST_VERSIONS]
        ],
        "sessions": [
            dict(zip(("version", "user", "number", "heard_at"), each, strict=True))
            for each in sessions[-MOST_VERSIONS:]
        ],
    }


def _version_folders(folder: Path) -> list[tuple[Path, str]]:
    names = {path: path.name.removeprefix("v") for path in folder.glob("v*")}
    return [
        (path, name) for path, name in names.items() if name.isascii() and name.isdigit() and len(name) < MOST_DIGITS
    ]


def _version(about: Mapping[str, Any]) -> dict[str, Any]:
    """What `learner.live_versions` wrote of one, as far as it is that."""
    trained_on, scores = about.get("sessions"), list(figures(about.get("scores")).values())
    names = [str(each) for each in trained_on] if isinstance(trained_on, list) else []
    return {
        **{name: None for name in ("made", "parent", "entropy")}, **{n: v for n, v in figures(about).items() if n != "version"},
        "state": str(about.get("state", "")), "why": str(about.get("why", ""))[:1000],
        "sessions": names[:MOST_EPISODES], "num_sessions": len(names), "gate": figures(about.get("gate")),
        "compared": figures(about.get("compared")), "score": sum(scores) / len(scores) if scores else None,
    }  # fmt: skip


def _object_in(path: Path) -> dict[str, Any]:
    """Empty where it cannot be read."""
    try:
        return read_object(path)
    except (OSError, DamagedFile):
        return {}


def _objects(found: Any) -> list[dict[str, Any]]:
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def without_secrets(value: Any) -> Any:
    """A configuration with the values of keys that are named like secrets left out."""
    if isinstance(value, dict):
        return {
            name: LEFT_OUT if has_secret_name(str(name)) and item else without_secrets(item)
            for name, item in value.items()
        }
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def has_secret_name(name: str) -> bool:
    """Whether a key of this name holds a secret."""
    return bool(_SECRET_NAME.search(name)) and name not in _NOT_SECRET
