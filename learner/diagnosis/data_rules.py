"""Rules about episodes that fail, that nobody scores, answers that are cut, and what the scores tell: what becomes training data.

Listed by `learner.diagnosis.diagnose`. They read nothing themselves but the logs of agents that fail. A task that is solved is no
finding of theirs.
"""

from __future__ import annotations

from collections import Counter

from buffers.ledger.batches import STALE
from buffers.ledger.doctor import Failures
from buffers.ledger.episodes import GIVEN_UP, NO_VARIANCE, RESTART
from buffers.ledger.scores import CONSTRAINED, NO_ROUNDS
from learner.diagnosis.evidence import Evidence, Observation, Severity, counted, percent, rule
from learner.recovery.failure_watch import MEANINGS, most_frequent_error
from learner.reporting.run_metrics import COMPARE_THE_BATCH

AFTER_EFFECTS = frozenset({GIVEN_UP, NO_VARIANCE, RESTART, STALE})
"""Reasons that follow from something else."""
NOT_SCORED = ("scorer", "agent exited with code 0 before a score was reported")
"""Reasons of failures where the agent did its part."""
FEW = 0.05
"""Share of the attempts that may fail for a reason."""
MANY = 0.3
"""Share of the attempts that harm when they fail: what is trained are the episodes that happened to work."""
EQUAL, MOSTLY_EQUAL = 0.5, 0.9
"""Shares of the groups whose members all score the same."""
MIXED = "take tasks that the model solves now and then, or a scorer that gives part marks"
HINT_REMEDIES = {
    "hint": "give tasks an extra_info.hint, or let the scorer or the environment report a `hint` with its score",
    "said": "let tools or the environment answer the policy within the episode",
    "sibling": MIXED,
}


@rule("steps", Severity.STOPS)
def ended_with_error(run: Evidence) -> Observation | None:
    """The run ended with an error."""
    error = run.summary.get("error")
    if not error or run.ledger.is_alive:
        return None
    return Observation(
        float(len(run.steps)),
        f"the run ended after {len(run.steps)} steps with an error: {str(error).splitlines()[0]}",
        f"see {run.folder / 'log.txt'}; `understudy resume {run.folder}` continues",
    )


@rule("share of the attempts", slows=FEW, harms=MANY)
def no_model_calls(run: Evidence) -> Observation:
    """At least 5 % of the attempts ended without a model call."""
    number, share = run.ledger.count(f"failed/{NO_ROUNDS}"), _share_of(run, _causes(run, NO_ROUNDS))
    return Observation(
        share,
        f"{counted(number, 'episode')} ({percent(share)} of the attempts) ended without one model call: their agents "
        f"asked something else than this run's server, or nothing.",
        "let the agent take OPENAI_BASE_URL and OPENAI_API_KEY from its environment; "
        "`understudy check -- COMMAND` shows what it calls",
        _if_none_scored(run),
    )


@rule("share of the attempts", slows=FEW, harms=MANY)
def nothing_scored(run: Evidence) -> Observation | None:
    """At least 5 % of the attempts failed because nobody gave a score."""
    found = _causes(run, *NOT_SCORED)
    if not found:
        return None
    worst, share = found[0], _share_of(run, found)
    detail = worst.example.removeprefix(worst.kind).removeprefix(":").strip()
    return Observation(
        share,
        f"{counted(sum(each.number for each in found), 'episode')} ({percent(share)} of the attempts) got no score: "
        f"{MEANINGS[worst.kind]}" + (f"; most often: {detail}." if detail else "."),
        "let data.scorer give a number for each answer, and 0 for one that it cannot read"
        if worst.kind == "scorer"
        else "set data.scorer, such as data.scorer=exact_match, or let env.command report a score before the agent ends",
        _if_none_scored(run),
    )


@rule("share of the attempts", slows=FEW, harms=MANY)
def failing_episodes(run: Evidence) -> Observation | None:
    """At least 5 % of the attempts failed for other reasons: a deadline, a crash, an environment."""
    found = [each for each in _causes(run) if each.kind not in (NO_ROUNDS, CONSTRAINED, *NOT_SCORED)]
    if not found:
        return None
    worst, share = found[0], _share_of(run, found)
    others = "" if len(found) < 2 else f"; others: {', '.join(f'{each.number} x {each.kind}' for each in found[1:4])}"
    return Observation(
        share,
        f"{counted(sum(each.number for each in found), 'episode')} ({percent(share)} of the attempts) failed, "
        f"{worst.number} of them: {MEANINGS.get(worst.kind, worst.example)}{others}." + _log_of(run, worst),
        _remedy_of(run, worst),
        _if_none_scored(run),
    )


@rule("share of the scored episodes", slows=FEW, harms=MANY)
def lost_groups(run: Evidence) -> Observation | None:
    """At least 5 % of the scored episodes were thrown away because another member of their group had no attempt left."""
    lost, size = run.ledger.count("lost/failed"), run.config.buffer.group_size
    share = lost / max(run.ledger.count("episodes/scored"), 1)
    if size < 2:
        return None
    return Observation(
        share,
        f"{lost} scored episodes ({percent(share)}) were thrown away, because another member of their group failed "
        f"{run.config.agents.max_attempts} times.",
        f"train such groups without it: agents.fewest_members={max(1, size * 3 // 4)}",
    )


@rule("share of the reported scores", slows=FEW, harms=MANY)
def late_scores(run: Evidence) -> Observation:
    """At least 5 % of the scores that were reported came after their episode had ended."""
    late = run.ledger.refused_scores.get("closed", 0)
    share = late / max(late + run.ledger.count("episodes/scored"), 1)
    return Observation(
        share,
        f"{late} scores ({percent(share)} of those reported) came after their episode had ended, and count for nothing.",
        f"give episodes more time, agents.deadline_s={2 * run.config.agents.deadline_s:g}, or let the judge report before the "
        f"agent ends",
    )


@rule("share of the newest scored episodes", slows=FEW, harms=MANY)
def missing_judges(run: Evidence) -> Observation | None:
    """A judge left out at least 5 % of the episodes in groups of which it scored others."""
    if not run.ledger.missing_judges:
        return None
    judge, number = max(run.ledger.missing_judges.items(), key=lambda item: item[1])
    share = number / run.ledger.episodes_judged
    return Observation(
        share,
        f"the judge {judge!r} gave no score to {percent(share)} of the newest episodes whose neighbours it scored: "
        f"their scores are means of other judges and are compared all the same.",
        "let every judge report for every episode, and call only the last report final",
    )


@rule("generation/constrained_share", slows=0.1, harms=0.5, stops=0.9)
def constrained_tokens(run: Evidence) -> Observation:
    """At least 10 % of the sampled tokens were not the policy's own choice, and are not trained."""
    share = max(run.last("generation/constrained_share"), _share_of(run, _causes(run, CONSTRAINED)))
    return Observation(
        share,
        f"{percent(share)} of the sampled tokens are not trained: requests changed what is sampled (response_format, "
        f"forced tool calls, logit_bias, penalties).",
        "leave these out of the agent's requests; tools with `tool_choice: auto` force nothing",
    )


@rule("reward/mean", Severity.STOPS)
def constant_scores(run: Evidence) -> Observation | None:
    """All of 16 or more scored episodes, of different groups, have one and the same score, which is not the best one; and scores
    are what is learned from."""
    groups = run.ledger.groups
    number = sum(group.number for group in groups)
    scores = {score for group in groups for score in (group.lowest, group.highest)}
    is_unscored = run.config.learner.advantage == "none"
    if number < 16 or len(groups) < 2 or len(scores) > 1 or run.is_solved or is_unscored:
        return None
    (score,) = scores
    return Observation(
        score,
        f"all of the {number} newest scored episodes have the score {score:g}: nothing tells good answers from bad ones.",
        f"look at what data.scorer or env.command says of a good answer and of a bad one; if it is right, {MIXED}",
    )


@rule("policy/truncated_share", slows=0.1, harms=0.5)
def cut_answers(run: Evidence) -> Observation | None:
    """At least 10 % of the sampled tokens are in answers that were cut at the most tokens, and such episodes score less than
    others, or all are cut and the reward has not risen."""
    answers, share = run.ledger.answers, run.mean("policy/truncated_share")
    share = answers.cut / max(answers.rounds, 1) if share is None else share
    cut, whole = answers.score_of_cut, answers.score_of_whole
    told = (
        f"{percent(share)} of the sampled tokens are in answers that were cut at {counted(answers.cut_tokens, 'token')}"
    )
    if cut is None or whole is None:
        is_worse = not (run.has_risen or run.is_solved)
    else:
        is_worse = cut < whole
        told += f"; such episodes score {cut:.3g}, others {whole:.3g}"
    if not answers.cut or not is_worse:
        return None
    most, length = run.config.rollout.max_tokens, run.config.rollout.max_model_len
    longer = f" rollout.max_model_len={2 * length}" if 4 * most > length else ""
    return Observation(
        share,
        f"{told}.",
        f"the agent asks for fewer tokens than rollout.max_tokens ({most}), or rollout.max_model_len ({length}) ends them: "
        f"raise `max_tokens` in its requests, or rollout.max_model_len={2 * length}"
        if answers.cut_tokens < most
        else f"rollout.max_tokens={2 * most}{longer}",
    )


@rule("generation/aborted", slows=0.1, harms=MANY)
def aborted_answers(run: Evidence) -> Observation:
    """At least 10 % of the model calls were given up by their client."""
    number = run.last("generation/aborted")
    share = number / max(run.ledger.count("rounds"), number, 1)
    return Observation(
        share,
        f"{number:.0f} generations ({percent(share)} of the model calls) were given up by their client.",
        f"raise the time-out of the agent's client, or let fewer episodes run at once: {run.fewer_at_once}",
    )


@rule("batch/equal_groups", slows=EQUAL, harms=MOSTLY_EQUAL, stops=1.0)
def equal_groups(run: Evidence) -> Observation | None:
    """All episodes score the same in at least half of the groups of the last 10 steps (in at least half of the steps, where the
    whole batch is compared), and the task is not solved."""
    learner = run.config.learner
    if learner.hints.coef or run.is_solved or constant_scores(run) is not None:  # hints teach there
        return None
    share, name, unit = run.mean("batch/equal_groups") or 0.0, "", "groups"
    if learner.advantage in COMPARE_THE_BATCH:
        spreads = run.values("reward/std")
        share, name, unit = sum(spread == 0.0 for spread in spreads) / max(len(spreads), 1), "reward/std", "steps"
    highest = max((step["reward/max"] for step in run.steps), default=0.0)
    lowest = min((step["reward/min"] for step in run.steps), default=0.0)
    easy = sum(group.lowest == group.highest == highest for group in run.ledger.groups)
    hard = sum(group.lowest == group.highest == lowest for group in run.ledger.groups)
    why = "most of them have the lowest score: they are too hard" if hard > easy else "most of them are solved"
    return Observation(
        share,
        f"in {percent(share)} of the {unit} all episodes score the same, from which nothing is learned; {why}.",
        f"{MIXED}; or buffer.group_size={2 * run.config.buffer.group_size}",
        measure=name,
    )


@rule("share of the last steps", slows=EQUAL, harms=MOSTLY_EQUAL)
def no_hints(run: Evidence) -> Observation | None:
    """No row had a hint in at least half of the last 10 steps (learner.hints), and the task is not solved."""
    learner, shares = run.config.learner, run.values("policy/hinted_share")
    if not shares or run.is_solved:
        return None
    number, alone = shares.count(0.0), learner.advantage == "none" and not learner.teacher.path
    return Observation(
        number / len(shares),
        f"in {number} of the last {len(shares)} steps no row had a hint (learner.hints.sources: {', '.join(learner.hints.sources)})"
        + (", from which alone the policy learns." if alone else ", though learner.hints.coef is set."),
        "; or ".join(HINT_REMEDIES[source] for source in learner.hints.sources),
        Severity.STOPS if alone and number == len(shares) else None,
    )


@rule("share of the complete groups", slows=EQUAL, harms=MOSTLY_EQUAL, stops=1.0)
def dropped_groups(run: Evidence) -> Observation:
    """At least half of the complete groups were dropped because their scores are equal (data.reward_manager=dapo)."""
    dropped, complete = run.given_up(NO_VARIANCE)
    return Observation(
        dropped / max(complete, 1),
        f"{dropped} of {complete} groups were generated and dropped, as all of their episodes score the same.",
        f"{MIXED}; data.reward_manager=naive trains them all the same, for nothing",
    )


@rule("", harms=0.8)
def one_task(run: Evidence) -> Observation | None:
    """One of 4 or more tasks makes at least half of what the loss counts in the newest groups (tokens; with the aggregation
    seq-mean-token-mean episodes), and three times its part."""
    by_sequence = run.config.learner.aggregation == "seq-mean-token-mean"
    unit = "episodes" if by_sequence else "trained tokens"
    weights: Counter[str] = Counter()
    for group in run.ledger.groups:
        weights[group.task_id] += group.number if by_sequence else group.tokens
    if len(weights) < 4 or weights.total() == 0:
        return None
    ((task, most),) = weights.most_common(1)
    share = most / weights.total()
    groups = sum(group.task_id == task for group in run.ledger.groups) / len(run.ledger.groups)
    if share < max(0.5, 3.0 / len(weights)):
        return None
    return Observation(
        share,
        f"one of {len(weights)} tasks, {task!r}, makes {percent(share)} of the {unit} in {percent(groups)} of the groups.",
        "count each answer once, however long: learner.loss_agg=seq-mean-token-mean"
        if not by_sequence and share > 1.5 * groups
        else "give the files of data.tasks weights, {file: weight}, or take this row out",
        measure=f"share of the newest groups' {unit}",
    )


def _causes(run: Evidence, *kinds: str) -> list[Failures]:
    """Kinds of failures that are no after-effects, the most frequent first. `kinds`: only these."""
    return [
        each for each in run.ledger.failures if each.kind not in AFTER_EFFECTS and (not kinds or each.kind in kinds)
    ]


def _share_of(run: Evidence, failures: list[Failures]) -> float:
    """Their share of the attempts."""
    attempts = run.ledger.count("episodes/scored") + sum(each.number for each in _causes(run))
    return sum(each.number for each in failures) / max(attempts, 1)


def _if_none_scored(run: Evidence) -> Severity | None:
    return Severity.STOPS if run.ledger.count("episodes/scored") == 0 else None


def _log_of(run: Evidence, worst: Failures) -> str:
    """What the agents' logs say, where agents ended with an error."""
    if not worst.kind.startswith("agent exited"):
        return ""
    error = most_frequent_error(run.folder / "agents")
    return "" if error is None else f" Their logs say most often: {error[2].splitlines()[-1].strip()} ({error[1]})."


def _remedy_of(run: Evidence, worst: Failures) -> str:
    agents = run.config.agents
    if worst.kind == "deadline":
        return f"agents.deadline_s={2 * agents.deadline_s:g}, or {run.fewer_at_once}, so that each is faster"
    if worst.kind == "silent agent":
        return f"agents.silence_s={2 * (agents.silence_s or agents.deadline_s):g}"
    if worst.kind.startswith("agent exited"):
        return f"mend the agent: agents.command is started as in {run.folder / 'agents'}, whose logs have the error"
    if worst.kind.startswith("environment"):
        return f"mend the environment: its log is {run.folder / 'env.log'}"
    return f"look at one: `understudy ledger inspect {run.folder} --episode ID`"
