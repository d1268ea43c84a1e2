"""`diagnose(folder)`: what holds learning back in a run, the worst first.

Called by `learner.diagnosis.command_line` and by pages that show a run; needs neither torch nor vLLM. Invariant: there is at
least one finding; where nothing is wrong it says so, with figures.
"""

from __future__ import annotations

from pathlib import Path

from learner.diagnosis import data_rules, policy_rules, time_rules
from learner.diagnosis.evidence import Evidence, read_evidence
from learner.diagnosis.finding import Finding, Rule, Severity

RULES = tuple(
    rule for part in (data_rules, policy_rules, time_rules) for rule in vars(part).values() if isinstance(rule, Rule)
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
    if len(run.steps) >= time_rules.TELLING_STEPS and not is_held and not run.is_solved and not run.has_risen:
        found.append(time_rules.unexplained(run))
    if not found:
        found.append(time_rules.healthy(run))
    return sorted(found, key=lambda finding: ORDER.index(finding.severity))
