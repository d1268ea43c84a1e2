"""`diagnose(folder)`: what holds learning back in a run, the worst first.

Called by `learner.diagnosis.command_line` and by pages that show a run; needs neither torch nor vLLM. `RULES` is the table: a rule
is a function of the evidence. Invariant: there is at least one finding; where nothing is wrong it says so, with figures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from learner.diagnosis import episode_rules, freshness_rules, machine_rules, policy_rules, run_rules, score_rules
from learner.diagnosis.evidence import Evidence, read_evidence
from learner.diagnosis.finding import Finding, Severity

Rule = Callable[[Evidence], Finding | None]
RULES: tuple[Rule, ...] = (
    run_rules.ended_with_error,
    episode_rules.no_model_calls,
    episode_rules.nothing_scored,
    episode_rules.failing_episodes,
    episode_rules.lost_groups,
    episode_rules.late_scores,
    episode_rules.missing_judges,
    episode_rules.constrained_tokens,
    score_rules.constant_scores,
    episode_rules.cut_answers,
    episode_rules.aborted_answers,
    score_rules.equal_groups,
    score_rules.dropped_groups,
    score_rules.one_task,
    policy_rules.no_rate,
    policy_rules.nothing_updated,
    policy_rules.no_gradient,
    freshness_rules.drift,
    freshness_rules.masked_tokens,
    freshness_rules.stale_groups,
    freshness_rules.uncorrected_data,
    freshness_rules.capped_weights,
    run_rules.fallen_reward,
    run_rules.fallen_validation,
    policy_rules.large_updates,
    policy_rules.small_updates,
    policy_rules.entropy_gone,
    policy_rules.falling_entropy,
    policy_rules.blind_critic,
    policy_rules.far_from_reference,
    policy_rules.clipped_tokens,
    policy_rules.clipped_gradient,
    run_rules.training_tasks_only,
    machine_rules.idle_learner,
    machine_rules.idle_engine,
    machine_rules.preempted_generations,
    machine_rules.dying_parts,
    machine_rules.long_saving,
    machine_rules.long_publishing,
    run_rules.no_step,
    run_rules.few_steps,
)
"""Causes before their effects: of two findings that are equally bad the first is shown first."""
ORDER = tuple(Severity)


def diagnose(run_folder: Path) -> list[Finding]:
    """Raises UnderstudyError for a folder without a run, or one that cannot be read."""
    return findings(read_evidence(run_folder))


def findings(run: Evidence) -> list[Finding]:
    """What the rules say of this evidence."""
    found = [finding for rule in RULES if (finding := rule(run)) is not None]
    is_held = any(finding.severity in (Severity.STOPS, Severity.HARMS) for finding in found)
    if len(run.steps) >= run_rules.ENOUGH_STEPS and not is_held and not run.is_solved and not run.has_risen:
        found.append(run_rules.unexplained(run))
    if not found:
        found.append(run_rules.healthy(run))
    return sorted(found, key=lambda finding: ORDER.index(finding.severity))
