"""Plays episodes as trials of Harbor's: a fresh `harbor` program for each, at most so many at once.

Started by the pipeline with `env.harbor.agent`. The program gets the server's address and the episode's key in its environment,
as agents do; the task's own verifier gives the score. Invariants: each leased episode ends once, with the verifier's score or
with Harbor's reason; one that has ended otherwise (deadline, stale) ends its trial: interrupted, so that Harbor can stop its
environment, and killed if it does not. A trial's files lie in its lane until the next one; those of failed ones stay, the
newest `KEPT`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

from agents.external import AgentPlace, EpisodeService, play_in_lanes
from agents.harbor.tasks import FOLDER
from agents.harbor.trial import Outcome, read_outcome, trial_config, trial_environment
from buffers.errors import EpisodeError, ScoreError
from buffers.records import LeasedEpisode
from configs.schema import HarborConfig
from env_adapters.child_process import Child, resolve_command

logger = logging.getLogger(__name__)

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
        try:
            code = await self._exit_code(child, leased.episode_id)
        finally:
            await interrupt(child)
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

    async def _exit_code(self, child: Child, episode_id: str) -> int:
        """How the program ended; one whose episode has ended meanwhile is interrupted."""
        exited = asyncio.create_task(child.wait())
        ended = asyncio.create_task(self._service.wait_ended(episode_id))
        try:
            await asyncio.wait({exited, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not exited.done():
            await interrupt(child)
        return await exited

    async def _end(self, leased: LeasedEpisode, outcome: Outcome) -> bool:
        """Whether it failed. One that was ended by others stays as it is."""
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


async def interrupt(child: Child) -> None:
    """Does what Ctrl-C does: Harbor stops its environment and ends. After `STOP_S` all is killed."""
    try:
        if child.running:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGINT)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await child.wait()
    finally:
        await child.stop()
