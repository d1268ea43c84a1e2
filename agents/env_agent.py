"""`env_agent`: generate, give the text to an environment, append what it says as tokens, generate again.

    reset -> prompt -> generate -> step -> observation -> generate -> step -> ... -> score

The environment is an adapter of `env_adapters` that the loop's entry in `agents.loops` names, made anew for each episode,
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
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agents.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from agents.chat_tokens import tail_ids
from agents.tools.truncate import truncate
from buffers.errors import AgentError, EnvError, TaskError
from env_adapters.adapter import Message, Played, played
from env_adapters.catalog import adapter_class, make_adapter

logger = logging.getLogger(__name__)


class EnvAgentSettings(BaseModel):
    """The keys of an `env_agent` entry in `agents.loops`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    env: str
    """An adapter of `env_adapters.catalog` by name, or `module.Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor."""
    max_steps: Annotated[int, Field(ge=1)] = 32
    """Most answers of the model."""
    response_length: Annotated[int, Field(ge=1)] | None = None
    """Most tokens after the prompt, observations included. None: what `rollout.max_model_len` leaves."""
    max_observation_chars: Annotated[int, Field(ge=1)] = 8192
    """Of one message of the environment; the middle of a longer one is cut out."""
    deadline_s: Annotated[float, Field(gt=0)] = 30.0
    """Of one call of the environment."""


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
        cls.settings = _settings(kwargs)
        adapter_class(cls.settings.env)  # a name that is not there is known before the first episode
        cls._class_initialized = True

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """See `AgentLoopBase.run`. `kwargs` must hold the task's columns, `ground_truth` and `seed`."""
        settings = self.settings
        try:
            adapter = played(make_adapter(settings.env, settings.options), deadline_s=settings.deadline_s)
            try:
                return await _Episode(self, sampling_params, adapter).play(kwargs)
            finally:
                with suppress(EnvError):  # what could not be closed has no say in the episode
                    await adapter.close()
        except EnvError as error:
            logger.warning("environment %s ended an episode: %s", settings.env, error)
            raise AgentError(error.reason) from error


class _Episode:
    """The state of one trajectory."""

    def __init__(self, loop: EnvAgentLoop, sampling_params: dict[str, Any], adapter: Played) -> None:
        self._loop = loop
        self._settings = loop.settings
        self._sampling_params = sampling_params
        self._adapter = adapter
        self._request_id = uuid4().hex
        self._mask: list[int] = []
        self._logprobs: list[float] = []
        self._metrics = AgentLoopMetrics()
        self._num_steps = 0
        self._env_s = 0.0

    async def play(self, row: Mapping[str, Any]) -> AgentLoopOutput:
        """From reset to score."""
        began = time.monotonic()
        messages = await self._adapter.reset(_task(row), seed=int(row.get("seed") or 0))
        self._env_s += time.monotonic() - began
        self._ids = await self._loop.apply_chat_template(self._short(messages))
        self._room = self._response_room(len(self._ids))
        step_rewards: list[float] = []
        while True:
            text = await self._generate()
            began = time.monotonic()
            step = await self._adapter.step(text)
            self._env_s += time.monotonic() - began
            self._num_steps += 1
            step_rewards += [] if step.reward is None else [step.reward]
            if step.done or self._num_steps >= self._settings.max_steps or not await self._say(step.messages):
                break
        return await self._output(step_rewards, done=step.done)

    async def _output(self, step_rewards: list[float], *, done: bool) -> AgentLoopOutput:
        began = time.monotonic()
        score = await self._adapter.score()
        self._metrics.compute_score = time.monotonic() - began
        self._metrics.tool_calls = self._env_s
        split = len(self._ids) - len(self._mask)
        return AgentLoopOutput(
            prompt_ids=self._ids[:split],
            response_ids=self._ids[split:],
            response_mask=self._mask,
            response_logprobs=self._logprobs,
            reward_score=score,
            num_turns=2 * self._num_steps,
            metrics=self._metrics,
            extra_fields={"step_rewards": step_rewards, "env_done": done},
        )

    async def _generate(self) -> str:
        began = time.monotonic()
        left = self._room - len(self._mask)
        most = self._sampling_params.get("max_tokens")
        output = await self._loop.server_manager.generate(
            self._request_id,
            prompt_ids=list(self._ids),
            sampling_params={**self._sampling_params, "max_tokens": left if most is None else min(left, most)},
        )
        self._metrics.generate_sequences += time.monotonic() - began
        self._metrics.num_preempted += output.num_preempted
        self._ids += output.token_ids
        self._mask += [1] * len(output)
        self._logprobs += output.log_probs
        return str(await asyncio.to_thread(self._loop.tokenizer.decode, output.token_ids, skip_special_tokens=True))

    async def _say(self, messages: list[Message]) -> bool:
        """Append an observation; False when it leaves no room for an answer."""
        short = self._short(messages)
        tail = await asyncio.to_thread(tail_ids, self._loop.tokenizer, short, tools=None, after=self._ids[-1])
        if len(self._mask) + len(tail) >= self._room:
            return False
        self._ids += tail
        self._mask += [0] * len(tail)
        self._logprobs += [0.0] * len(tail)
        return True

    def _short(self, messages: list[Message]) -> list[Message]:
        most = self._settings.max_observation_chars
        return [{**message, "content": truncate(message["content"], limit=most, side="middle")} for message in messages]

    def _response_room(self, prompt_length: int) -> int:
        longest = int(self._loop.rollout_config.max_model_len)
        if prompt_length >= longest:
            raise EnvError(
                f"an environment's first messages must leave room for an answer within rollout.max_model_len={longest}, got "
                f"{prompt_length} tokens; raise it, or shorten them",
                reason="environment reset: prompt too long",
            )
        return min(longest - prompt_length, self._settings.response_length or longest)


def _task(row: Mapping[str, Any]) -> dict[str, Any]:
    """The task as an adapter gets it, of a loop's arguments."""
    names = ("task_id", "data_source", "agent_name", "extra_info", "ground_truth")
    return {"prompt": row["raw_prompt"], **{name: row[name] for name in names if row.get(name) is not None}}


def _settings(kwargs: dict[str, Any]) -> EnvAgentSettings:
    try:
        return EnvAgentSettings.model_validate(kwargs)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r:.80}" for e in error.errors()]
        raise TaskError(f"agents.loops, env_agent: {'; '.join(lines)}; see agents/env_agent.py") from error
