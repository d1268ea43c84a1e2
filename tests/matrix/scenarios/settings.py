"""What most runs of the matrix share: small batches, short answers, a scorer that random texts please half of the time."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "run.steps": 2,
    "agents.concurrency": 16,
    "rollout.max_tokens": 8,
    "rollout.max_model_len": 256,
    "rollout.kv_cache_gb": 0.03,
    "buffer.groups_per_step": 2,
    "buffer.group_size": 4,
    "run.trackers": [],
}
PROMPTS: dict[str, Any] = {
    **SMALL,
    "data.tasks": "{files}/tasks.parquet",
    "data.scorer": "tests.support.scoring.early_letters",
    "learner.advantage": "grpo",
    "learner.critic": "none",
}
"""Plain prompts, which the run answers itself."""
