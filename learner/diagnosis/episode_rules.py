"""Rules about episodes that fail, that nobody scores, and answers that are cut: what never becomes training data.

Listed in `learner.diagnosis.diagnose`. Each is a function of the evidence that returns a finding, or None where all is well; what
it fires at is in its docstring, and in docs/diagnosis.md. They read nothing themselves but the logs of agents that fail.
"""

from __future__ import annotations

from buffers.ledger.batches import STALE
from buffers.ledger.episodes import GIVEN_UP, NO_VARIANCE, RESTART
from buffers.ledger.scores import CONSTRAINED, NO_ROUNDS
from buffers.ledger.tools.survey import Failures
from learner.diagnosis.evidence import Evidence
from learner.diagnosis.finding import Finding, Severity, by_share, counted, percent
from learner.recovery.failure_report import MEANINGS, most_frequent_error

AFTER_EFFECTS = frozenset({GIVEN_UP, NO_VARIANCE, RESTART, STALE})
"""Reasons that follow from something else."""
NOT_SCORED = ("scorer", "agent exited with code 0 before a score was reported")
"""Reasons of failures where the agent did its part."""
FEW = 0.05
"""Share of the attempts that may fail for a reason."""
MANY = 0.3
"""Share of the attempts that harm when they fail: what is trained are the episodes that happened to work."""
CUT, MOSTLY_CUT = 0.1, 0.5
"""Shares of the sampled tokens in answers that were cut."""


def no_model_calls(run: Evidence) -> Finding | None:
    """At least 5 % of the attempts ended without a model call."""
    share = _share_of(run, (NO_ROUNDS,))
    if share < FEW:
        return None
    number = run.count(f"failed/{NO_ROUNDS}")
    return Finding(
        rule="no_model_calls",
        severity=_severity(run, share),
        sentence=f"{counted(number, 'episode')} ({percent(share)} of the attempts) ended without one model call: their agents "
        f"asked something else than this run's server, or nothing.",
        figure=share,
        measure="share of the attempts",
        remedy="let the agent take OPENAI_BASE_URL and OPENAI_API_KEY from its environment; "
        "`understudy check -- COMMAND` shows what it calls",
    )


def nothing_scored(run: Evidence) -> Finding | None:
    """At least 5 % of the attempts failed because nobody gave a score."""
    share = _share_of(run, NOT_SCORED)
    if share < FEW:
        return None
    found = [each for each in _causes(run) if each.kind in NOT_SCORED]
    worst = found[0]
    detail = worst.example.removeprefix(worst.kind).removeprefix(":").strip()
    number = sum(each.number for each in found)
    return Finding(
        rule="nothing_scored",
        severity=_severity(run, share),
        sentence=f"{counted(number, 'episode')} ({percent(share)} of the attempts) got no score: {MEANINGS[worst.kind]}"
        + (f"; most often: {detail}" if detail else "")
        + ".",
        figure=share,
        measure="share of the attempts",
        remedy="let data.scorer give a number for each answer, and 0 for one that it cannot read"
        if worst.kind == "scorer"
        else "set data.scorer, such as data.scorer=exact_match, or let env.command report a score before the agent ends",
    )


def late_scores(run: Evidence) -> Finding | None:
    """At least 5 % of the scores that were reported came after their episode had ended."""
    if run.ledger is None:
        return None
    late, scored = run.ledger.refused_scores.get("closed", 0), run.count("episodes/scored")
    share = late / max(late + scored, 1)
    if share < FEW:
        return None
    deadline = 2 * run.config.agents.deadline_s
    return Finding(
        rule="late_scores",
        severity=by_share(share, harms=MANY),
        sentence=f"{late} scores ({percent(share)} of those reported) came after their episode had ended, and count for nothing.",
        figure=share,
        measure="share of the reported scores",
        remedy=f"give episodes more time, agents.deadline_s={deadline:g}, or let the judge report before the agent ends",
    )


def missing_judges(run: Evidence) -> Finding | None:
    """A judge left out at least 5 % of the episodes in groups of which it scored others."""
    if run.ledger is None or not run.ledger.missing_judges:
        return None
    judge, number = max(run.ledger.missing_judges.items(), key=lambda item: item[1])
    share = number / run.ledger.episodes_judged
    if share < FEW:
        return None
    return Finding(
        rule="missing_judges",
        severity=by_share(share, harms=MANY),
        sentence=f"the judge {judge!r} gave no score to {percent(share)} of the newest episodes whose neighbours it scored: "
        f"their scores are means of other judges and are compared all the same.",
        figure=share,
        measure="share of the newest scored episodes",
        remedy="let every judge report for every episode, and call only the last report final",
    )


def failing_episodes(run: Evidence) -> Finding | None:
    """At least 5 % of the attempts failed for other reasons: a deadline, a crash, an environment."""
    found = [each for each in _causes(run) if each.kind not in (NO_ROUNDS, CONSTRAINED, *NOT_SCORED)]
    share = _share_of(run, [each.kind for each in found])
    if share < FEW:
        return None
    worst, number = found[0], sum(each.number for each in found)
    meaning = MEANINGS.get(worst.kind, worst.example)
    told = "" if len(found) < 2 else f"; others: {', '.join(f'{each.number} x {each.kind}' for each in found[1:4])}"
    return Finding(
        rule="failing_episodes",
        severity=_severity(run, share),
        sentence=f"{counted(number, 'episode')} ({percent(share)} of the attempts) failed, {worst.number} of them: {meaning}{told}."
        + _log_of(run, worst),
        figure=share,
        measure="share of the attempts",
        remedy=_remedy_of(run, worst),
    )


def lost_groups(run: Evidence) -> Finding | None:
    """At least 5 % of the scored episodes were thrown away because another member of their group had no attempt left."""
    lost, scored = run.count("lost/failed"), run.count("episodes/scored")
    share = lost / max(scored, 1)
    size = run.config.buffer.group_size
    if share < FEW or size < 2:
        return None
    return Finding(
        rule="lost_groups",
        severity=by_share(share, harms=MANY),
        sentence=f"{lost} scored episodes ({percent(share)}) were thrown away, because another member of their group failed "
        f"{run.config.agents.max_attempts} times.",
        figure=share,
        measure="share of the scored episodes",
        remedy=f"train such groups without it: agents.fewest_members={max(1, size * 3 // 4)}",
    )


def constrained_tokens(run: Evidence) -> Finding | None:
    """At least 10 % of the sampled tokens were not the policy's own choice, and are not trained."""
    share = max(run.last("generation/constrained_share"), _share_of(run, (CONSTRAINED,)))
    if share < 0.1:
        return None
    return Finding(
        rule="constrained_tokens",
        severity=Severity.STOPS if share >= 0.9 else by_share(share, harms=0.5),
        sentence=f"{percent(share)} of the sampled tokens are not trained: requests changed what is sampled (response_format, "
        f"forced tool calls, logit_bias, penalties).",
        figure=share,
        measure="generation/constrained_share",
        remedy="leave these out of the agent's requests; tools with `tool_choice: auto` force nothing",
    )


def cut_answers(run: Evidence) -> Finding | None:
    """At least 10 % of the sampled tokens are in answers that were cut at the most tokens, and such episodes score less than
    others, or all are cut and the reward has not risen."""
    if run.ledger is None:
        return None
    answers = run.ledger.answers
    share = run.mean("policy/truncated_share")
    share = answers.cut / max(answers.rounds, 1) if share is None else share
    if share < CUT or not answers.cut or not _is_cut_worse(run):
        return None
    most, length = run.config.rollout.max_tokens, run.config.rollout.max_model_len
    told = (
        f"{percent(share)} of the sampled tokens are in answers that were cut at {counted(answers.cut_tokens, 'token')}"
    )
    if answers.score_of_whole is not None and answers.score_of_cut is not None:
        told += f"; such episodes score {answers.score_of_cut:.3g}, others {answers.score_of_whole:.3g}"
    if answers.cut_tokens < most:
        remedy = (
            f"the agent asks for fewer tokens than rollout.max_tokens ({most}), or rollout.max_model_len ({length}) ends them: "
            f"raise `max_tokens` in its requests, or rollout.max_model_len={2 * length}"
        )
    else:
        longer = f" rollout.max_model_len={2 * length}" if 4 * most > length else ""
        remedy = f"rollout.max_tokens={2 * most}{longer}"
    return Finding(
        rule="cut_answers",
        severity=by_share(share, harms=MOSTLY_CUT),
        sentence=f"{told}.",
        figure=share,
        measure="policy/truncated_share",
        remedy=remedy,
    )


def aborted_answers(run: Evidence) -> Finding | None:
    """At least 10 % of the model calls were given up by their client."""
    number, rounds = run.last("generation/aborted"), run.count("rounds")
    share = number / max(rounds, number, 1)
    if share < 0.1:
        return None
    return Finding(
        rule="aborted_answers",
        severity=by_share(share, harms=MANY),
        sentence=f"{number:.0f} generations ({percent(share)} of the model calls) were given up by their client.",
        figure=share,
        measure="generation/aborted",
        remedy="raise the time-out of the agent's client, or let fewer episodes run at once: "
        f"agents.concurrency={_half(run)}",
    )


def _half(run: Evidence) -> int:
    slots = run.last("pool/slots", default=64.0)
    return max(1, int(slots) // 2)


def _is_cut_worse(run: Evidence) -> bool:
    assert run.ledger is not None
    cut, whole = run.ledger.answers.score_of_cut, run.ledger.answers.score_of_whole
    if cut is None or whole is None:
        return not (run.has_risen or run.is_solved)
    return cut < whole


def _causes(run: Evidence) -> list[Failures]:
    """Kinds of failures that are no after-effects, the most frequent first."""
    if run.ledger is not None:
        return [each for each in run.ledger.failures if each.kind not in AFTER_EFFECTS]
    counts = {name.removeprefix("failed/"): n for name, n in run.summary_counts.items() if "failed/" in name}
    found = [
        Failures(kind=kind, number=n, example=kind) for kind, n in counts.items() if n and kind not in AFTER_EFFECTS
    ]
    return sorted(found, key=lambda each: -each.number)


def _share_of(run: Evidence, kinds: tuple[str, ...] | list[str]) -> float:
    """Share of the attempts that failed for these reasons."""
    causes = _causes(run)
    attempts = run.count("episodes/scored") + sum(each.number for each in causes)
    return sum(each.number for each in causes if each.kind in kinds) / max(attempts, 1)


def _severity(run: Evidence, share: float) -> Severity:
    return Severity.STOPS if run.count("episodes/scored") == 0 else by_share(share, harms=MANY)


def _log_of(run: Evidence, worst: Failures) -> str:
    """What the agents' logs say, where agents ended with an error."""
    if not worst.kind.startswith("agent exited"):
        return ""
    error = most_frequent_error(run.folder / "agents")
    return "" if error is None else f" Their logs say most often: {error[2].splitlines()[-1].strip()} ({error[1]})."


def _remedy_of(run: Evidence, worst: Failures) -> str:
    agents = run.config.agents
    if worst.kind == "deadline":
        return (
            f"agents.deadline_s={2 * agents.deadline_s:g}, or agents.concurrency={_half(run)}, so that each is faster"
        )
    if worst.kind == "silent agent":
        return f"agents.silence_s={2 * (agents.silence_s or agents.deadline_s):g}"
    if worst.kind.startswith("agent exited"):
        return f"mend the agent: agents.command is started as in {run.folder / 'agents'}, whose logs have the error"
    if worst.kind.startswith("environment"):
        return f"mend the environment: its log is {run.folder / 'env.log'}"
    return f"look at one: `understudy ledger inspect {run.folder} --episode ID`"
