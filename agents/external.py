"""Runs agents of others: child programs with our base URL in their environment.

Called by the pipeline. Two ways, by `agents.processes`: long-lived programs that lease tasks themselves (`TASKS_URL`),
or a fresh process for each episode (its task in `TASK_JSON` and on its standard input, its key in `OPENAI_API_KEY`). Each
runs in a folder of its own without the checkout on its import path: the folder name `agents` is also the import name of
the OpenAI Agents SDK.

A program of one episode that ends without a score having been reported is scored by `data.scorer`, on what it
printed and its exit code, where there is one. A program that crashes is data: its episodes fail with a reason, it is started
again, and the run continues. One that keeps crashing without finishing an episode ends the run with its log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agents.warm_python import WarmPython
from buffers.disk import until_taken, until_written
from buffers.errors import AgentError, EpisodeClosed, EpisodeError, ScoreError
from buffers.records import LeasedEpisode, Task, scored_episode
from buffers.tasks.task_pool import PoolClosed
from configs.child_processes import clean_environment
from env_adapters.child_process import STOP_GRACE_S, Child, Starts, resolve_command
from env_adapters.scoring.scorers import ProgramOutput

if TYPE_CHECKING:
    from env_adapters.scoring.rewards import Rewards

logger = logging.getLogger(__name__)

MAX_CRASHES = 5
"""Ends of a long-lived program in a row, with no episode finished in between, that end the run."""
ASK_AGAIN = (
    "such a program asks TASKS_URL for one task after the other until it answers 410: agents.processes=0 starts a fresh "
    "program for each episode; "
)
LEASE_WAIT_S = 3600.0
LARGE_TASK_BYTES = 100_000
"""A larger task is not in the environment, where a variable holds at most 128 KiB on Linux."""
OUTPUT_BYTES = 65_536
"""Bytes of the end of a program's standard output that are judged; all of it is in the log."""
OUTPUT_WAIT_S = 5.0
"""Seconds after a program has ended: a process that it left behind may hold its output open."""


class EpisodeService(Protocol):
    """The server as agents use it, in Python (the HTTP routes are the same)."""

    async def lease_episode(self, *, wait_s: float) -> LeasedEpisode | None:
        """The next episode, None when there is none yet. Raises PoolClosed when there are no more."""
        ...

    async def fail(self, episode_id: str, reason: str) -> None:
        """The episode ended without a score."""
        ...

    async def fail_all(self, reason: str, *, worker: str | None = None) -> None:
        """The episodes that this worker leased with its key ended without a score."""
        ...

    async def notify_score(self, episode_id: str, score: float, *, wait_for_disk: bool = False) -> object:
        """Store a score; `wait_for_disk`: a full disk is waited for. Raises EpisodeError when the episode takes none any more."""
        ...

    def episode_view(self, episode_key: str) -> dict[str, Any]:
        """`task`: the running episode's, with its ground truth. Raises EpisodeError when it has ended."""
        ...

    async def wait_ended(self, episode_id: str) -> None:
        """Wait until the episode has ended, in any way."""
        ...

    @property
    def num_scored(self) -> int:
        """Episodes scored so far."""
        ...

    @property
    def has_ended(self) -> bool:
        """No more tasks will be given out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """An agent's surroundings: its model's address and key, and its folder."""

    environment: Callable[[str], dict[str, str]]
    """API key -> the variables that its clients read (the server's)."""
    worker_key: Callable[[str], str]
    """A long-lived program's name -> its key; what it has leased ends with it."""
    folder: Path
    named: tuple[str, ...] = ()
    """Variables of this process's environment that agents get beside those that all programs need. Raises AgentError when one is
    not set."""

    def __post_init__(self) -> None:
        check_named(self.named)

    def program_environment(self, api_key: str) -> dict[str, str]:
        """All variables of a program with this key."""
        return clean_environment(self.environment(api_key), named=self.named)


def check_named(names: Sequence[str]) -> None:
    """Raises AgentError when one of these variables is not set here."""
    if missing := [name for name in names if name not in os.environ]:
        raise AgentError(
            f"agents.environment must name variables that are set, got {missing[0]}; set it where you start the run, or "
            f"leave it out"
        )


def check_command(command: Sequence[str], *, preload: Sequence[str] = ()) -> list[str]:
    """The resolved agent command; raises AgentError when its program is not found, or no Python for `preload`."""
    try:
        words = resolve_command(command)
    except FileNotFoundError as error:
        raise AgentError(f"agents.command cannot be started: {error}") from None
    if preload and not (len(words) > 1 and os.path.isfile(words[1])):
        raise AgentError(
            f"agents.preload={list(preload)} needs an agents.command of an interpreter and a file, such as ['{{python}}', a.py], "
            f"got {list(command)}; leave agents.preload out"
        )
    return words


async def play_in_lanes(
    service: EpisodeService, *, place: Path, concurrency: int, play: Callable[[LeasedEpisode, Path], Awaitable[None]]
) -> None:
    """Plays one episode after the other in each of `concurrency` lanes, with a folder of its own in `place`, until the tasks have
    ended. `play` is called again where the disk did not take what it writes before its program starts."""

    async def lane(index: int) -> None:
        with suppress(PoolClosed):
            while True:
                leased = await service.lease_episode(wait_s=LEASE_WAIT_S)
                if leased is not None:
                    folder = place / f"lane-{index}"
                    await until_written(
                        partial(play, leased, folder), what=str(folder), folder=place.parent, say=logger.warning
                    )

    async with asyncio.TaskGroup() as tasks:
        for index in range(concurrency):
            tasks.create_task(lane(index), name=f"agent lane {index}")


async def exit_code(
    child: Child, service: EpisodeService, episode_id: str, *, end: Callable[[], Awaitable[None]]
) -> int:
    """Exit code of the program; one that still runs after its episode (scored, deadline, stale) is ended by `end`."""
    exited = asyncio.create_task(child.wait())
    ended = asyncio.create_task(service.wait_ended(episode_id))
    try:
        await asyncio.wait({exited, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
    if not exited.done():
        await end()
    return await exited


@dataclass(slots=True, eq=False)
class LongLivedAgents:
    """`processes` programs that lease tasks until there are none. One that ends before, with any exit code, is started again;
    one that does so again and again without a score in between ends the run."""

    command: Sequence[str]
    _: KW_ONLY
    place: AgentPlace
    service: EpisodeService
    processes: int
    concurrency: int
    crashes: int = 0

    def __post_init__(self) -> None:
        self.command = check_command(self.command)

    async def run(self) -> None:
        """Runs until there are no more tasks and every program has ended. Cancelling stops the programs."""
        async with asyncio.TaskGroup() as tasks:
            for index in range(self.processes):
                tasks.create_task(self._keep_running(index), name=f"agent {index}")

    async def _keep_running(self, index: int) -> None:
        folder = self.place.folder / f"agent-{index}"
        share = max(1, self.concurrency // self.processes)
        name = f"agent-{index}"
        env = self.place.program_environment(self.place.worker_key(name)) | {"CONCURRENCY": str(share)}
        in_a_row, scored = 0, self.service.num_scored
        while True:
            if await until_taken(folder, what=f"the log of {name}", say=logger.warning):
                in_a_row = 0
            child = await Child.start(self.command, env=env, cwd=folder, log=folder / "log.txt")
            try:
                code = await child.wait()
            finally:
                await child.stop()
            if code == 0 and self.service.has_ended:
                return
            self.crashes += 1
            await self.service.fail_all(f"agent exited with code {code}", worker=name)
            in_a_row = in_a_row + 1 if self.service.num_scored == scored else 1
            scored = self.service.num_scored
            logger.warning("agent %d ended with code %d; its log: %s", index, code, child.log)
            if in_a_row >= MAX_CRASHES:
                raise AgentError(
                    f"agents.command ended {in_a_row} times in a row without finishing an episode (exit code {code}); "
                    f"{ASK_AGAIN if code == 0 else ''}its log {child.log} ends:\n{child.log_tail()}"
                )


@dataclass(slots=True, eq=False)
class AgentPerEpisode:
    """A fresh process for each episode, at most `concurrency` at once. Without a score, and without a `judge` who gives one
    (`data.scorer`), exit code 0 is a failure too. `preload`: modules that a process has imported when it starts."""

    command: Sequence[str]
    _: KW_ONLY
    place: AgentPlace
    service: EpisodeService
    concurrency: int
    judge: Rewards | None = None
    preload: Sequence[str] = ()
    crashes: int = 0
    _starts: Starts = asyncio.create_subprocess_exec

    def __post_init__(self) -> None:
        self.command = check_command(self.command, preload=self.preload)

    async def run(self) -> None:
        """Runs until the tasks have ended. Cancelling stops the programs. Raises AgentError where `preload` cannot be imported."""
        play = partial(
            play_in_lanes, self.service, place=self.place.folder, concurrency=self.concurrency, play=self._play
        )
        if not self.preload:
            return await play()
        env, folder = self.place.program_environment(""), self.place.folder / "preload"
        async with aclosing(WarmPython(self.command, modules=self.preload, env=env, folder=folder)) as warm:
            self._starts = warm.fork
            await play()

    async def _play(self, leased: LeasedEpisode, folder: Path) -> None:
        env, task_file = self._given(leased, folder)
        child = await Child.start(
            self.command,
            env=env,
            cwd=folder,
            log=folder / "log.txt",
            stdin=task_file,
            pipe_stdout=self.judge is not None,
            starts=self._starts,
        )
        printing = asyncio.create_task(self._printed(child), name=f"output of {leased.episode_id}")
        try:
            code = await exit_code(child, self.service, leased.episode_id, end=partial(_end_soon, child))
            await child.stop()  # what it left behind would hold its output open
            await asyncio.wait({printing}, timeout=OUTPUT_WAIT_S)
        finally:
            printing.cancel()
            child.close()
            await child.stop()
        if code != 0:
            self.crashes += 1
        printed = printing.result() if printing.done() and not printing.cancelled() else b""
        await self._end(leased, ProgramOutput(printed.decode(errors="replace"), exit_code=code))

    def _given(self, leased: LeasedEpisode, folder: Path) -> tuple[dict[str, str], Path]:
        """The program's environment, and the file with its task, which is its standard input."""
        task = json.dumps(leased.task)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "task.json"
        path.write_text(task)
        env = self.place.program_environment(leased.api_key)
        env |= {"EPISODE_ID": leased.episode_id, "SEED": str(leased.seed)}
        if len(task.encode()) < LARGE_TASK_BYTES:
            env["TASK_JSON"] = task
        else:
            env["TASK_FILE"] = os.fspath(path.resolve())
        return env, path

    async def _printed(self, child: Child) -> bytes:
        return b"" if self.judge is None else await child.output(most=OUTPUT_BYTES)

    async def _end(self, leased: LeasedEpisode, output: ProgramOutput) -> None:
        """Judge an episode that still runs. One that was scored, or is past its deadline, stays as it is."""
        reason = f"agent exited with code {output.exit_code} before a score was reported"
        try:
            task = Task(**self.service.episode_view(leased.api_key)["task"])
            if self.judge is not None and self.judge.judges(task, exit_code=output.exit_code):
                score = await self._judged(leased, task, output)
                await self.service.notify_score(leased.episode_id, score, wait_for_disk=True)
                return
        except EpisodeError:
            return  # it ended meanwhile; or no model call of it was recorded, for which it has failed by now
        except ScoreError as error:
            logger.warning("episode=%s was not scored: %s", leased.episode_id, error)
            reason = f"scorer: {error}"
        await self.service.fail(leased.episode_id, reason)

    async def _judged(self, leased: LeasedEpisode, task: Task, output: ProgramOutput) -> float:
        """The score. Raises ScoreError; EpisodeClosed when the episode ended meanwhile: a judge may wait for its group's others."""
        assert self.judge is not None
        scored_episode.set(leased)
        scoring = asyncio.create_task(self.judge.score(task, output))
        ended = asyncio.create_task(self.service.wait_ended(leased.episode_id))
        try:
            await asyncio.wait({scoring, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not scoring.done():
                raise EpisodeClosed(f"episode {leased.episode_id} ended before it was judged")
            return scoring.result()
        finally:
            ended.cancel()
            scoring.cancel()


async def _end_soon(child: Child) -> None:
    """Let it end by itself for a moment, then end it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_GRACE_S):
            await child.wait()
    await child.stop()
