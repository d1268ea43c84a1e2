"""The figures of one finished run, read from its folder (`metrics.jsonl` and `ledger.sqlite`).

Called by `benchmarks.async_overlap`. Invariant: times and shares are those of the steps after the first, so nothing of the
start-up is in them; counts of episodes are those of the whole run, also of episodes that were never trained.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from env_adapters.walk.server import tail_draw


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """One run. Shares are of time (0 to 1), counts are of episodes."""

    step_s: float
    """Mean time of a step, from the end of the first to the end of the last."""
    update_s: float
    epoch_s: float
    """One pass over a batch: an update without its preparation."""
    learner_idle: float
    """Share of time in which the learner waits for a batch."""
    engine_idle: float
    """Share of time in which no generation is under way."""
    mean_lag: float
    max_lag: float
    made_per_used: float
    """Episodes scored for each one trained. Below 1: a stock from the first step was used up."""
    stale_share: float
    """Share of the episodes that ended whose work was thrown away as too old."""
    startup_s: float
    load_before: float
    load_after: float
    trained: int
    stale: int
    """Ended, or scored and not trained, because they (or an episode of their group) grew too old."""
    failed: int
    slow: int
    """Episodes of the latency's tail that were started."""
    slow_trained: int
    slow_stale: int
    slow_unfinished: int
    """Still in play, or waiting for the rest of a batch, at the end of the run."""

    @classmethod
    def counts(cls) -> list[str]:
        """Names of the counts."""
        return [name for name, kind in cls.__annotations__.items() if kind == "int"]

    @classmethod
    def shares(cls) -> list[str]:
        """Names of the times, shares and ratios."""
        return [name for name, kind in cls.__annotations__.items() if kind == "float"]


def read_figures(folder: Path, *, share: float, seed: int, load: tuple[float, float]) -> RunFigures:
    """`share` and `seed`: of the environment's tail, to tell the slow episodes. `load`: the machine's, before and after."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    first, *steps = [line for line in lines if line["step"] >= 1]
    if not steps:
        raise ValueError(f"{folder} must hold a run of at least 2 steps, got 1; set --steps 2")
    total_s = sum(step["time/step_s"] for step in steps)
    used = sum(step["batch/episodes"] for step in steps)
    fates = _fates(folder / "ledger.sqlite")
    slow = Counter(fate for name, fate in fates.items() if tail_draw(name, seed=seed) < share)
    every = Counter(fates.values())
    return RunFigures(
        step_s=total_s / len(steps),
        update_s=_mean(steps, "time/update_s"),
        epoch_s=_mean(steps, "time/train_s") - _mean(steps, "time/prepare_s"),
        learner_idle=sum(step["time/wait_s"] for step in steps) / total_s,
        engine_idle=_engine_idle(steps),
        mean_lag=_mean(steps, "staleness/mean"),
        max_lag=max(step["staleness/max"] for step in steps),
        made_per_used=(steps[-1]["pool/scored"] - first["pool/scored"]) / used,
        stale_share=every["stale"] / max(1, every["stale"] + every["trained"]),
        startup_s=json.loads((folder / "summary.json").read_text(encoding="utf-8"))["startup_s"],
        load_before=load[0],
        load_after=load[1],
        trained=every["trained"],
        stale=every["stale"],
        failed=every["failed"],
        slow=sum(slow.values()),
        slow_trained=slow["trained"],
        slow_stale=slow["stale"],
        slow_unfinished=slow["unfinished"],
    )


def _engine_idle(steps: list[dict[str, Any]]) -> float:
    """The engine's share without work. It is counted from report to report, which may be more than a step's own time."""
    whole = sum(max(step["time/step_s"], step["time/engine_idle_s"]) for step in steps)
    return float(sum(step["time/engine_idle_s"] for step in steps) / whole)


def _fates(ledger: Path) -> dict[str, str]:
    """Id of each episode that was started -> trained, stale, failed or unfinished."""
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db:
        rows = db.execute(
            "SELECT episode_id, episode.state, grp.state, grp.reason FROM episode JOIN grp USING (group_id) "
            "WHERE episode.version IS NOT NULL"
        ).fetchall()
    return {episode_id: _fate(state, group=group, reason=reason) for episode_id, state, group, reason in rows}


def _fate(state: str, *, group: str, reason: str | None) -> str:
    if state == "failed":
        return "failed"
    if group == "evicted":
        return "stale" if reason == "stale" else "failed"
    return "trained" if group == "trained" else "unfinished"


def _mean(steps: list[dict[str, Any]], name: str) -> float:
    return mean(float(step[name]) for step in steps)
