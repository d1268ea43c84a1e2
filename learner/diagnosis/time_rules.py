"""Rules about time: who waits for whom, and which key would let them wait less; and what is said where nothing else is to be said.

Listed by `learner.diagnosis.diagnose`. They look at the last 10 steps. What they find costs time, never what is learned.
"""

from __future__ import annotations

from learner.diagnosis.evidence import Evidence, Finding, Observation, Severity, percent, rule

IDLE = 0.5
"""Share of the steps' time that the learner may wait."""
ENGINE_IDLE = 0.3
"""Share of the time that the engine may have nothing to do."""
ENOUGH_STEPS = 5
"""Steps without the first ones, which hold start-up."""
TELLING_STEPS = 10
"""Steps below which a reward's course says little."""


@rule("time/wait_s", slows=IDLE)
def idle_learner(run: Evidence) -> Observation | None:
    """The learner waited for a batch in at least half of the time of at least 5 steps."""
    if len(run.steps) < ENOUGH_STEPS:
        return None
    share, engine = run.time_share("time/wait_s") or 0.0, run.time_share("time/engine_idle_s")
    why, remedy = "generation takes that long", _faster_generation(run)
    if engine is not None and engine > ENGINE_IDLE:
        why = f"the engine is idle for {percent(engine)} of it, so that agents or environment are slow"
        remedy = f"{_more(run)}, or faster agents, tools and environments"
    return Observation(share, f"the learner waits for episodes in {percent(share)} of the time; {why}.", remedy)


@rule("time/engine_idle_s", slows=ENGINE_IDLE)
def idle_engine(run: Evidence) -> Observation | None:
    """The engine had nothing to do in at least 30 % of the time of at least 5 steps, and the learner waited for less than half; not
    where they take turns, each with several threads."""
    share, waits = run.time_share("time/engine_idle_s") or 0.0, run.time_share("time/wait_s") or 0.0
    if waits >= IDLE or len(run.steps) < ENOUGH_STEPS:
        return None
    is_on_policy, learner = run.config.buffer.max_policy_lag == 0, run.config.learner
    if is_on_policy and (learner.threads or 1) > 1:
        return None  # they take turns, each with cores that the other leaves
    faster = f"learner.token_budget={2 * learner.token_budget}"
    if (ranks := 2 * learner.ranks) <= run.cards:
        faster = f"learner.ranks={ranks}, or {faster}"
    if learner.epochs > 1:
        faster += ", or learner.epochs=1"
    return Observation(
        share,
        f"the engine has nothing to do in {percent(share)} of the time, as the learner's updates take "
        f"{percent(1.0 - waits)} of it" + (" and nothing may be generated meanwhile." if is_on_policy else "."),
        "generate while the learner updates: buffer.max_policy_lag=1" if is_on_policy else faster,
    )


@rule("generations set aside")
def preempted_generations(run: Evidence) -> Observation | None:
    """An engine set generations aside for lack of cache in each of the last steps, on average."""
    names = {
        name for step in run.recent for name in step if name.startswith("engine/") and name.endswith("/preemptions")
    }
    grown = sum(max(run.values(name)) - min(run.values(name)) for name in names)
    if len(run.recent) < 2 or grown < len(run.recent):
        return None
    cache = run.config.rollout.kv_cache_gb
    if cache is None and run.cards:
        more = "a higher rollout.gpu_memory_utilization"
    else:
        more = f"rollout.kv_cache_gb={2 * (cache or 0.25):g}"
    return Observation(
        grown,
        f"the engines set {grown:.0f} generations aside in the last {len(run.recent)} steps, for lack of cache, and "
        f"computed them again.",
        f"agents.concurrency={max(1, run.slots * 3 // 4)} or agents.concurrency=auto, or {more}",
    )


@rule("")
def dying_parts(run: Evidence) -> Observation | None:
    """A part of the run died 3 times or more."""
    deaths = {name: run.last(name) for step in run.steps[-1:] for name in step if name.startswith("restarts/")}
    if not deaths or max(deaths.values()) < 3:
        return None
    name, number = max(deaths.items(), key=lambda item: item[1])
    part = name.removeprefix("restarts/")
    log = "env.log" if part == "environment" else "log.txt"
    return Observation(
        number,
        f"the {part.replace('_', ' ')} died {number:.0f} times and was started again.",
        f"its last words are in {run.folder / log}; an engine or a rank that runs out of memory needs a lower "
        f"agents.concurrency or learner.token_budget",
        measure=name,
    )


@rule("time/save_s", slows=0.2)
def long_saving(run: Evidence) -> Observation | None:
    """The learner waits for checkpoints to be on disk in at least 20 % of the time."""
    if len(run.steps) < ENOUGH_STEPS:
        return None
    share = run.time_share("time/save_s") or 0.0
    return Observation(
        share,
        f"the learner waits for its checkpoints to be on disk in {percent(share)} of the time.",
        f"run.checkpoints.every={4 * run.config.run.checkpoints.every}, or run.dir on a faster disk",
    )


@rule("time/publish_s", slows=0.3)
def long_publishing(run: Evidence) -> Observation | None:
    """New weights take at least 30 % of the time on their way into the engine."""
    if len(run.steps) < ENOUGH_STEPS:
        return None
    share = run.time_share("time/publish_s") or 0.0
    smaller = {
        "learner.lora.rank=32": run.config.learner.lora.rank,
        "model.dtype=bfloat16": run.config.model.dtype == "bfloat16",
    }
    less = ", or ".join(key for key, is_in_force in smaller.items() if not is_in_force)
    return Observation(
        share,
        f"new weights are on their way into the engine in {percent(share)} of the time.",
        f"more data for each version, buffer.groups_per_step={2 * run.config.buffer.groups_per_step}"
        + (f"; or less to send: {less}" if less else ""),
    )


@rule("share of a batch")
def no_step(run: Evidence) -> Observation | None:
    """No step is made yet: what there is of a first batch, and what runs."""
    ledger, need = run.ledger, run.config.buffer.groups_per_step
    if run.steps or (run.summary.get("error") and not ledger.is_alive):
        return None
    ready, running, scored = (ledger.count(name) for name in ("groups/ready", "episodes/running", "episodes/scored"))
    told = f"no step is made yet: {ready} of the {need} groups of a batch are complete, {scored} episodes are scored, {running} run"
    if run.config.serve.enabled:
        told = f"no step is made yet: {ready} of the {need} sessions of a batch have ended with feedback, {running} are open"
    if ledger.running_without_rounds and ledger.running_without_rounds == running:
        told += ", none of them with a finished model call"
    remedy = "" if ledger.is_alive else f"see {run.folder / 'log.txt'}; `understudy resume {run.folder}` continues"
    return Observation(ready / need, f"{told}.", remedy, Severity.NOTE if ledger.is_alive else Severity.STOPS)


@rule("steps", Severity.NOTE)
def few_steps(run: Evidence) -> Observation | None:
    """Fewer than 10 steps are made: too few to say whether the reward moves."""
    if not run.steps or len(run.steps) >= TELLING_STEPS or run.is_solved:
        return None
    return Observation(
        float(len(run.steps)),
        f"{len(run.steps)} steps are too few to say whether the reward moves: {run.first_reward:.3f} in the first ones, "
        f"{run.last_reward:.3f} in the last ones; the learning rate rises for {run.config.learner.lr_warmup_steps} steps.",
        f"run.steps={4 * TELLING_STEPS}" if run.config.run.steps < TELLING_STEPS else "look again later",
    )


def unexplained(run: Evidence) -> Finding:
    """No rule explains why the reward of 10 steps or more has not risen."""
    learner = run.config.learner
    return Finding(
        rule="unexplained",
        severity=Severity.HARMS,
        sentence=f"the reward has not risen in {len(run.steps)} steps ({run.first_reward:.3f} in the first 3, "
        f"{run.last_reward:.3f} in the last 5), and no rule says why.",
        figure=run.last_reward,
        measure="reward/mean",
        remedy=("" if run.config.serve.enabled else f"run.steps={2 * len(run.steps)}, or ")
        + f"learner.lr={3 * learner.lr:.2g}, or more data in a step: "
        f"buffer.groups_per_step={2 * run.config.buffer.groups_per_step}",
    )


def healthy(run: Evidence) -> Finding:
    """Nothing was found that holds learning back."""
    means = {
        name: run.mean(name)
        for name in ("batch/equal_groups", "policy/truncated_share", "policy/clipfrac", "policy/entropy")
    }
    most = {"policy/max_logprob_diff": max(run.values("policy/max_logprob_diff"), default=None)}
    figures = means | most | {"staleness/mean": run.mean("staleness/mean")}
    told = ", ".join(f"{name} {value:.2g}" for name, value in figures.items() if value is not None)
    failed, scored = run.ledger.count("episodes/failed"), run.ledger.count("episodes/scored")
    course = (
        f"the reward is at its best, {run.last_reward:.3f}"
        if run.is_solved
        else f"the reward went from {run.first_reward:.3f} to {run.last_reward:.3f}"
    )
    return Finding(
        rule="healthy",
        severity=Severity.NOTE,
        sentence=f"nothing was found that holds learning back: {course} in {len(run.steps)} steps; "
        f"{percent(failed / max(failed + scored, 1))} of the episodes failed; {told}.",
        figure=run.last_reward,
        measure="reward/mean",
    )


def _more(run: Evidence) -> str:
    """What lets more episodes run at once, as far as the pool says what they wait for."""
    waiting, room = run.last("pool/agents_waiting"), run.last("pool/admissible_groups", default=1e9)
    processes = run.config.agents.processes
    if (run.mean("pool/running") or 0.0) >= 0.8 * run.slots:
        return f"more episodes at once, agents.concurrency={2 * run.slots}"
    if waiting > 0.0 and room <= run.config.buffer.groups_per_step:  # all that a step frees is taken at once
        return f"let episodes of later steps begin, buffer.max_policy_lag={run.config.buffer.max_policy_lag + 1}"
    return f"agents.processes={2 * processes}" if processes else f"agents.concurrency={2 * run.slots}"


def _faster_generation(run: Evidence) -> str:
    rollout, ways = run.config.rollout, []
    if run.config.buffer.max_policy_lag == 0:
        ways.append("generate while the learner updates: buffer.max_policy_lag=1")
    elif (run.mean("pool/running") or 0.0) >= 0.8 * run.slots and run.slots < 64:
        ways.append(f"agents.concurrency={2 * run.slots}")
    room, most = run.cards // rollout.tensor_parallel, rollout.engine_range[1]
    if most < room and not rollout.engine.startswith("http"):
        several = isinstance(rollout.engines, int)
        ways.append(f"rollout.engines={min(2 * most, room)}" if several else "a larger `most` of rollout.engines")
    return ", or ".join([*ways, f"a rollout.max_tokens below {rollout.max_tokens}"])
