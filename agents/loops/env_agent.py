"""`env_agent`: generate, give the text to an environment, append what it says as tokens, generate again.

    reset -> prompt -> generate -> step -> observation -> generate -> step -> ... -> score

The environment is an adapter of `env_adapters` that the loop's entry in `agents.loops` names, made for each episode,
with a deadline for each of its calls. It is reset with the task, ground truth included, and with the group's seed, so the
members of a group start alike. An episode ends when the environment says so, after `max_steps` answers, or when the
response is full; the reward is the environment's score, also of an episode that was cut short. Observations are never
trained (mask 0) and stand behind the exact ids that were sampled. An environment that hangs, raises or answers nonsense
ends the episode as failed, with the short reason of its EnvError; the long one is in the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from agents.agent_loop import AgentLoopBase, AgentLoopOutput, register
from agents.loops.trajectory import Trajectory, read_settings
from agents.tools.schemas import truncate
from buffers.errors import AgentError, EnvError
from env_adapters.adapter import Message, Step, WithDeadlines, adapter_class, make_adapter

logger = logging.getLogger(__name__)


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

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
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
    """One episode: its trajectory, and how far it is."""

    def __init__(self, loop: EnvAgentLoop, sampling_params: dict[str, Any], adapter: WithDeadlines) -> None:
        self._loop = loop
        self._settings = loop.settings
        self._adapter = adapter
        self._trajectory = Trajectory(loop, sampling_params, room=loop.settings.response_length)
        self._num_steps = 0
        self._step_rewards: list[float] = []

    async def play(self, row: Mapping[str, Any]) -> AgentLoopOutput:
        """Play one episode, from reset to score."""
        began = time.monotonic()
        messages = await self._adapter.reset(_task(row), seed=int(row.get("seed") or 0))
        self._trajectory.metrics.tool_calls += time.monotonic() - began
        await self._trajectory.begin(self._short(messages))
        step = await self._step()
        while not step.done and self._num_steps < self._settings.max_steps:
            if not await self._trajectory.say(self._short(step.messages)):
                break
            step = await self._step()
        return await self._output(done=step.done)

    async def _step(self) -> Step:
        """An answer of the model, and what the environment says to it."""
        ids = await self._trajectory.generate()
        text = str(await asyncio.to_thread(self._loop.tokenizer.decode, ids, skip_special_tokens=True))
        began = time.monotonic()
        step = await self._adapter.step(text)
        self._trajectory.metrics.tool_calls += time.monotonic() - began
        self._num_steps += 1
        self._step_rewards.append(step.reward or 0.0)
        return step

    async def _output(self, *, done: bool) -> AgentLoopOutput:
        began = time.monotonic()
        score = await self._adapter.score()
        self._trajectory.metrics.compute_score = time.monotonic() - began
        return self._trajectory.output(
            reward_score=score,
            step_rewards=_beside(self._step_rewards),
            num_turns=2 * self._num_steps,
            extra_fields={"turn_scores": self._step_rewards, "env_done": done},
        )

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
