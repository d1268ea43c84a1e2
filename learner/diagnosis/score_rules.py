"""Rules about what the scores tell: groups in which there is nothing to compare, a scorer that says always the same, one task that
makes most of the data.

Listed in `learner.diagnosis.diagnose`; as in `learner.diagnosis.episode_rules`. A task that is solved is no finding of theirs.
"""

from __future__ import annotations

from collections import Counter

from buffers.ledger.episodes import NO_VARIANCE
from buffers.ledger.tools.survey import GroupScores
from learner.diagnosis.evidence import Evidence
from learner.diagnosis.finding import Finding, Severity, by_share, percent
from learner.reporting.run_metrics import COMPARE_THE_BATCH

ENOUGH_EPISODES = 16
"""Scored episodes below which one score for all is chance."""
EQUAL, MOSTLY_EQUAL = 0.5, 0.9
"""Shares of the groups whose members all score the same."""
FEWEST_TASKS = 4
"""Different tasks below which each makes much of the data."""
DOMINANT = 0.5
"""Share of the tokens that one task may make."""
MIXED = "take tasks that the model solves now and then, or a scorer that gives part marks"


def constant_scores(run: Evidence) -> Finding | None:
    """All of 16 or more scored episodes, of different groups, have one and the same score, which is not the best one."""
    groups = run.ledger.groups if run.ledger is not None else ()
    number = sum(group.number for group in groups)
    scores = {score for group in groups for score in (group.lowest, group.highest)}
    if number < ENOUGH_EPISODES or len(groups) < 2 or len(scores) > 1 or run.is_solved:
        return None
    score = next(iter(scores))
    return Finding(
        rule="constant_scores",
        severity=Severity.STOPS,
        sentence=f"all of the {number} newest scored episodes have the score {score:g}: nothing tells good answers from bad ones.",
        figure=score,
        measure="reward/mean",
        remedy=f"look at what data.scorer or env.command says of a good answer and of a bad one; if it is right, {MIXED}",
    )


def equal_groups(run: Evidence) -> Finding | None:
    """All episodes score the same in at least half of the groups of the last 10 steps (in at least half of the steps, where the
    whole batch is compared), and the task is not solved."""
    if run.config.learner.advantage == "cpo" or run.is_solved or _is_constant(run):  # cpo learns from hints there
        return None
    if run.config.learner.advantage in COMPARE_THE_BATCH:
        spreads = run.values("reward/std")
        share, name, what = sum(spread == 0.0 for spread in spreads) / max(len(spreads), 1), "reward/std", "steps"
    else:
        share, name, what = run.mean("batch/equal_groups") or 0.0, "batch/equal_groups", "groups"
    if share < EQUAL:
        return None
    size = run.config.buffer.group_size
    easy = sum(group.lowest == group.highest == _best(run) for group in _groups(run))
    hard = sum(group.lowest == group.highest == _worst(run) for group in _groups(run))
    why = "most of them have the lowest score: they are too hard" if hard > easy else "most of them are solved"
    return Finding(
        rule="equal_groups",
        severity=Severity.STOPS if share == 1.0 else by_share(share, harms=MOSTLY_EQUAL),
        sentence=f"in {percent(share)} of the {what} all episodes score the same, from which nothing is learned; {why}.",
        figure=share,
        measure=name,
        remedy=f"{MIXED}; or buffer.group_size={2 * size}",
    )


def dropped_groups(run: Evidence) -> Finding | None:
    """At least half of the complete groups were dropped because their scores are equal (data.reward_manager=dapo)."""
    dropped = run.count(f"evicted/{NO_VARIANCE}")
    complete = dropped + sum(run.count(f"groups/{state}") for state in ("ready", "leased", "trained"))
    share = dropped / max(complete, 1)
    if share < EQUAL:
        return None
    return Finding(
        rule="dropped_groups",
        severity=Severity.STOPS if share == 1.0 else by_share(share, harms=MOSTLY_EQUAL),
        sentence=f"{dropped} of {complete} groups were generated and dropped, as all of their episodes score the same.",
        figure=share,
        measure="share of the complete groups",
        remedy=f"{MIXED}; data.reward_manager=naive trains them all the same, for nothing",
    )


def one_task(run: Evidence) -> Finding | None:
    """One of 4 or more tasks makes at least half of what the loss counts in the newest groups (tokens; with the aggregation
    seq-mean-token-mean episodes), and three times its part."""
    by_sequence = run.config.learner.aggregation == "seq-mean-token-mean"
    weights: Counter[str] = Counter()
    for group in _groups(run):
        weights[group.task_id] += group.number if by_sequence else group.tokens
    total, what = sum(weights.values()), "episodes" if by_sequence else "trained tokens"
    if len(weights) < FEWEST_TASKS or total == 0:
        return None
    task, most = weights.most_common(1)[0]
    share = most / total
    groups = sum(group.task_id == task for group in _groups(run)) / len(_groups(run))
    if share < max(DOMINANT, 3.0 / len(weights)):
        return None
    by_length = not by_sequence and share > 1.5 * groups
    return Finding(
        rule="one_task",
        severity=by_share(share, harms=0.8),
        sentence=f"one of {len(weights)} tasks, {task!r}, makes {percent(share)} of the {what} in {percent(groups)} of the groups.",
        figure=share,
        measure=f"share of the newest groups' {what}",
        remedy="count each answer once, however long: learner.loss_agg=seq-mean-token-mean"
        if by_length
        else "give the files of data.tasks weights, {file: weight}, or take this row out",
    )


def _groups(run: Evidence) -> tuple[GroupScores, ...]:
    return run.ledger.groups if run.ledger is not None else ()


def _is_constant(run: Evidence) -> bool:
    return constant_scores(run) is not None


def _best(run: Evidence) -> float:
    return max((step["reward/max"] for step in run.steps), default=0.0)


def _worst(run: Evidence) -> float:
    return min((step["reward/min"] for step in run.steps), default=0.0)
