"""`env_agent`: generate, give the text to an environment, append what it says as tokens, generate again.

    reset -> prompt -> generate -> step -> observation -> generate -> step -> ... -> score

The environment is an adapter of `env_adapters` that the loop's entry in `agents.loops` names, made for each episode,
with a deadline for each of its calls. It is reset with the task, ground truth included, and with the group's seed, so the
members of a group start alike. An episode ends when the environment says so, after `max_steps` answers, or when a
response is full; the reward is the environment's score, also of an episode that was cut short. In an environment of several players
each has a conversation and a score of its own; the policy plays them all, or roles of the run do. Observations are never
trained (mask 0) and stand behind the exact ids that were sampled. An environment that hangs, raises or answers nonsense
ends the episode as failed, with the short reason of its EnvError; the long one is in the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agents.agent_loop import AgentLoopBase, AgentLoopOutput, register
from agents.loops.trajectory import Trajectory, read_settings
from agents.tools.schemas import truncate
from buffers.errors import AgentError, EnvError
from env_adapters.adapter import Message, Step, WithDeadlines, adapter_class, make_adapter

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EnvAgentSettings(BaseModel):
    """The keys of an `env_agent` entry in `agents.loops`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    env: str
    """An adapter of `env_adapters.adapter` by name, or `module.Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor."""
    max_steps: Annotated[int, Field(ge=1)] = 32
    """Most answers of the model."""
    response_length: Annotated[int, Field(ge=1)] | None = None
    """Most tokens after the prompt, observations included. None: what `rollout.max_model_len` leaves."""
    max_observation_chars: Annotated[int, Field(ge=1)] = 8192
    """Most characters of one message of the environment; the middle of a longer one is cut out."""
    deadline_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds for one call of the environment."""
    roles: tuple[str, ...] = ()
    """Roles of the run that play the environment's players, in order, each once. Empty: the policy plays them all."""

    @field_validator("roles")
    @classmethod
    def _distinct(cls, roles: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(roles)) < len(roles):
            raise ValueError("each role plays one player; a role of another name is played by the policy too")
        return roles


@register("env_agent")
class EnvAgentLoop(AgentLoopBase):
    """See the module."""

    sees_ground_truth: ClassVar[bool] = True
    settings: ClassVar[EnvAgentSettings]

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        """Check the entry, once for all episodes of a worker."""
        if cls._class_initialized:
            return
        cls.settings = read_settings(EnvAgentSettings, kwargs, name="env_agent")
        adapter_class(cls.settings.env)  # a name that is not there is known before the first episode
        cls._class_initialized = True

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """See `AgentLoopBase.run`. `kwargs` must hold the task's columns, `ground_truth` and `seed`."""
        settings = self.settings
        try:
            adapter = WithDeadlines(make_adapter(settings.env, settings.options), deadline_s=settings.deadline_s)
            try:
                return await _Episode(self, sampling_params, adapter).play(kwargs)
            finally:
                with suppress(EnvError):  # what could not be closed has no say in the episode
                    await adapter.close()
        except EnvError as error:
            logger.warning("environment %s ended an episode: %s", settings.env, error)
            raise AgentError(error.reason) from error


class _Episode:
    """One episode: the trajectory of each player, and how far it is."""

    def __init__(self, loop: EnvAgentLoop, sampling_params: dict[str, Any], adapter: WithDeadlines) -> None:
        self._loop = loop
        self._settings = loop.settings
        self._sampling_params = sampling_params
        self._adapter = adapter
        self._trajectories: dict[int, Trajectory] = {}
        self._step_rewards: dict[int, list[float]] = {}
        self._num_steps = 0
        self._env_s = 0.0

    async def play(self, row: Mapping[str, Any]) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Play one episode, from reset to score; a trajectory for each player who had a turn."""
        messages = await self._timed(self._adapter.reset(_task(row), seed=int(row.get("seed") or 0)))
        step = Step(messages=messages, done=False)
        while not step.done and self._num_steps < self._settings.max_steps:
            if (trajectory := await self._turn(self._short(step.messages))) is None:
                break
            step = await self._step(trajectory)
        return await self._outputs(done=step.done)

    async def _turn(self, messages: list[Message]) -> Trajectory | None:
        """The trajectory of the player whose turn it is, with these messages; None: there is no room for an answer."""
        player, roles = self._adapter.player, self._settings.roles
        if (trajectory := self._trajectories.get(player)) is not None:
            return trajectory if await trajectory.say(messages) else None
        if roles and player >= len(roles):
            raise EnvError(
                f"roles must name who plays player {player}, got {', '.join(roles)}; add a role",
                reason="environment: more players than roles",
            )
        trajectory = self._trajectories[player] = Trajectory(
            self._loop, self._sampling_params, room=self._settings.response_length, role=roles[player] if roles else ""
        )
        await trajectory.begin(messages)
        return trajectory

    async def _step(self, trajectory: Trajectory) -> Step:
        """An answer of the model, and what the environment says to it."""
        player = self._adapter.player
        ids = await trajectory.generate()
        text = str(await asyncio.to_thread(self._loop.tokenizer.decode, ids, skip_special_tokens=True))
        step = await self._timed(self._adapter.step(text))
        self._num_steps += 1
        self._step_rewards.setdefault(player, []).append(step.reward or 0.0)
        return step

    async def _outputs(self, *, done: bool) -> AgentLoopOutput | list[AgentLoopOutput]:
        began = time.monotonic()
        scores = await self._adapter.scores()
        first, *_ = self._trajectories.values()
        first.metrics.compute_score, first.metrics.tool_calls = time.monotonic() - began, self._env_s
        outputs = [
            trajectory.output(
                reward_score=scores[player],
                step_rewards=_beside(rewards := self._step_rewards[player]),
                num_turns=2 * len(rewards),
                extra_fields={"turn_scores": rewards, "env_done": done},
            )
            for player, trajectory in sorted(self._trajectories.items())
        ]
        return outputs[0] if len(outputs) == 1 else outputs

    async def _timed(self, call: Awaitable[T]) -> T:
        began = time.monotonic()
        answer = await call
        self._env_s += time.monotonic() - began
        return answer

    def _short(self, messages: list[Message]) -> list[Message]:
        most = self._settings.max_observation_chars
        return [{**message, "content": truncate(message["content"], limit=most, side="middle")} for message in messages]


def _beside(rewards: list[float]) -> list[float]:
    """Rewards that are parts of the score as rewards beside it: earned at their steps, and taken off at the last one again."""
    return [*rewards[:-1], rewards[-1] - sum(rewards)]


def _task(row: Mapping[str, Any]) -> dict[str, Any]:
    """The task as an adapter gets it, of a loop's arguments."""
    names = ("task_id", "data_source", "agent_name", "extra_info", "ground_truth")
    return {"prompt": row["raw_prompt"], **{name: row[name] for name in names if row.get(name) is not None}}
