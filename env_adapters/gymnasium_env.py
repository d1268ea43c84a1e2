"""Any Gymnasium environment whose observations and actions can be written as text.

Made by `env_adapters.adapter`; the only owner of gymnasium, which is an extra (`envs`). Invariants: the environment is made, reset
with the episode's seed, stepped and closed in one thread of its own; a text that is no action is answered with what an action
looks like, and does not step the environment. Actions: Discrete, MultiDiscrete, MultiBinary, a Box of at most 16 numbers, Text.
Observations: those, and tuples and dictionaries of them; or what the environment renders (`render=True`, mode `ansi`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from buffers.errors import EnvError
from env_adapters.adapter import EnvAdapter, Message, Step, user
from env_adapters.guarded_calls import WorkerThread

MAX_NUMBERS = 16
"""A Box with more numbers is not text."""
_INTEGER = r"(?<![\w.])-?\d+(?![\w.]*\d)"
_FLOAT = r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"


class GymnasiumEnv(EnvAdapter):
    """`id` and `options` as for `gymnasium.make`. `score`: the return, or the last step's reward. `actions`: names of a Discrete
    space's actions, from its first one on. `prompt`: said before the first observation."""

    def __init__(
        self,
        *,
        id: str,
        options: Mapping[str, Any] | None = None,
        score: Literal["return", "last"] = "return",
        actions: Sequence[str] = (),
        prompt: str = "",
        render: bool = False,
    ) -> None:
        if score not in ("return", "last"):
            raise EnvError(f"score of a gymnasium environment must be return or last, got {score!r}; set one of them")
        self._id = id
        self._options = {**(options or {}), **({"render_mode": "ansi"} if render else {})}
        self._kind = score
        self._names = list(actions)
        self._prompt = prompt
        self._render = render
        self._thread: WorkerThread | None = None
        self._env: Any = None
        self._rewards: list[float] = []

    async def reset(self, task: dict[str, Any], *, seed: int) -> list[Message]:
        self._thread = WorkerThread(f"gymnasium {self._id}")
        text = await self._thread.call(lambda: self._start(seed))
        parts = [self._prompt, f"Action: {self._described()}", text]
        return [user("\n".join(part for part in parts if part))]

    async def step(self, action: str) -> Step:
        assert self._thread is not None, "reset() first"
        parsed = self._parse(action)
        if parsed is None:
            return Step(messages=[user(f"Not an action. Answer with {self._described()}")], done=False)
        text, reward, done = await self._thread.call(lambda: self._move(parsed))
        self._rewards.append(reward)
        return Step(messages=[user(text)], done=done, reward=reward)

    async def score(self) -> float:
        if self._kind == "last":
            return self._rewards[-1] if self._rewards else 0.0
        return float(sum(self._rewards))

    async def close(self) -> None:
        if self._thread is not None:
            await self._thread.end(self._stop)

    # In the thread.

    def _start(self, seed: int) -> str:
        gymnasium = _gymnasium()
        try:
            self._env = gymnasium.make(self._id, **self._options)
        except gymnasium.error.Error as error:
            raise EnvError(
                f"gymnasium environment {self._id!r} must be one that can be made: {error}",
                reason="environment reset: make",
            ) from error
        self._check_spaces()
        observation, _ = self._env.reset(seed=seed)
        return self._seen(observation)

    def _move(self, action: Any) -> tuple[str, float, bool]:
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return self._seen(observation), float(reward), bool(terminated or truncated)

    def _seen(self, observation: Any) -> str:
        if self._render:
            return _without_colours(str(self._env.render()))
        return as_text(observation, space=self._env.observation_space)

    def _stop(self) -> None:
        if self._env is not None:
            self._env.close()

    def _check_spaces(self) -> None:
        space = self._env.action_space
        if describe(space) is None:
            raise EnvError(
                f"actions of {self._id} must be Discrete, MultiDiscrete, MultiBinary, Text or a Box of at most {MAX_NUMBERS} "
                f"numbers, got {space}; wrap the environment",
                reason="environment reset: actions",
            )
        if self._names and getattr(space, "n", None) != len(self._names):
            raise EnvError(
                f"actions must name each of {space}, got {len(self._names)} names; leave them out, or name all",
                reason="environment reset: actions",
            )

    # Text

    def _described(self) -> str:
        if self._names:
            return f"one of {', '.join(self._names)}."
        return f"{describe(self._env.action_space)}."

    def _parse(self, text: str) -> Any:
        if self._names:
            names = re.findall(rf"\b({'|'.join(re.escape(name) for name in self._names)})\b", text, flags=re.IGNORECASE)
            places = {name.lower(): place for place, name in enumerate(self._names)}
            return int(self._env.action_space.start) + places[names[-1].lower()] if names else None
        return parse(text, space=self._env.action_space)


def describe(space: Any) -> str | None:
    """Form of an action of this space; None for a space whose actions are not text."""
    spaces = _gymnasium().spaces
    match space:
        case spaces.Discrete():
            return f"a whole number from {int(space.start)} to {int(space.start + space.n - 1)}"
        case spaces.MultiDiscrete():
            return f"{space.nvec.size} whole numbers, below {', '.join(str(int(n)) for n in space.nvec.flat)}"
        case spaces.MultiBinary():
            return f"{_size(space)} numbers, each 0 or 1"
        case spaces.Box() if _size(space) <= MAX_NUMBERS:
            bounds = ", ".join(
                f"{low:g} to {high:g}" for low, high in zip(space.low.flat, space.high.flat, strict=True)
            )
            return f"{_size(space)} number{'s' if _size(space) > 1 else ''}, from {bounds}"
        case spaces.Text():
            return f"text of {space.min_length} to {space.max_length} characters"
    return None


def parse(text: str, *, space: Any) -> Any:
    """The action that a text means, or None. The last numbers in the text count, so that a model may think aloud first."""
    import numpy as np

    spaces = _gymnasium().spaces
    match space:
        case spaces.Text():
            action: Any = text.strip()
        case spaces.Discrete():
            numbers = re.findall(_INTEGER, text)
            action = np.int64(numbers[-1]) if numbers and len(numbers[-1]) < 18 else None
        case spaces.Box():
            numbers = re.findall(_FLOAT, text)[-_size(space) :]
            action = np.array([float(number) for number in numbers], dtype=space.dtype)
        case _:
            numbers = [number for number in re.findall(_INTEGER, text) if len(number) < 18][-_size(space) :]
            action = np.array([int(number) for number in numbers], dtype=space.dtype)
    if action is None or (isinstance(action, np.ndarray) and action.size != _size(space)):
        return None
    action = action.reshape(space.shape) if isinstance(action, np.ndarray) else action
    return action if space.contains(action) else None


def as_text(value: Any, *, space: Any) -> str:
    """An observation as JSON, numbers with six digits; text as it is."""
    if isinstance(value, str):
        return value
    if _numbers(space) > 64 * MAX_NUMBERS:
        raise EnvError(
            f"observations must be text or at most {64 * MAX_NUMBERS} numbers, got {space!s:.100}; use render=True, or wrap "
            "the environment",
            reason="environment reset: observations",
        )
    return json.dumps(_plain(value))


def _without_colours(text: str) -> str:
    """Put what a terminal would highlight into brackets: in a board that is where the player is."""
    marked = re.sub(r"\x1b\[[1-9][\d;]*m(.*?)\x1b\[0?m", r"[\1]", text, flags=re.DOTALL)
    return re.sub(r"\x1b\[[\d;]*m", "", marked)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return _plain(value.tolist())
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _numbers(space: Any) -> int:
    """Number of numbers in an observation of this space."""
    inner = getattr(space, "spaces", None)
    if inner is None:
        return _size(space)
    return sum(_numbers(one) for one in (inner.values() if isinstance(inner, Mapping) else inner))


def _size(space: Any) -> int:
    size = 1
    for length in space.shape or ():
        size *= int(length)
    return size


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise EnvError(
            "environment gymnasium needs the package gymnasium, which is not there; pip install 'gymnasium>=1'",
            reason="environment reset: not installed",
        ) from error
    return gymnasium
