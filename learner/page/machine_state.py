"""What the machine of a run does now, who waits for what, and how that was over time; from the lines of machine.jsonl.

The run writes a line a second (`learner.reporting.machine_log`). Used by `learner.page.run_view`. Pure functions of lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from learner.diagnosis.finding import counted
from learner.reporting.run_record import figures

LEARNER = {"waiting": 0, "updating": 1}
"""What a learner does, as a number for curves; 2: anything else."""
Line = Mapping[str, Any]

SERIES: dict[str, Callable[[Line], Any]] = {
    "at": lambda line: line.get("at"),
    "prompts_waiting": lambda line: line.get("prompts_waiting"),
    "episodes_running": lambda line: _of(line, "pool").get("running"),
    "slots": lambda line: _of(line, "pool").get("slots"),
    "agents_waiting": lambda line: _of(line, "pool").get("agents_waiting"),
    "groups_open": lambda line: _of(line, "groups").get("open"),
    "groups_ready": lambda line: _of(line, "groups").get("ready"),
    "engines_running": lambda line: _sum(line, "running"),
    "engines_waiting": lambda line: _sum(line, "waiting"),
    "tokens_per_s": lambda line: _sum(line, "tokens_per_s"),
    "kv_share": lambda line: max((_figure(engine, "kv_share") or 0.0 for engine in engines_of(line)), default=None),
    "step": lambda line: line.get("step"),
    "learner": lambda line: LEARNER.get(str(line.get("learner", "")), 2),
}


def history(lines: Sequence[Line], *, since: float, points: int) -> dict[str, list[Any]]:
    """The series of the lines after `since`, at most so many points: each the last of its stretch."""
    some = [line for line in lines if isinstance(at := line.get("at"), int | float) and at > since]
    stride = max(1, -(-len(some) // max(points, 1)))
    kept = some[::-1][::stride][::-1]
    return {name: [read(line) for line in kept] for name, read in SERIES.items()}


def engines_of(line: Line) -> list[dict[str, Any]]:
    """The engines in a line."""
    found = line.get("engines")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def waits(line: Line, *, groups_per_step: int, max_policy_lag: int) -> list[dict[str, str]]:
    """The waits of the machine: who, for what, and why in a sentence; each pair once."""
    pool, groups, tasks = _of(line, "pool"), _of(line, "groups"), _of(line, "tasks")
    ready, open_, running = _number(groups, "ready"), _number(groups, "open"), _number(pool, "running")
    slots, asking = _number(pool, "slots"), _number(pool, "agents_waiting")
    may_open = tasks.get("admissible_groups")
    found: dict[tuple[str, str], str] = {}

    def say(who: str, what: str, why: str) -> None:
        found[who, what] = f"{found[who, what]}; {why}" if (who, what) in found else why

    if line.get("phase"):
        say("agents", "learner", f"{line['phase']} ...")
    if line.get("learner") == "waiting":
        say("learner", "groups", f"{ready} of the {groups_per_step} groups of a step are ready")
    if may_open == 0:
        say(
            "tasks",
            "learner",
            f"no group may open before the next update: the groups under way fill buffer.max_policy_lag={max_policy_lag}",
        )
    elif asking == 0 and running < slots and line.get("learner") != "starting":
        say("tasks", "agents", f"{slots - running} of {slots} slots are free and no agent asks for an episode")
    if asking and running >= slots > 0:
        say("agents", "tasks", f"all {slots} slots are taken, with {counted(asking, 'agent')} waiting")
    elif asking and may_open == 0:
        say("agents", "learner", f"no group may open before the next update, with {counted(asking, 'agent')} waiting")
    engines = engines_of(line)
    prompts, waiting = _number(line, "prompts_waiting"), _sum(line, "waiting") or 0
    if down := [str(engine.get("name")) for engine in engines if not engine.get("is_up")]:
        say("prompts", "engines", f"{', '.join(down)} down: being started again")
    if prompts or waiting:
        say("prompts", "engines", f"{counted(prompts, 'prompt')} in the queue, {waiting} without room in a cache")
    if engines and not _sum(line, "running") and not prompts and not _number(line, "generating"):
        say("engines", "prompts", "nothing is generated and no prompt waits: agents are busy")
    if open_:
        say("groups", "agents", f"scores of members are missing in {counted(open_, 'group')}")
    return [{"who": who, "for": what, "why": why} for (who, what), why in found.items()]


def _of(line: Line, name: str) -> Mapping[str, Any]:
    found = line.get(name)
    return found if isinstance(found, dict) else {}


def _number(line: Line, name: str) -> int:
    return int(_figure(line, name) or 0)


def _sum(line: Line, name: str) -> float | None:
    found = engines_of(line)
    return sum(_figure(engine, name) or 0 for engine in found) if found else None


def _figure(line: Line, name: str) -> float | None:
    return figures(line).get(name)
