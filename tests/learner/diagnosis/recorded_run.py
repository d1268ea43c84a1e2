"""A run's folder as a run leaves it, without the run: its configuration, figures through the tracker, and a real ledger.

The figures of a step are those that a run of the demo wrote, some steps after its start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from buffers.ledger.ledger import Ledger
from configs.load import load_config
from learner.diagnosis.diagnose import findings
from learner.diagnosis.evidence import Evidence, Finding, read_evidence
from learner.reporting.tracker import Tracker
from tests.support.buffer_parts import make_round, make_task

HEALTHY = {
    "policy/max_logprob_diff": 2.9e-6, "policy/mean_logprob_diff": 1.8e-7, "policy/checked_share": 1.0, "policy/loss": -0.038,
    "policy/clipfrac": 0.024, "policy/approx_kl": 0.0025, "policy/is_weight_mean": 0.99, "policy/is_capped": 0.0,
    "policy/is_masked": 0.0, "critic/vf_loss": 0.14, "policy/is_weight_max": 1.44, "policy/ratio_max": 1.11,
    "policy/grad_norm": 0.5, "learner/updates": 2.0, "learner/skipped": 0.0, "learner/lr": 0.0003, "policy/entropy": 0.47,
    "critic/explained_variance": 0.3, "critic/value_mean": 0.4, "policy/too_old_share": 0.02, "policy/truncated_share": 0.0,
    "time/prepare_s": 0.5, "time/train_s": 1.3, "time/publish_s": 0.03, "time/wait_s": 0.4, "time/save_s": 0.0,
    "time/update_s": 1.4, "time/step_s": 1.8, "time/engine_idle_s": 0.1, "reward/mean": 0.4, "reward/min": 0.0,
    "reward/max": 1.0, "reward/std": 0.48, "staleness/mean": 0.8, "staleness/max": 1.0, "batch/episodes": 64.0,
    "batch/equal_groups": 0.375, "batch/rows": 64.0, "batch/tokens": 6944.0, "batch/trained_tokens": 724.0,
    "generation/aborted": 0.0, "generation/constrained_share": 0.0, "pool/slots": 96.0, "pool/running": 57.0,
    "pool/agents_waiting": 34.0, "pool/admissible_groups": 8.0, "engine/e0/preemptions": 0.0, "publish/changed_share": 1.0,
}  # fmt: skip
Figures = Mapping[str, float | None]


class RecordedRun:
    """One folder. Everything is written at once by `write`; `judge` says what a rule finds then."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        config = load_config(overrides=["run.name=recorded", "buffer.group_size=4", *overrides])
        (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(), sort_keys=False))

    def steps(self, *figures: Figures, number: int = 12, rises: bool = True) -> RecordedRun:
        """`number` healthy steps in which the reward rises from 0.2 to 0.8 (or stays at 0.4). `figures` takes the place of theirs:
        one for all steps, or one for each; None: there is no such figure."""
        each = figures * number if len(figures) == 1 else figures
        with Tracker(self.folder, trackers=()) as tracker:
            tracker.log(0, {"sft/last_loss": 0.1})
            for step in range(1, number + 1):
                reward = 0.2 + 0.6 * (step - 1) / max(number - 1, 1) if rises else 0.4
                own = {**HEALTHY, "reward/mean": reward, **(each[step - 1] if each else {})}
                tracker.log(step, {name: value for name, value in own.items() if value is not None})
        return self

    def validations(self, *means: float, tasks: int = 8) -> RecordedRun:
        with (self.folder / "metrics.jsonl").open("a") as lines:
            for number, mean in enumerate(means):
                line = {"step": number, "val/mean": mean, "val/step": number, "val/tasks": tasks}
                lines.write(json.dumps(line) + "\n")
        return self

    def machine(self, *, cards: int) -> RecordedRun:
        (self.folder / "machine.jsonl").write_text(
            json.dumps({"cards": 0}) + "\n" + json.dumps({"cards": cards}) + "\n{"
        )
        return self

    def summary(self, **values: Any) -> RecordedRun:
        (self.folder / "summary.json").write_text(json.dumps({"stopped": False, "error": None, **values}))
        return self

    def ledger(self, fill: Callable[[Ledger], object], *, drop_zero_variance: bool = False) -> RecordedRun:
        with Ledger(self.folder / "ledger.sqlite", drop_zero_variance=drop_zero_variance) as ledger:
            fill(ledger)
        return self

    def evidence(self) -> Evidence:
        return read_evidence(self.folder)

    def judge(self, rule: str) -> Finding | None:
        """What this rule finds; the run has no other findings that are worse."""
        return next((finding for finding in findings(self.evidence()) if finding.rule == rule), None)


def group(
    ledger: Ledger,
    scores: Sequence[float | str],
    *,
    task: int = 0,
    instance: int = 0,
    tokens: int = 3,
    finish_reason: str = "stop",
    max_attempts: int = 1,
    min_size: int | None = None,
) -> int:
    """A group of one task whose members end with these scores, or fail for these reasons; returns its id."""
    ledger.put_tasks([make_task(task)])
    episodes = ledger.open_group(f"t:{task}", instance=instance, group_size=len(scores), min_size=min_size).result()
    for episode, score in zip(episodes, scores, strict=True):
        ledger.start_episode(episode.episode_id, version=0)
        if isinstance(score, str):
            ledger.fail_episode(episode.episode_id, score, max_attempts=max_attempts).exception()
            continue
        sampled = range(1, tokens + 1)
        ledger.put_round(make_round(episode.episode_id, sampled=list(sampled), finish_reason=finish_reason))
        ledger.notify_score(episode.episode_id, score).exception()
    return episodes[0].group_id


def groups(*all_scores: Sequence[float | str], **options: Any) -> Callable[[Ledger], object]:
    """Fills a ledger with a group of its own task for each of these."""

    def fill(ledger: Ledger) -> None:
        for number, scores in enumerate(all_scores):
            group(ledger, scores, task=number, **options)

    return fill
