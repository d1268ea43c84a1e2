"""Plays episodes as trials of Harbor's: a fresh `harbor` program for each, at most so many at once.

Started by the pipeline with `env.harbor.agent`. The program gets the server's address and the episode's key in its environment,
as agents do, and the rest as a file that `harbor trial start --config` reads; the task's own verifier gives the score. Invariants:
each leased episode ends once, with the verifier's score or with Harbor's reason; one that has ended otherwise (deadline, stale)
ends its trial: interrupted, so that Harbor can stop its environment, and killed if it does not. No key is in a file. A result has a
score only where Harbor itself calls the reward valid and no error came before it, but for `graded_errors`. A trial's files lie in
its lane until the next one; those of failed ones stay, the newest `KEPT`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agents.external import AgentPlace, EpisodeService, exit_code, play_in_lanes
from agents.harbor.start_check import OUTSIDE, model_name
from agents.harbor.tasks import FOLDER
from buffers.errors import EpisodeError, ScoreError
from buffers.records import LeasedEpisode
from configs.schema import HarborConfig
from env_adapters.child_process import Child, resolve_command

logger = logging.getLogger(__name__)

PROVIDER = Path(__file__).with_name("provider")
CHILD = "understudy_harbor:ChildEnvironment"
RESULT = "result.json"
DETAIL_CHARS = 400
KEPT = 20
STOP_S = 30.0
"""Seconds that Harbor has to stop an environment after it was interrupted."""
INTERRUPTIBLE = (
    sys.executable,
    "-ISc",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
)
"""The words before a command that can be interrupted also in a run that a script has put into the background (SIGINT is ignored
there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A score, or why there is none."""

    score: float | None = None
    reason: str = ""
    """`harbor <error>: <its message>`."""


class HarborTrials:
    """`concurrency` lanes, each of which plays one episode after the other."""

    def __init__(self, harbor: HarborConfig, *, place: AgentPlace, service: EpisodeService, concurrency: int) -> None:
        self._harbor = harbor
        self._command = resolve_command(harbor.command)
        self._place = place
        self._service = service
        self._concurrency = concurrency
        self._failed: list[Path] = []

    async def run(self) -> None:
        """Runs until the tasks have ended. Cancelling interrupts the trials."""
        place = self._place.folder.resolve()
        await play_in_lanes(self._service, place=place, concurrency=self._concurrency, play=self._play)

    async def _play(self, leased: LeasedEpisode, folder: Path) -> None:
        task = leased.task["extra_info"].get(FOLDER)
        if not isinstance(task, str) or not (Path(task) / "task.toml").is_file():
            await self._service.fail(
                leased.episode_id, f"harbor has no such task: extra_info.{FOLDER} must be its folder, got {task!r}"
            )
            return
        environment = self._place.program_environment(leased.api_key)
        root = environment["ANTHROPIC_BASE_URL"]
        trial = trial_config(
            self._harbor,
            task=task,
            name=leased.episode_id,
            folder=folder,
            model=environment["MODEL"],
            server=self._harbor.server_url or root,
        )
        folder.mkdir(parents=True, exist_ok=True)
        settings, log = folder / "trial.json", folder / "log.txt"
        settings.write_text(json.dumps(trial), encoding="utf-8")
        log.unlink(missing_ok=True)
        child = await Child.start(
            [*INTERRUPTIBLE, *self._command, "trial", "start", "--config", str(settings)],
            env=trial_environment(environment, root=root, server_url=self._harbor.server_url),
            cwd=folder,
            log=log,
        )
        # As Ctrl-C does: Harbor stops its environment and ends.
        interrupt = partial(child.stop, signal.SIGINT, grace_s=STOP_S)
        try:
            code = await exit_code(child, self._service, leased.episode_id, end=interrupt)
        finally:
            await interrupt()
        place = folder / leased.episode_id
        outcome = read_outcome(
            place,
            exit_code=code,
            log_tail=child.log_tail(),
            reward=self._harbor.reward,
            graded_errors=self._harbor.graded_errors,
        )
        failed = await self._end(leased, outcome)
        await asyncio.to_thread(self._tidy, place, log=log, keep=failed)

    async def _end(self, leased: LeasedEpisode, outcome: Outcome) -> bool:
        """True if it failed. One that was ended by others stays as it is."""
        if outcome.score is None:
            logger.info("episode=%s %s", leased.episode_id, outcome.reason)
            await self._service.fail(leased.episode_id, outcome.reason)
            return True
        try:
            await self._service.notify_score(leased.episode_id, outcome.score, wait_for_disk=True)
        except EpisodeError:
            return True  # past its deadline, or no model call of it was recorded, for which it has failed by now
        except ScoreError as error:
            await self._service.fail(leased.episode_id, f"harbor gave a score that cannot be used: {error}")
            return True
        return False

    def _tidy(self, trial: Path, *, log: Path, keep: bool) -> None:
        if not trial.is_dir():
            return
        if not keep:
            shutil.rmtree(trial, ignore_errors=True)
            return
        to = self._place.folder / "failed" / trial.name
        with suppress(OSError):  # what a container wrote may be another user's; the disk may be full
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(log, trial / "log.txt")
            os.replace(trial, to)
            self._failed.append(to)
        while len(self._failed) > KEPT:
            shutil.rmtree(self._failed.pop(0), ignore_errors=True)


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
    """Outcome of the trial in `folder`, whose program ended with `exit_code`."""
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        error, verdict = result["exception_info"] or {}, result["verifier_result"] or {}
        kind, rewards = error.get("exception_type"), verdict.get("rewards") or {}
        score = rewards.get(reward)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        last = (log_tail.splitlines() or ["it printed nothing"])[-1]
        return Outcome(reason=f"harbor ended without a result: exit code {exit_code}, {last[-DETAIL_CHARS:]}")
    if error and kind not in graded_errors:
        return Outcome(reason=_told(error))
    if isinstance(score, int | float) and math.isfinite(score) and result.get("reward_valid", True):
        return Outcome(score=float(score))
    if error:
        return Outcome(reason=_told(error))
    return Outcome(reason=f"harbor gave no reward of that name: env.harbor.reward={reward}, got {sorted(rewards)}")


def _told(error: dict[str, Any]) -> str:
    message = " ".join(str(error.get("exception_message", "")).split())
    return f"harbor {error.get('exception_type')}: {message[:DETAIL_CHARS]}"
