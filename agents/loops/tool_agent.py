"""`tool_agent`: generate, call the tools that the answer asks for, append their results as tokens, generate again
(verl's ToolAgentLoop).

    PENDING -> GENERATING -> PROCESSING_TOOLS -> GENERATING -> ... -> TERMINATED

An episode ends when an answer calls no tool, at a limit of `ToolAgentSettings`, or when the response is full. What a
tool says is never trained (mask 0) and is appended behind the exact ids that were sampled; several results of one turn
are rendered together. A call that cannot be read, an unknown tool and a tool that fails are results too, which the
model sees (`on_tool_error: end` ends the episode instead). The last token of a trajectory is always the model's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from agents.agent_loop import AgentLoopBase, AgentLoopOutput, register
from agents.loops.trajectory import Trajectory, read_settings
from agents.loops.vllm_tool_parsers import FunctionCall, ToolParser
from agents.tools.toolbox import EpisodeTools, Toolbox
from buffers.errors import AgentError

MALFORMED = "error: the tool call could not be read. Write one JSON object with name and arguments for each call, as shown above."


class ToolAgentSettings(BaseModel):
    """The keys of a `tool_agent` entry in `agents.loops`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    tool_config_path: str
    """YAML of the tools, relative to the file that names it."""
    format: str | None = None
    """A tool parser of vLLM by name. None: the server's, or hermes."""
    max_user_turns: Annotated[int, Field(ge=1)] | None = None
    """Most turns of tool results."""
    max_assistant_turns: Annotated[int, Field(ge=1)] | None = 8
    """Most answers of the model."""
    max_parallel_calls: Annotated[int, Field(ge=1)] = 4
    """Calls of one answer that are executed, the first ones; the others are answered with an error."""
    max_tool_response_length: Annotated[int, Field(ge=1)] = 2048
    """Characters of one tool's result; more is cut."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Which part of a long result is kept: `left`, `right`, or both ends (`middle`), as in verl."""
    response_length: Annotated[int, Field(ge=1)] | None = None
    """Most tokens after the prompt, tool results included. None: what `rollout.max_model_len` leaves."""
    on_tool_error: Literal["return", "end"] = "return"
    """Unreadable calls and failing tools: tell the model, or end the episode (as it is, with its score)."""
    tool_deadline_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds for one call; a tool's own `deadline_s` goes first."""


@dataclass(slots=True, kw_only=True)
class AgentData:
    """The state of an episode, as tools get it that take `agent_data` (verl's name): to read, and `extra_fields` to write."""

    messages: list[dict[str, Any]]
    """The prompt."""
    tools_kwargs: Mapping[str, Any]
    request_id: str
    user_turns: int = 0
    assistant_turns: int = 0
    turn_scores: list[float] = field(default_factory=list)
    """The reward of each call so far."""
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Fields that tools add to the output's `extra_fields`."""


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """See the module. `run` is given `tools_kwargs` and `tool_selection` in the row's `extra_info`."""

    settings: ClassVar[ToolAgentSettings]
    toolbox: ClassVar[Toolbox]
    tool_parser: ClassVar[ToolParser]

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        """Load the tools and the parser, once for all episodes of a worker."""
        if cls._class_initialized:
            return
        settings = read_settings(ToolAgentSettings, kwargs, name="tool_agent")
        cls.toolbox = Toolbox.load(
            Path(settings.tool_config_path),
            call_deadline_s=settings.tool_deadline_s,
            max_response_chars=settings.max_tool_response_length,
            truncate_side=settings.tool_response_truncate_side,
        )
        name = settings.format or config.actor_rollout_ref.rollout.multi_turn.format
        cls.tool_parser = ToolParser.get_tool_parser(name, tokenizer)
        cls.settings = settings
        cls._class_initialized = True

    @classmethod
    async def open_class(cls) -> None:
        """Start the tools that are servers of their own (MCP)."""
        await cls.toolbox.__aenter__()

    @classmethod
    async def close_class(cls) -> None:
        """End them."""
        await cls.toolbox.__aexit__(None, None, None)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """See `AgentLoopBase.run`."""
        extra_info = kwargs.get("extra_info") or {}
        data = AgentData(
            messages=list(kwargs["raw_prompt"]), tools_kwargs=_tools_kwargs(extra_info), request_id=uuid4().hex
        )
        async with self.toolbox.open(
            extra_info.get("tool_selection"), tools_kwargs=data.tools_kwargs, agent_data=data
        ) as tools:
            episode = _Episode(self, sampling_params, tools, data)
            await episode.play()
            rewards = await tools.rewards()
        return episode.output(rewards)


def _tools_kwargs(extra_info: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row's arguments for tools, unless it says that none are needed (verl's `need_tools_kwargs`)."""
    needed, given = extra_info.get("need_tools_kwargs"), extra_info.get("tools_kwargs") or {}
    if needed and not given:
        raise AgentError(
            "extra_info.tools_kwargs must hold the tools' arguments, as need_tools_kwargs is true, got none; add them"
        )
    return {} if needed is False else given


class _Episode:
    """One episode: its trajectory, and how far it is."""

    def __init__(
        self, loop: ToolAgentLoop, sampling_params: dict[str, Any], tools: EpisodeTools, data: AgentData
    ) -> None:
        self._loop = loop
        self._settings = loop.settings
        self._tools = tools
        self._data = data
        self._trajectory = Trajectory(loop, sampling_params, room=loop.settings.response_length, tools=tools.schemas)
        self._step_rewards: list[float] = []
        self._error: str | None = None

    async def play(self) -> None:
        """Play one episode, from the prompt to the last answer."""
        await self._trajectory.begin(self._data.messages)
        while (calls := await self._calls(await self._answer())) is not None:
            results = await self._call_all(calls)
            if self._error is not None and self._settings.on_tool_error == "end":
                return
            if not await self._trajectory.say(results):
                return
            self._data.user_turns += 1

    def output(self, rewards: dict[str, float]) -> AgentLoopOutput:
        """The trajectory so far."""
        return self._trajectory.output(
            num_turns=1 + self._data.user_turns + self._data.assistant_turns,
            step_rewards=self._step_rewards,
            extra_fields={
                **self._data.extra_fields,
                "turn_scores": self._data.turn_scores,
                "tool_rewards": rewards,
                "tool_error": self._error,
            },
        )

    async def _answer(self) -> list[int]:
        self._data.assistant_turns += 1
        self._step_rewards.append(0.0)
        return await self._trajectory.generate()

    async def _calls(self, answer: list[int]) -> list[FunctionCall] | None:
        """Calls of the answer; None: the episode is over. An empty list: a call that cannot be read."""
        settings = self._settings
        if self._trajectory.is_full or not answer:
            return None
        if settings.max_assistant_turns and self._data.assistant_turns >= settings.max_assistant_turns:
            return None
        if settings.max_user_turns and self._data.user_turns >= settings.max_user_turns:
            return None
        parser = self._loop.tool_parser
        _, calls = await parser.extract_tool_calls(answer, self._tools.schemas)
        return calls or ([] if parser.is_malformed(answer) else None)

    async def _call_all(self, calls: list[FunctionCall]) -> list[dict[str, Any]]:
        """The results as messages, in the order of the calls."""
        if not calls:
            self._error = "malformed call"
            return [{"role": "tool", "content": MALFORMED}]
        began = time.monotonic()
        most = self._settings.max_parallel_calls
        results = await asyncio.gather(*(self._call(call) for call in calls[:most]))
        self._trajectory.metrics.tool_calls += time.monotonic() - began
        left_out = f"error: at most {most} calls are executed in one turn; this one was not, call it again"
        results += [left_out] * (len(calls) - most)
        return [{"role": "tool", "name": call.name, "content": text} for call, text in zip(calls, results, strict=True)]

    async def _call(self, call: FunctionCall) -> str:
        outcome = await self._tools.call(call.name, call.arguments)
        if not outcome.ok:
            self._error = f"{call.name}: {outcome.error}"
        self._data.turn_scores.append(outcome.reward)
        self._step_rewards[-1] += outcome.reward
        return outcome.text
