"""One trial of Harbor's: its configuration, as `harbor trial start --config` reads it, and what its result says.

Used by `agents.harbor.trials`. Invariants: no key is in the configuration or in a file, Harbor takes it from its process's
environment; a result has a score only where Harbor itself calls the reward valid and no error came before it, but for
`graded_errors`.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agents.harbor.known_agents import OUTSIDE, model_name
from configs.schema import HarborConfig

PROVIDER = Path(__file__).with_name("provider")
CHILD = "understudy_harbor:ChildEnvironment"
RESULT = "result.json"
DETAIL_CHARS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A score, or why there is none."""

    score: float | None = None
    reason: str = ""
    """`harbor <error>: <its message>`."""


def trial_config(
    harbor: HarborConfig, *, task: str, name: str, folder: Path, model: str, server: str
) -> dict[str, Any]:
    """`task`: the task's folder; `folder` gets a folder `name` with all that the trial writes; `server`: its root, as agents reach
    it, which a task that limits the network lets an agent inside reach beside what it allows."""
    agent: dict[str, Any] = {"import_path" if ":" in harbor.agent else "name": harbor.agent}
    if harbor.agent not in OUTSIDE:
        agent["extra_allowed_hosts"] = [urlsplit(server).hostname]
    kind = CHILD if harbor.environment == "child" else harbor.environment
    environment = {"import_path" if ":" in kind else "type": kind}
    return {
        **harbor.trial,
        "task": {"path": task},
        "trial_name": name,
        "trials_dir": os.fspath(folder),
        "agent": {**agent, "model_name": model_name(harbor.agent, model), "kwargs": harbor.agent_options},
        "environment": {**environment, "kwargs": harbor.environment_options},
    }


def trial_environment(environment: dict[str, str], *, root: str, server_url: str) -> dict[str, str]:
    """The variables of Harbor's process. `root`: the server's address here; `server_url`: as agents reach it, if
    that is another."""
    if server_url:
        environment = {
            name: server_url + value.removeprefix(root) if value == root or value.startswith(f"{root}/") else value
            for name, value in environment.items()
        }
    paths = [os.fspath(PROVIDER), environment.get("PYTHONPATH", "")]
    kept = {"HARBOR_TELEMETRY": os.environ["HARBOR_TELEMETRY"]} if "HARBOR_TELEMETRY" in os.environ else {}
    # LiteLLM would ask the internet for the prices of models, at each start.
    return {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        **kept,
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def read_outcome(folder: Path, *, exit_code: int, log_tail: str, reward: str, graded_errors: list[str]) -> Outcome:
    """What became of the trial in `folder`, whose program ended with `exit_code`."""
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        error, verdict = result["exception_info"], result["verifier_result"]
    except (OSError, ValueError, KeyError, TypeError):
        last = (log_tail.splitlines() or ["it printed nothing"])[-1]
        return Outcome(reason=f"harbor ended without a result: exit code {exit_code}, {last[-DETAIL_CHARS:]}")
    if error and error["exception_type"] not in graded_errors:
        return Outcome(reason=_told(error))
    rewards = (verdict or {}).get("rewards") or {}
    score = rewards.get(reward)
    if isinstance(score, int | float) and math.isfinite(score) and result.get("reward_valid", True):
        return Outcome(score=float(score))
    if error:
        return Outcome(reason=_told(error))
    return Outcome(reason=f"harbor gave no reward of that name: env.harbor.reward={reward}, got {sorted(rewards)}")


def _told(error: dict[str, Any]) -> str:
    message = " ".join(str(error.get("exception_message", "")).split())
    return f"harbor {error['exception_type']}: {message[:DETAIL_CHARS]}"
