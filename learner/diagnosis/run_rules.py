"""Rules about the run as a whole: that it ended with an error, has made no step, fell back, or does better on its own tasks only.

Listed in `learner.diagnosis.diagnose`; as in `learner.diagnosis.episode_rules`.
"""

from __future__ import annotations

from statistics import fmean

from learner.diagnosis.evidence import CLEAR_RISE, LAST_STEPS, Evidence
from learner.diagnosis.finding import Finding, Severity, percent

ENOUGH_STEPS = 10
"""Steps below which a reward's course says little."""
FALLEN = 0.25
"""Part of the scores' range by which a mean of 5 steps may be above the last one."""
CLEARLY = 0.1
"""Part of it by which a validation of many tasks may."""
BEHIND = 0.25
"""Part of the scores' range by which validation may fall behind what training gained."""


def ended_with_error(run: Evidence) -> Finding | None:
    """The run ended with an error."""
    error = run.summary.get("error")
    if not error or _is_alive(run):
        return None
    return Finding(
        rule="ended_with_error",
        severity=Severity.STOPS,
        sentence=f"the run ended after {len(run.steps)} steps with an error: {str(error).splitlines()[0]}",
        figure=float(len(run.steps)),
        measure="steps",
        remedy=f"see {run.folder / 'log.txt'}; `understudy resume {run.folder}` continues",
    )


def no_step(run: Evidence) -> Finding | None:
    """No step is made yet: what there is of a first batch, and what runs."""
    if run.steps or (run.summary.get("error") and not _is_alive(run)):
        return None
    ready, need = run.count("groups/ready"), run.config.buffer.groups_per_step
    running, scored = run.count("episodes/running"), run.count("episodes/scored")
    told = f"no step is made yet: {ready} of the {need} groups of a batch are complete, {scored} episodes are scored, {running} run"
    silent = run.ledger.running_without_rounds if run.ledger is not None else 0
    if silent and silent == running:
        told += ", none of them with a finished model call"
    return Finding(
        rule="no_step",
        severity=Severity.NOTE if _is_alive(run) else Severity.STOPS,
        sentence=f"{told}.",
        figure=ready / need,
        measure="share of a batch",
        remedy="" if _is_alive(run) else f"see {run.folder / 'log.txt'}; `understudy resume {run.folder}` continues",
    )


def few_steps(run: Evidence) -> Finding | None:
    """Fewer than 10 steps are made: too few to say whether the reward moves."""
    if not run.steps or len(run.steps) >= ENOUGH_STEPS or run.is_solved:
        return None
    planned = run.config.run.steps
    more = f"run.steps={4 * ENOUGH_STEPS}" if planned < ENOUGH_STEPS else "look again later"
    return Finding(
        rule="few_steps",
        severity=Severity.NOTE,
        sentence=f"{len(run.steps)} steps are too few to say whether the reward moves: {run.first_reward:.3f} in the first ones, "
        f"{run.last_reward:.3f} in the last ones; the learning rate rises for {run.config.learner.lr_warmup_steps} steps.",
        figure=float(len(run.steps)),
        measure="steps",
        remedy=more,
    )


def fallen_reward(run: Evidence) -> Finding | None:
    """The mean of the last 5 steps is below that of the best 5 by a quarter of the scores' range."""
    means = [fmean(run.rewards[end - LAST_STEPS : end]) for end in range(LAST_STEPS, len(run.rewards) + 1)]
    if not means or run.score_range == 0.0:
        return None
    best = max(means)
    step = int(run.steps[means.index(best) + LAST_STEPS - 1]["step"])
    if best - means[-1] < FALLEN * run.score_range:
        return None
    return Finding(
        rule="fallen_reward",
        severity=Severity.HARMS,
        sentence=f"the reward fell from {best:.3f} (step {step}) to {means[-1]:.3f}.",
        figure=best - means[-1],
        measure="reward/mean",
        remedy=f"{run.slower}, from the start or a better checkpoint; or hold the policy: {run.held}",
    )


def training_tasks_only(run: Evidence) -> Finding | None:
    """The reward rose by a quarter of the scores' range more than validation did."""
    if len(run.validations) < 2 or not run.has_risen or run.score_range == 0.0:
        return None
    gained = run.last_reward - run.first_reward
    validated = run.validations[-1]["val/mean"] - run.validations[0]["val/mean"]
    if gained - validated < BEHIND * run.score_range:
        return None
    return Finding(
        rule="training_tasks_only",
        severity=Severity.HARMS,
        sentence=f"the reward of the training tasks rose by {gained:.3f}, that of the validation tasks by {validated:.3f}: "
        f"the policy learns the training tasks by heart.",
        figure=validated,
        measure="val/mean",
        remedy=f"more different rows in data.tasks; {run.held} holds the policy near its beginning",
    )


def fallen_validation(run: Evidence) -> Finding | None:
    """The newest validation is below the best one by a quarter of the scores' range; by a tenth, where it has tasks enough to tell
    that from chance."""
    if len(run.validations) < 2 or run.score_range == 0.0 or training_tasks_only(run) is not None:
        return None
    best, last = max(run.validations, key=lambda line: line["val/mean"]), run.validations[-1]
    lost = best["val/mean"] - last["val/mean"]
    chance = run.score_range * (0.5 / max(last.get("val/tasks", 1.0), 1.0)) ** 0.5  # of two means that lie in the range
    if lost < FALLEN * run.score_range and lost < max(CLEARLY * run.score_range, CLEAR_RISE * chance):
        return None
    return Finding(
        rule="fallen_validation",
        severity=Severity.HARMS,
        sentence=f"the validation fell from {best['val/mean']:.3f} (step {best.get('val/step', best['step']):.0f}) to "
        f"{last['val/mean']:.3f} (step {last.get('val/step', last['step']):.0f}).",
        figure=lost,
        measure="val/mean",
        remedy=f"{run.slower}, from the start or a better checkpoint; or hold the policy: {run.held}",
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
        remedy=f"run.steps={2 * len(run.steps)}, or learner.lr={3 * learner.lr:.2g}, or more data in a step: "
        f"buffer.groups_per_step={2 * run.config.buffer.groups_per_step}",
    )


def healthy(run: Evidence) -> Finding:
    """Nothing was found that holds learning back."""
    figures = {
        "batch/equal_groups": run.mean("batch/equal_groups"),
        "policy/truncated_share": run.mean("policy/truncated_share"),
        "policy/clipfrac": run.mean("policy/clipfrac"),
        "policy/entropy": run.mean("policy/entropy"),
        "policy/max_logprob_diff": max(run.values("policy/max_logprob_diff"), default=None),
        "staleness/mean": run.mean("staleness/mean"),
    }
    told = ", ".join(f"{name} {value:.2g}" for name, value in figures.items() if value is not None)
    failed = run.count("episodes/failed") / max(run.count("episodes/failed") + run.count("episodes/scored"), 1)
    course = (
        f"the reward is at its best, {run.last_reward:.3f}"
        if run.is_solved
        else f"the reward went from {run.first_reward:.3f} to {run.last_reward:.3f}"
    )
    return Finding(
        rule="healthy",
        severity=Severity.NOTE,
        sentence=f"nothing was found that holds learning back: {course} in {len(run.steps)} steps; {percent(failed)} of the "
        f"episodes failed; {told}.",
        figure=run.last_reward,
        measure="reward/mean",
    )


def _is_alive(run: Evidence) -> bool:
    return run.ledger is not None and run.ledger.is_alive
