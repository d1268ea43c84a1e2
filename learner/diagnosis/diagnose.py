"""`diagnose(folder)`: what holds learning back in a run, the worst first.

Called by `learner.diagnosis.diagnose` and by pages that show a run; needs neither torch nor vLLM. Invariant: there is at
least one finding; where nothing is wrong it says so, with figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from buffers.disk import replacing
from buffers.errors import UnderstudyError
from learner.diagnosis import data_rules, live_rules, policy_rules, time_rules
from learner.diagnosis.evidence import Evidence, Finding, Rule, Severity, read_evidence

RULES = tuple(
    rule
    for part in (data_rules, live_rules, policy_rules, time_rules)
    for rule in vars(part).values()
    if isinstance(rule, Rule)
)
"""Causes before their effects: of two findings that are equally bad the first is shown first."""
ORDER = tuple(Severity)
OF_TASKS = frozenset(
    (
        "nothing_scored",
        "late_scores",
        "constant_scores",
        "no_model_calls",
        "one_task",
        "equal_groups",
        "idle_learner",
        "idle_engine",
    )
)
"""Rules about agents that a run starts, tasks that it draws and scorers of its own: `understudy serve` has none of them, and waits
for its users."""


def diagnose(run_folder: Path) -> list[Finding]:
    """Raises UnderstudyError for a folder without a run, or one that cannot be read."""
    return findings(read_evidence(run_folder))


def findings(run: Evidence) -> list[Finding]:
    """What the rules say of this evidence."""
    rules = RULES if not run.config.serve.enabled else [rule for rule in RULES if rule.name not in OF_TASKS]
    found = [finding for rule in rules if (finding := rule(run)) is not None]
    is_held = any(finding.severity in (Severity.STOPS, Severity.HARMS) for finding in found)
    if len(run.steps) >= time_rules.TELLING_STEPS and not is_held and not run.is_solved and not run.has_risen:
        found.append(time_rules.unexplained(run))
    if not found:
        found.append(time_rules.healthy(run))
    return sorted(found, key=lambda finding: ORDER.index(finding.severity))


# `understudy why runs/NAME`: prints what holds learning back in a run, or in several, the worst first. It changes nothing of
# the runs, which may be under way, finished or killed.

HEADINGS = {
    Severity.STOPS: "stops learning",
    Severity.HARMS: "harms",
    Severity.SLOWS: "costs time or data",
    Severity.NOTE: "note",
}


def main(argv: Sequence[str] | None = None, *, program: str = "understudy why") -> int:
    """Exit codes: 0 printed, 2 a folder holds no run."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Say what holds learning back in a run, the worst first, with figure and remedy. It only reads the folder.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs: live, finished or killed")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the findings to this file too")
    arguments = parser.parse_args(argv)
    try:
        diagnoses = [(run, findings(run)) for run in map(read_evidence, arguments.runs)]
        if arguments.json is not None:
            _write(arguments.json, [as_json(*each) for each in diagnoses])
    except UnderstudyError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    print("\n\n".join(in_words(*each) for each in diagnoses))
    return 0


def in_words(run: Evidence, found: Sequence[Finding]) -> str:
    """Several lines: the run, then each finding with its remedy."""
    lines = [f"{run.folder}: {course(run)}"]
    for number, finding in enumerate(found, 1):
        lines.append(f"{number}. {HEADINGS[finding.severity]} [{finding.rule}]: {finding.sentence}")
        if finding.remedy:
            lines.append(f"   remedy: {finding.remedy}")
    return "\n".join(lines)


def course(run: Evidence) -> str:
    """What the run is doing, and where its reward went."""
    state = _state(run)
    if not run.steps:
        return f"{state}, no step made"
    best = run.config.run.reward_optimum
    return (
        f"{state}, {len(run.steps)} of {run.config.run.steps} steps, reward {run.first_reward:.3f} in the first ones, "
        f"{run.last_reward:.3f} in the last ones" + (f", at best {best:g}" if best is not None else "")
    )


def _state(run: Evidence) -> str:
    if run.ledger.is_alive:
        return "under way"
    if not run.summary:
        return "killed" if run.ledger.is_here else "killed, or on another node"
    if run.summary.get("error"):
        return "ended with an error"
    return "stopped" if run.summary.get("stopped") else "finished"


def as_json(run: Evidence, found: Sequence[Finding]) -> dict[str, Any]:
    """What `--json` writes of one run."""
    return {
        "run": str(run.folder),
        "state": _state(run),
        "steps": len(run.steps),
        "findings": [asdict(finding) for finding in found],
    }


def _write(path: Path, found: list[dict[str, Any]]) -> None:
    try:
        with replacing(path) as scratch:
            scratch.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UnderstudyError(f"--json must be a file that can be written, got {path} ({error})") from error
