"""One episode's tools: calls, rewards, and the instances that were created for it.

Made by `agents.tools.toolbox`, whose invariants it keeps: `call` gives an outcome for everything that a model may write and a tool
may do. Its rewards, on the other hand, are no message to the model: a failing `calc_reward` raises, and its episode failed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, TypeGuard
from uuid import uuid4

from agents.tools.arguments import BadArguments, check_arguments, read_arguments
from agents.tools.base_tool import BaseTool
from agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from agents.tools.truncate import Side, truncate
from buffers.did_you_mean import nearest
from buffers.errors import ToolError
from env_adapters.guarded_calls import CallResult, CaughtException, call_with_deadline

logger = logging.getLogger(__name__)

ToolKwargs = Mapping[str, Mapping[str, Any] | None]
"""What a task gives one tool: its kinds of kwargs, each with names and values. A parquet file gives None for what is not there."""
KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
MAX_REASON_CHARS = 300
LARGEST = sys.float_info.max
"""A reward is smaller in size."""
DEADLINE = "deadline_s"
"""The key of a tool's `config` that overrides the toolbox's deadline."""


class ToolFault(StrEnum):
    """Why a call gave no answer of its tool."""

    UNKNOWN_TOOL = "unknown_tool"
    BAD_JSON = "bad_json"
    BAD_ARGUMENTS = "bad_arguments"
    DEADLINE = "deadline"
    RAISED = "raised"
    BAD_RESULT = "bad_result"
    """The tool returned what is none of its interface's values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """What became of a call. `text` is for the model; `reward` is of this step."""

    text: str
    ok: bool = True
    error: ToolFault | None = None
    reward: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What holds for every tool of a toolbox."""

    call_deadline_s: float
    max_response_chars: int
    truncate_side: Side


class _Fault(Exception):
    """A call that ends here; `args` are the fault and the words for the model."""

    def __init__(self, fault: ToolFault, text: str) -> None:
        super().__init__(fault, text)
        self.fault, self.text = fault, text


class EpisodeTools:
    """`tools`: name -> tool, those of this episode."""

    def __init__(
        self,
        tools: Mapping[str, BaseTool],
        *,
        kwargs: Mapping[str, ToolKwargs],
        limits: Limits,
        agent_data: object,
        left_behind: set[asyncio.Task[Any]],
    ) -> None:
        self._tools = tools
        self._kwargs = kwargs
        self._limits = limits
        self._agent_data = agent_data
        self._left_behind = left_behind
        self._instances: dict[str, str] = {}
        self._over = False
        self._creating = {name: asyncio.Lock() for name in tools}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI tool dicts, for the chat template."""
        return [schema.as_openai() for tool in self._tools.values() if (schema := tool.tool_schema) is not None]

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> ToolOutcome:
        """One call as the model wrote it; `arguments` as JSON text or as a dict. Calls may run at the same time."""
        try:
            response, reward = await self._call(name, arguments)
        except _Fault as fault:
            text = truncate(f"Error: {fault.text}", limit=self._limits.max_response_chars, side="left")
            return ToolOutcome(text=_clean(text), ok=False, error=fault.fault)
        text = truncate(response.text or "", limit=self._limits.max_response_chars, side=self._limits.truncate_side)
        return ToolOutcome(text=_clean(text), reward=reward)

    async def rewards(self) -> dict[str, float]:
        """`calc_reward` of each tool that was created, by name. Raises ToolError when one gives no finite number."""
        found = {}
        for name, instance in list(self._instances.items()):
            tool = self._tools[name]
            given = self._given(name, "calc_reward_kwargs")
            ended = await self._guarded(tool, partial(tool.calc_reward, instance, **given))
            if not _is_number(ended.value):
                raise ToolError(
                    f"calc_reward of tool {name} must give a finite number: {self._fault(tool, ended).text}"
                )
            found[name] = float(ended.value)
        return found

    async def create(self, names: Iterable[str]) -> None:
        """Open instances of these tools now. Raises ToolError when one cannot be."""
        for name in names:
            try:
                await self._instance(self._tools[name])
            except _Fault as fault:
                raise ToolError(f"create of {fault.text}; check its create_kwargs in the task's tools_kwargs") from None

    async def release(self) -> None:
        """Release all instances; one that fails is logged and stops no other. Later calls find nothing."""
        self._over = True
        while self._instances:
            name, instance = self._instances.popitem()
            ended = await self._release(self._tools[name], instance)
            if ended.error is not None or ended.late:
                logger.warning("release of %s", self._fault(self._tools[name], ended).text)

    async def _call(self, name: str, given: str | Mapping[str, Any]) -> tuple[ToolResponse, float]:
        tool = self._tools.get(name) if isinstance(name, str) else None  # a parser hands on what the model wrote
        if tool is None or tool.tool_schema is None:
            raise _Fault(ToolFault.UNKNOWN_TOOL, f"there is no tool {name!r:.100}; {nearest(str(name), self._tools)}")
        try:
            # In a thread: what a model writes may take seconds to check, and other episodes continue.
            arguments = await asyncio.to_thread(_checked_arguments, given, tool.tool_schema)
        except BadArguments as error:
            raise _Fault(ToolFault.BAD_ARGUMENTS if error.is_json else ToolFault.BAD_JSON, f"{name}: {error}") from None
        instance = await self._instance(tool)
        extra = self._given(name, "execute_kwargs")
        if self._agent_data is not None and _takes(tool.execute, "agent_data"):
            extra["agent_data"] = self._agent_data
        ended = await self._guarded(tool, partial(tool.execute, instance, arguments, **extra))
        match ended.value:
            case (ToolResponse(text=str() | None) as response, reward, dict() | None) if _is_number(reward):
                return response, float(reward)
        raise self._fault(tool, ended)

    async def _instance(self, tool: BaseTool) -> str:
        """The tool's instance in this episode, created if there is none."""
        async with self._creating[tool.name]:
            if self._over:
                raise _Fault(ToolFault.RAISED, f"{tool.name}: the episode is over")
            if tool.name not in self._instances:
                # Known before it is created, so that it is released if the episode is cancelled meanwhile.
                instance = self._instances[tool.name] = str(uuid4())
                given = _create_kwargs(tool, self._given(tool.name, "create_kwargs"))
                ended = await self._guarded(tool, partial(tool.create, instance, **given))
                # Early tools of verl return the id alone.
                created = ended.value[0] if isinstance(ended.value, tuple) and ended.value else ended.value
                if not isinstance(created, str):
                    await self._release(tool, self._instances.pop(tool.name))  # as far as it was made
                    raise self._fault(tool, ended)
                self._instances[tool.name] = created
            return self._instances[tool.name]

    async def _release(self, tool: BaseTool, instance: str) -> CallResult[Any]:
        return await self._guarded(tool, partial(tool.release, instance, **self._given(tool.name, "release_kwargs")))

    def _given(self, name: str, kind: str) -> dict[str, Any]:
        return dict(self._kwargs.get(name, {}).get(kind) or {})

    async def _guarded(self, tool: BaseTool, work: Callable[[], Any]) -> CallResult[Any]:
        ended = await call_with_deadline(
            work, name=f"tool {tool.name}", deadline_s=self._deadline_s(tool), left_behind=self._left_behind
        )
        if ended.error is not None:
            logger.info("tool %s raised", tool.name, exc_info=ended.error)
        return ended

    def _deadline_s(self, tool: BaseTool) -> float:
        return float(tool.config.get(DEADLINE, self._limits.call_deadline_s))

    def _fault(self, tool: BaseTool, ended: CallResult[Any]) -> _Fault:
        """Why a tool gave nothing that can be used."""
        if ended.late:
            return _Fault(ToolFault.DEADLINE, f"{tool.name} did not answer within {self._deadline_s(tool):g} s")
        if ended.error is not None:
            return _Fault(
                ToolFault.RAISED, f"{tool.name} failed: {type(ended.error).__name__}: {_short(ended.error, str)}"
            )
        return _Fault(
            ToolFault.BAD_RESULT, f"{tool.name} returned {_short(ended.value, repr)}, which its interface forbids"
        )


def _create_kwargs(tool: BaseTool, given: dict[str, Any]) -> dict[str, Any]:
    """One by one, and together as `create_kwargs`, as two of verl's loops do; only what the tool's `create` can take."""
    if not given or not _takes(tool.create, "create_kwargs"):
        return given
    return {name: value for name, value in given.items() if _takes(tool.create, name)} | {"create_kwargs": given}


def _takes(method: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) < LARGEST  # also of whole numbers that no float holds


def _checked_arguments(given: str | Mapping[str, Any], schema: OpenAIFunctionToolSchema) -> dict[str, Any]:
    arguments = read_arguments(given)
    check_arguments(arguments, schema=schema)
    return arguments


def _clean(text: str) -> str:
    """The text without halves of surrogate pairs, which no tokenizer takes."""
    return text.encode(errors="replace").decode()


def _short(value: object, show: Callable[[object], str]) -> str:
    """The error in words, which a tool's own class may refuse to give."""
    with CaughtException() as caught:
        text = show(value)
    if caught.error is not None:
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]}..."
