"""Rules about time: who waits for whom, and which key would let them wait less.

Listed in `learner.diagnosis.diagnose`; as in `learner.diagnosis.episode_rules`. They look at the last 10 steps. What they
find costs time, never what is learned.
"""

from __future__ import annotations

from learner.diagnosis.evidence import Evidence
from learner.diagnosis.finding import Finding, Severity, percent

IDLE = 0.5
"""Share of the steps' time that the learner may wait."""
ENGINE_IDLE = 0.3
"""Share of the time that the engine may have nothing to do."""
BUSY = 0.1
"""Idle share up to which a part is the bottleneck."""
ENOUGH_STEPS = 5
"""Steps without the first ones, which hold start-up."""
LONG_SAVING, LONG_PUBLISHING = 0.2, 0.3
RESTARTS = 3
"""Deaths of a part from which they are no accident."""


def idle_learner(run: Evidence) -> Finding | None:
    """The learner waited for a batch in at least half of the time of at least 5 steps."""
    share = run.time_share("time/wait_s") or 0.0
    if share < IDLE or len(run.steps) < ENOUGH_STEPS:
        return None
    engine = run.time_share("time/engine_idle_s")
    if engine is not None and engine > ENGINE_IDLE:
        why, remedy = (
            f"the engine is idle for {percent(engine)} of it, so that agents or environment are slow",
            _more(run),
        )
    else:
        why, remedy = "generation takes that long", _faster_generation(run)
    return Finding(
        rule="idle_learner",
        severity=Severity.SLOWS,
        sentence=f"the learner waits for episodes in {percent(share)} of the time; {why}.",
        figure=share,
        measure="time/wait_s",
        remedy=remedy,
    )


def idle_engine(run: Evidence) -> Finding | None:
    """The engine had nothing to do in at least 30 % of the time of at least 5 steps, and the learner waited for less than half."""
    share, waits = run.time_share("time/engine_idle_s") or 0.0, run.time_share("time/wait_s") or 0.0
    if share < ENGINE_IDLE or waits >= IDLE or len(run.steps) < ENOUGH_STEPS:
        return None
    lag = run.config.buffer.max_policy_lag
    learner = f"learner.token_budget={2 * run.config.learner.token_budget}"
    if (ranks := 2 * run.config.learner.ranks) <= run.cards:
        learner = f"learner.ranks={ranks}, or {learner}"
    if run.config.learner.epochs > 1:
        learner += ", or learner.epochs=1"
    return Finding(
        rule="idle_engine",
        severity=Severity.SLOWS,
        sentence=f"the engine has nothing to do in {percent(share)} of the time, as the learner's updates take "
        f"{percent(1.0 - waits)} of it" + (" and nothing may be generated meanwhile." if lag == 0 else "."),
        figure=share,
        measure="time/engine_idle_s",
        remedy="generate while the learner updates: buffer.max_policy_lag=1" if lag == 0 else learner,
    )


def preempted_generations(run: Evidence) -> Finding | None:
    """An engine set generations aside for lack of cache in each of the last steps, on average."""
    names = {
        name for step in run.recent for name in step if name.startswith("engine/") and name.endswith("/preemptions")
    }
    grown = sum(max(run.values(name)) - min(run.values(name)) for name in names)
    if len(run.recent) < 2 or grown < len(run.recent):
        return None
    slots, cache = int(run.last("pool/slots", default=64.0)), run.config.rollout.kv_cache_gb
    if cache is None and run.cards:
        more = "a higher rollout.gpu_memory_utilization"
    else:
        more = f"rollout.kv_cache_gb={2 * (cache or 0.25):g}"
    return Finding(
        rule="preempted_generations",
        severity=Severity.SLOWS,
        sentence=f"the engines set {grown:.0f} generations aside in the last {len(run.recent)} steps, for lack of cache, and "
        f"computed them again.",
        figure=grown,
        measure="generations set aside",
        remedy=f"agents.concurrency={max(1, slots * 3 // 4)} or agents.concurrency=auto, or {more}",
    )


def long_saving(run: Evidence) -> Finding | None:
    """The learner waits for checkpoints to be on disk in at least 20 % of the time."""
    share = run.time_share("time/save_s") or 0.0
    if share < LONG_SAVING or len(run.steps) < ENOUGH_STEPS:
        return None
    every = run.config.run.checkpoints.every
    return Finding(
        rule="long_saving",
        severity=Severity.SLOWS,
        sentence=f"the learner waits for its checkpoints to be on disk in {percent(share)} of the time.",
        figure=share,
        measure="time/save_s",
        remedy=f"run.checkpoints.every={4 * every}, or run.dir on a faster disk",
    )


def long_publishing(run: Evidence) -> Finding | None:
    """New weights take at least 30 % of the time on their way into the engine."""
    share = run.time_share("time/publish_s") or 0.0
    if share < LONG_PUBLISHING or len(run.steps) < ENOUGH_STEPS:
        return None
    smaller = {
        "learner.lora.rank=32": run.config.learner.lora.rank,
        "model.dtype=bfloat16": run.config.model.dtype == "bfloat16",
    }
    less = ", or ".join(key for key, is_in_force in smaller.items() if not is_in_force)
    return Finding(
        rule="long_publishing",
        severity=Severity.SLOWS,
        sentence=f"new weights are on their way into the engine in {percent(share)} of the time.",
        figure=share,
        measure="time/publish_s",
        remedy=f"more data for each version, buffer.groups_per_step={2 * run.config.buffer.groups_per_step}"
        + (f"; or less to send: {less}" if less else ""),
    )


def dying_parts(run: Evidence) -> Finding | None:
    """A part of the run died 3 times or more."""
    deaths = {name: run.last(name) for step in run.steps[-1:] for name in step if name.startswith("restarts/")}
    if not deaths or max(deaths.values()) < RESTARTS:
        return None
    name, number = max(deaths.items(), key=lambda item: item[1])
    part = name.removeprefix("restarts/")
    log = "env.log" if part == "environment" else "log.txt"
    return Finding(
        rule="dying_parts",
        severity=Severity.SLOWS,
        sentence=f"the {part.replace('_', ' ')} died {number:.0f} times and was started again.",
        figure=number,
        measure=name,
        remedy=f"its last words are in {run.folder / log}; an engine or a rank that runs out of memory needs a lower "
        f"agents.concurrency or learner.token_budget",
    )


def _more(run: Evidence) -> str:
    """What lets more episodes run at once, as far as the pool says what they wait for."""
    slots, running = run.last("pool/slots", default=64.0), run.mean("pool/running") or 0.0
    waiting, room = run.last("pool/agents_waiting"), run.last("pool/admissible_groups", default=1e9)
    work = "or faster agents, tools and environments"
    if running >= 0.8 * slots:
        return f"more episodes at once, agents.concurrency={2 * int(slots)}, {work}"
    if waiting > 0.0 and room <= run.config.buffer.groups_per_step:  # all that a step frees is taken at once
        return (
            f"let episodes of later steps begin, buffer.max_policy_lag={run.config.buffer.max_policy_lag + 1}, {work}"
        )
    processes = run.config.agents.processes
    more = f"agents.processes={2 * processes}" if processes else f"agents.concurrency={2 * int(slots)}"
    return f"{more}, {work}"


def _faster_generation(run: Evidence) -> str:
    rollout, ways = run.config.rollout, []
    slots = run.last("pool/slots", default=64.0)
    if run.config.buffer.max_policy_lag == 0:
        ways.append("generate while the learner updates: buffer.max_policy_lag=1")
    elif (run.mean("pool/running") or 0.0) >= 0.8 * slots and slots < 64:
        ways.append(f"agents.concurrency={2 * int(slots)}")
    room, most = run.cards // rollout.tensor_parallel, rollout.engine_range[1]
    if most < room and not rollout.engine.startswith("http"):
        several = isinstance(rollout.engines, int)
        ways.append(f"rollout.engines={min(2 * most, room)}" if several else "a larger `most` of rollout.engines")
    return ", or ".join([*ways, f"a rollout.max_tokens below {rollout.max_tokens}"])
