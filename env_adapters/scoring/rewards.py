"""Scores of plain prompts, agent loops and programs: which scorer judges a task, in a thread or over HTTP, one answer at a
time or many.

Built by `learner.players` from `data.scorer` and `data.reward_manager`; callers with an answer await `score`.
Invariants: only scorers that the configuration names are called; the event loop never waits for one, and other work does not when
one hangs: they have `THREADS` threads of their own, and a hanging one keeps its thread; a scorer that fails, with any exception,
fails its own episodes (ScoreError), and a number that is none is refused by the ledger. It does not look at lengths or
groups: that is done where batches are made.

A score is a number; or a mapping with verl's `score`, or with a score by the name of each judge (their mean counts, `gdpo` takes
them apart); a mapping may have a `hint`, what the policy should have been told, which `learner.hints` learns from.

A remote scorer gets `POST url {"items": [{"task": {...}, "answer": "..."}]}` and answers `{"scores": [0.5]}`. The task has
its ground truth. Of a program the answer is what it printed, at most its last 64 KiB, and an item has its `exit_code` too.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import httpx2

from buffers.did_you_mean import one_of
from buffers.errors import ScoreError, TaskError
from buffers.outgoing import SCORER, Outgoing
from buffers.records import MAX_HINT_CHARS, MAX_JUDGE_CHARS, Task, Verdict
from buffers.tasks import reasoning_gym_tasks
from env_adapters.guarded_calls import CaughtException, Threads
from env_adapters.scoring import reward_model
from env_adapters.scoring.judge import NAME as JUDGE
from env_adapters.scoring.judge import Judge
from env_adapters.scoring.scorers import COMPARE, SCORERS, SEE_EXIT_CODE, ProgramOutput, truth_of

DEFAULT = "default"
"""The key of `data.scorer` for all other data sources."""
MAX_BATCH = 256
THREADS = 32
"""Calls of one scorer at once."""
TRIES = 3
PAUSE_S = 0.5
"""Seconds before the second try of a remote scorer; doubled before each further one."""

Batch = Callable[[Sequence[Task], Sequence[str]], list[float]]
"""Scores of some tasks' answers; blocks."""


class Rewards:
    """`scorer`: one for all tasks, or data source -> scorer, with `default` for the others. `batch`: functions take lists. `judge`:
    the scorer of that name."""

    def __init__(self, scorer: str | Mapping[str, str], *, batch: bool = False, judge: Judge | None = None) -> None:
        named = {DEFAULT: scorer} if isinstance(scorer, str) else dict(scorer)
        by_name: dict[str, _Collector | Judge] = {  # a reward model is loaded once
            name: judge if judge is not None and name == judge.name else _Collector(name, batch=batch)
            for name in set(named.values())
        }
        self._collectors = {source: by_name[name] for source, name in named.items()}

    def judges(self, task: Task, *, exit_code: int) -> bool:
        """True if a program that played this task and ended so is judged here."""
        collector = self._of(task)
        return collector is not None and (exit_code == 0 or collector.sees_exit_code)

    def check(self, task: Task) -> None:
        """Raises TaskError for a task that its scorer cannot judge, whatever the answer."""
        collector = self._of(task)
        if collector is not None and collector.name == "reasoning_gym" and {"settings", "index"} - set(task.extra_info):
            raise TaskError(
                f"data.scorer=reasoning_gym judges tasks of reasoning_gym://, got one of {task.data_source!r}; name another "
                f"scorer for it: data.scorer={{default: ...}}"
            )
        if collector is not None and collector.name in COMPARE:
            try:
                truth_of(task)
            except ValueError as error:
                raise TaskError(
                    f"data.scorer={collector.name} compares answers with reward_model.ground_truth: {error}; add that column, or "
                    f"name another scorer"
                ) from None

    async def score(self, task: Task, answer: str) -> float:
        """The score; raises ScoreError when there is none."""
        collector = self._of(task)
        if collector is None:
            raise ScoreError(
                f"data.scorer must cover data_source {task.data_source!r} of task {task.task_id}, got "
                f"{sorted(self._collectors)}; add it, or {DEFAULT!r}"
            )
        return await collector.score(task, answer)

    def _of(self, task: Task) -> _Collector | Judge | None:
        return self._collectors.get(task.data_source) or self._collectors.get(DEFAULT)


class _Collector:
    """One scorer. With `batch` it gets all answers that have piled up while it judged the last ones."""

    def __init__(self, name: str, *, batch: bool) -> None:
        batch = batch or name.startswith(reward_model.PREFIX)
        self.name = name
        self.sees_exit_code = name in SEE_EXIT_CODE or _is_url(name)
        self._call = resolve(name, batch=batch)
        self._most = MAX_BATCH if batch else 1
        self._batch = batch
        self._threads = Threads(THREADS, name=f"scorer {name}")
        self._waiting: list[tuple[Task, str, asyncio.Future[float]]] = []
        self._working: asyncio.Task[None] | None = None

    async def score(self, task: Task, answer: str) -> float:
        if not self._batch:
            return (await self._judge([task], [answer]))[0]
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((task, answer, future))
        if self._working is None:
            self._working = asyncio.create_task(self._work(), name=f"score with {self.name}")
        working = self._working
        either: list[asyncio.Future[Any]] = [future, working]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                working.result()  # raises: a bug in the scorer, which ends all who wait
            return future.result()
        finally:
            future.cancel()  # given up, unless it is done

    async def _work(self) -> None:
        while self._waiting:
            some, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            tasks, answers, futures = zip(*some, strict=True)
            try:
                scores = await self._judge(tasks, answers)
            except ScoreError as error:
                for future in futures:
                    if not future.done():  # else its request was given up
                        future.set_exception(error)
            else:
                for future, score in zip(futures, scores, strict=True):
                    if not future.done():
                        future.set_result(score)
        self._working = None

    async def _judge(self, tasks: Sequence[Task], answers: Sequence[str]) -> list[float]:
        scores: object = None
        with CaughtException() as caught:  # a user's program, and an answer that a model wrote
            scores = await self._threads.run(partial(self._call, tasks, answers))
        if (error := caught.error) is not None:
            raise ScoreError(
                f"data.scorer {self.name} failed on task {tasks[0].task_id}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(scores, list) or len(scores) != len(tasks):
            raise ScoreError(
                f"data.scorer {self.name} must give one score for each of {len(tasks)}, got {scores!r:.100}"
            )
        return [self._verdict(score) if isinstance(score, Mapping) else score for score in scores]

    def _verdict(self, said: Mapping[Any, Any]) -> Verdict:
        """Verdict of a scorer that gives a mapping: verl's `score`, or a score by the name of each judge; and a `hint`."""
        judges = {"": said["score"]} if "score" in said else {name: said[name] for name in said if name != "hint"}
        hint = said.get("hint") or ""
        named = all(isinstance(name, str) and len(name) <= MAX_JUDGE_CHARS for name in judges)
        has_short_hint = isinstance(hint, str) and len(hint) <= MAX_HINT_CHARS
        if not judges or not named or not has_short_hint or not all(_is_score(score) for score in judges.values()):
            raise ScoreError(
                f"data.scorer {self.name} must give a number, or a mapping of names (at most {MAX_JUDGE_CHARS} characters) to "
                f"numbers with an optional hint (at most {MAX_HINT_CHARS}), got {dict(said)!r:.100}"
            )
        return Verdict({name: float(score) for name, score in judges.items()}, hint=hint)


def _is_score(value: object) -> bool:
    """True if it is a finite number, and no truth value."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))
    except OverflowError:  # a whole number that no float holds
        return False


def resolve(name: str, *, batch: bool) -> Batch:
    """The scorer of that name. Raises TaskError for one that is not there."""
    if _is_url(name):
        return partial(_remote, name)
    if name.startswith(reward_model.PREFIX):
        return reward_model.RewardModel(name.removeprefix(reward_model.PREFIX))
    if name in SCORERS:
        if name == "reasoning_gym" and not reasoning_gym_tasks.is_installed():
            raise TaskError(
                f"data.scorer=reasoning_gym needs the package reasoning-gym, got none; {reasoning_gym_tasks.REMEDY}"
            )
        return partial(_one_by_one, SCORERS[name])
    module, _, function = name.rpartition(".")
    try:
        scorer = getattr(importlib.import_module(module), function) if module else None
    except (ImportError, AttributeError) as error:
        raise TaskError(f"data.scorer must name a function that can be imported, got {name!r} ({error})") from error
    if not callable(scorer):
        raise TaskError(
            f"data.scorer must be module.function, a URL, {reward_model.PREFIX}FOLDER, or {one_of(name, [*SCORERS, JUDGE])}"
        )
    return partial(_whole, scorer) if batch else partial(_one_by_one, scorer)


def _one_by_one(function: Callable[[Task, str], float], tasks: Sequence[Task], answers: Sequence[str]) -> list[float]:
    return [function(task, answer) for task, answer in zip(tasks, answers, strict=True)]


def _whole(
    function: Callable[[list[Task], list[str]], Any], tasks: Sequence[Task], answers: Sequence[str]
) -> list[float]:
    return list(function(list(tasks), list(answers)))


def _remote(url: str, tasks: Sequence[Task], answers: Sequence[str]) -> list[float]:
    """A server's error or silence is tried again; what it says about the request (4xx) is final."""
    items = [_item(task, answer) for task, answer in zip(tasks, answers, strict=True)]
    for attempt in range(TRIES):
        last = attempt == TRIES - 1
        try:
            reply = asyncio.run(_post(url, {"items": items}))
            if reply.status_code < 500 or last:
                reply.raise_for_status()
                scores: list[float] = reply.json()["scores"]
                return scores
        except httpx2.TransportError:
            if last:
                raise
        time.sleep(PAUSE_S * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


async def _post(url: str, body: dict[str, Any]) -> httpx2.Response:
    async with Outgoing(SCORER) as client:
        return await client.post(url, json=body)


def _item(task: Task, answer: str) -> dict[str, Any]:
    ended = {"exit_code": answer.exit_code} if isinstance(answer, ProgramOutput) else {}
    return {"task": task.private(), "answer": answer, **ended}


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))
