"""`EnvAdapter`: an environment that is played with messages; and `WithDeadlines`, which gives each of its calls a
deadline.

`agents.loops.env_agent` plays adapters and has them made by name, here. One adapter is one episode's: it is
reset once, stepped until it says done, asked for its score, and closed. Invariants of `WithDeadlines`, whatever is
inside it: no call takes longer than its deadline; every failure is an `EnvError` with a short reason; what comes out is
checked (messages with a role and a text, a finite score). A library that blocks runs in a `WorkerThread`
(`env_adapters.guarded_calls`), one for each adapter, so that a call that hangs delays no other. It does not generate,
and it knows no tokens.
"""

from __future__ import annotations

import asyncio
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from buffers.did_you_mean import one_of
from buffers.errors import EnvError
from buffers.records import Task
from env_adapters.guarded_calls import CallResult, call_with_deadline

Message = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Result of an action."""

    messages: list[Message]
    """Next messages of the environment, each with `role` and `content`; may be empty when it is done."""
    done: bool
    reward: float | None = None
    """The part of the episode's `score` that this step earned, where the environment has one: answers after it are not credited
    with it."""


class EnvAdapter(ABC):
    """One episode of an environment."""

    @abstractmethod
    async def reset(self, task: dict[str, Any], *, seed: int) -> list[Message]:
        """The first messages. `task`: as `Task.private()`, with the ground truth. Equal seeds give equal starts."""

    @abstractmethod
    async def step(self, action: str) -> Step:
        """Take the model's text as an action. A text that is no action is answered with a message, not with an error."""

    @abstractmethod
    async def score(self) -> float:
        """The episode's score; may be asked before the end, when a limit cut the episode short."""

    @property
    def player(self) -> int:
        """The player who answers the last messages, of an environment with several: 0, 1, ..."""
        return 0

    async def scores(self) -> list[float]:
        """Each player's score; of one player, its `score`."""
        return [await self.score()]

    @classmethod
    def check(cls, task: Task) -> int:
        """The number of players of a task. Raises EnvError for a task that cannot be played: that is known before anything
        starts."""
        return 1

    async def close(self) -> None:
        """Give back what the episode holds. Called once, also after a failure."""
        return


def task_of(task: dict[str, Any]) -> Task:
    """The record of a task as an adapter gets it; keys that no column has are left out."""
    names = {field.name for field in fields(Task)}
    return Task(**{name: value for name, value in task.items() if name in names})


def user(text: str) -> Message:
    """A message of the environment, as a model sees it."""
    return {"role": "user", "content": text}


class WithDeadlines(EnvAdapter):
    """An adapter whose calls end within `deadline_s`, with a checked answer or an EnvError.

    After a call that failed or was given up, nothing but `close` is passed on: the environment's state is unknown.
    """

    def __init__(self, adapter: EnvAdapter, *, deadline_s: float) -> None:
        self._adapter = adapter
        self._deadline_s = deadline_s
        self._broken = ""
        self._given_up: set[asyncio.Task[Any]] = set()

    async def reset(self, task: dict[str, Any], *, seed: int) -> list[Message]:
        messages = await self._call("reset", self._adapter.reset(task, seed=seed))
        return self._checked(messages, name="reset", least=1)

    async def step(self, action: str) -> Step:
        step = await self._call("step", self._adapter.step(action))
        if not isinstance(step, Step):
            raise self._failure("step", f"must give a Step, got {step!r:.100}", what="wrong answer")
        self._checked(step.messages, name="step", least=0 if step.done else 1)
        return step

    @property
    def player(self) -> int:
        return self._adapter.player

    async def score(self) -> float:
        return (await self.scores())[0]

    async def scores(self) -> list[float]:
        scores = await self._call("score", self._adapter.scores())
        for score in scores:
            if not isinstance(score, bool | int | float) or not math.isfinite(score):
                raise self._failure("score", f"must give a finite number, got {score!r:.100}", what="wrong answer")
        return [float(score) for score in scores]

    async def close(self) -> None:
        """See `Adapter.close`; it may follow a failure."""
        self._broken = ""
        await self._call("close", self._adapter.close())

    async def _call(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        if self._broken:
            work.close()
            raise EnvError(f"{name} must not follow a failure ({self._broken}); close it", reason=self._broken)
        self._broken = f"environment {name}: deadline"  # until it has answered; also where this call is cancelled
        ended: CallResult[T] = await call_with_deadline(
            lambda: work, name=f"environment {name}", deadline_s=self._deadline_s, left_behind=self._given_up
        )
        if ended.late:
            raise self._failure(name, f"must answer within {self._deadline_s:g} s, it did not", what="deadline")
        if ended.error is None:
            self._broken = ""
            return cast("T", ended.value)
        if isinstance(ended.error, EnvError):
            self._broken = ended.error.reason
            raise ended.error
        what = type(ended.error).__name__
        words = " ".join(str(ended.error).split())  # an error is one line
        raise self._failure(name, f"must not raise, got {what}: {words:.300}", what=what) from ended.error

    def _failure(self, name: str, complaint: str, *, what: str) -> EnvError:
        kind = type(self._adapter).__name__
        self._broken = f"environment {name}: {what}"
        return EnvError(f"{name} of {kind} {complaint}; the episode ends", reason=self._broken)

    def _checked(self, messages: object, *, name: str, least: int) -> list[Message]:
        good = isinstance(messages, list) and len(messages) >= least and all(_is_message(one) for one in messages)
        if not good:
            rule = f"must give {'' if least == 0 else 'at least one of '}messages with a role and a text"
            raise self._failure(name, f"{rule}, got {messages!r:.100}", what="wrong answer")
        assert isinstance(messages, list)
        return messages


def _is_message(one: object) -> bool:
    return isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)


# Adapters by name: `make_adapter("guessing_game", {"high": 10})`. What may be made is what a configuration names, here or as
# `module.Class`, and nothing else: a task's row never names code. An adapter's module is imported when it is made, so that an
# environment that is not played needs no package.

ADAPTERS = {
    "gsm8k": "env_adapters.gsm8k.GSM8KEnv",
    "guessing_game": "env_adapters.guessing_game.GuessingGame",
    "gymnasium": "env_adapters.gymnasium_env.GymnasiumEnv",
    "openenv": "env_adapters.openenv.OpenEnv",
    "textarena": "env_adapters.textarena_env.TextArenaEnv",
    "verifiers": "env_adapters.verifiers_env.VerifiersEnv",
    "walk": "env_adapters.walk.game.WalkEnv",
}


def adapter_class(name: str) -> type[EnvAdapter]:
    """The class of that name. Raises EnvError for one that is not there, with the nearest name."""
    module, _, kind = ADAPTERS.get(name, name).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), kind) if module else None
    except (ImportError, AttributeError) as error:
        raise EnvError(f"environment must name a class that can be imported, got {name!r} ({error})") from error
    if isinstance(found, type) and issubclass(found, EnvAdapter):
        return found
    raise EnvError(f"environment must be module.Class, or {one_of(name, ADAPTERS)}")


def make_adapter(name: str, options: Mapping[str, Any]) -> EnvAdapter:
    """An adapter for one episode. Raises EnvError for options that it does not have."""
    kind = adapter_class(name)
    try:
        return kind(**options)
    except TypeError as error:
        raise EnvError(
            f"options of environment {name!r} must be its constructor's, got {dict(options)} ({error})"
        ) from error
