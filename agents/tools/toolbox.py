"""The tools of a worker, and their life in one episode: open, call, rewards, released.

Built by an agent loop (or the program that starts it) from a YAML file or from tools themselves; one Toolbox serves all episodes of
a worker at once. Invariants: `call` never raises but for cancellation: what went wrong is in its outcome, in words that the model
can act on (a reward is no message to the model: a failing `calc_reward` raises); every instance that was created is released, also
when the episode is cancelled; an episode reaches its own instances only.

    async with Toolbox.load(Path("configs/tools/gsm8k.yaml")) as toolbox:          # MCP servers start here
        async with toolbox.open(tools_kwargs=task.extra_info.get("tools_kwargs")) as tools:
            tools.schemas                                                          # for the chat template
            outcome = await tools.call("calculator", '{"expression": "6 * 7"}')
            await tools.rewards()                                                  # {"calc_gsm8k_reward": 1.0}

It does not read the model's text, nor count turns, nor make tokens: that is the agent loop's. It does not stop a tool that blocks
the event loop, or a thread that hangs (`env_adapters.guarded_calls`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard, get_args
from uuid import uuid4

from agents.tools.arguments import BadArguments, check_arguments, check_schema, read_arguments
from agents.tools.base_tool import BaseTool
from agents.tools.schemas import OpenAIFunctionToolSchema, Side, ToolResponse, truncate
from agents.tools.tool_file import ToolSource, load_tools
from buffers.did_you_mean import nearest
from buffers.errors import ToolError
from env_adapters.guarded_calls import CaughtException, call_with_deadline

logger = logging.getLogger(__name__)

CALL_DEADLINE_S = 60.0
MAX_RESPONSE_CHARS = 4096
ToolKwargs = Mapping[str, Mapping[str, Any] | None]
"""Kwargs of a task for one tool: its kinds, each with names and values. A parquet file gives None for what is not there."""
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
    """Outcome of a call. `text` is for the model; `reward` is of this step."""

    text: str
    ok: bool = True
    error: ToolFault | None = None
    reward: float = 0.0


class _Fault(Exception):
    """A call that ends here; `args` are the fault and the words for the model."""

    def __init__(self, fault: ToolFault, text: str) -> None:
        super().__init__(fault, text)
        self.fault, self.text = fault, text


class Toolbox:
    """`tools` by their names. A deadline holds for each call, each `create`, `calc_reward` and `release`; a tool's own is its
    `config["deadline_s"]`. A longer response than `max_response_chars` is truncated at `truncate_side` (verl's meaning: `left`
    keeps the left part).
    """

    def __init__(
        self,
        tools: Iterable[BaseTool],
        *,
        sources: Iterable[ToolSource] = (),
        call_deadline_s: float = CALL_DEADLINE_S,
        max_response_chars: int = MAX_RESPONSE_CHARS,
        truncate_side: Side = "middle",
    ) -> None:
        if truncate_side not in get_args(Side):
            raise ToolError(f"truncate_side must be one of {', '.join(get_args(Side))}, got {truncate_side!r}")
        self.call_deadline_s = call_deadline_s
        self.max_response_chars = max_response_chars
        self.truncate_side: Side = truncate_side
        self.left_behind: set[asyncio.Task[Any]] = set()
        """Calls that do not even end when they are cancelled."""
        self._tools: dict[str, BaseTool] = {}
        self._sources = list(sources)
        self._stack = AsyncExitStack()
        for tool in tools:
            self._add(tool)

    @classmethod
    def load(cls, path: Path, **limits: Any) -> Toolbox:
        """The tools that a YAML file names; `limits` as in `__init__`. Raises ToolError naming file, entry and remedy."""
        tools, sources = load_tools(path)
        return cls(tools, sources=sources, **limits)

    async def __aenter__(self) -> Toolbox:
        """Start what needs starting (MCP servers) and add its tools. Raises ToolError when one does not start."""
        async with AsyncExitStack() as stack:
            for source in self._sources:
                for tool in await stack.enter_async_context(source):
                    self._add(tool)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def names(self) -> list[str]:
        """The tools in the order in which they were given."""
        return list(self._tools)

    @asynccontextmanager
    async def open(
        self,
        names: Iterable[str] | None = None,
        *,
        tools_kwargs: Mapping[str, ToolKwargs | None] | None = None,
        agent_data: object = None,
    ) -> AsyncIterator[EpisodeTools]:
        """One episode's tools: those named (all), released at the end of the block.

        `tools_kwargs`, from the task's `extra_info`: tool -> `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs`,
        `release_kwargs`. Tools that it names are created at once, others at their first call. `agent_data` is handed to those
        tools whose `execute` asks for it, as verl's loop does. Raises ToolError for an unknown name or a failing `create`.
        """
        chosen = self._chosen(names)
        kwargs = _checked_kwargs(tools_kwargs or {}, tools=chosen)
        tools = EpisodeTools(chosen, toolbox=self, kwargs=kwargs, agent_data=agent_data)
        try:
            await tools.create(kwargs)
            yield tools
        finally:
            # In a task of its own: a second cancellation must not leave instances open.
            releasing = asyncio.create_task(tools.release(), name="release tools")
            self.left_behind.add(releasing)
            releasing.add_done_callback(self.left_behind.discard)
            await asyncio.shield(releasing)

    def _chosen(self, names: Iterable[str] | None) -> dict[str, BaseTool]:
        if names is None:
            return dict(self._tools)
        wanted = list(names)
        for name in wanted:
            if name not in self._tools:
                raise ToolError(
                    f"the episode's tools must be among the toolbox's, got {name!r}; {nearest(name, self._tools)}"
                )
        return {name: self._tools[name] for name in wanted}

    def _add(self, tool: BaseTool) -> None:
        if tool.name in self._tools:
            raise ToolError(f"tools must have different names, got {tool.name!r} twice; rename one in its tool_schema")
        if tool.tool_schema is not None:
            check_schema(tool.tool_schema)
        deadline_s = tool.config.get(DEADLINE, self.call_deadline_s)
        if not isinstance(deadline_s, int | float) or not deadline_s > 0:
            raise ToolError(
                f"deadline_s of tool {tool.name} must be seconds above 0, got {deadline_s!r}; correct its config"
            )
        self._tools[tool.name] = tool


@dataclass(slots=True, eq=False)
class EpisodeTools:
    """One episode's tools, by name: calls, rewards, and the instances that were created for it. Opened by a `Toolbox`."""

    tools: Mapping[str, BaseTool]
    _: KW_ONLY
    toolbox: Toolbox
    kwargs: Mapping[str, ToolKwargs]
    agent_data: object
    _instances: dict[str, str] = field(default_factory=dict, init=False)
    _creating: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock), init=False)
    _over: bool = field(default=False, init=False)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI tool dicts, for the chat template."""
        return [schema.as_openai() for tool in self.tools.values() if (schema := tool.tool_schema) is not None]

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> ToolOutcome:
        """One call as the model wrote it; `arguments` as JSON text or as a dict. Calls may run at the same time."""
        try:
            response, reward = await self._call(name, arguments)
        except _Fault as fault:
            text = truncate(f"Error: {fault.text}", limit=self.toolbox.max_response_chars, side="left")
            return ToolOutcome(text=_clean(text), ok=False, error=fault.fault)
        text = truncate(response.text or "", limit=self.toolbox.max_response_chars, side=self.toolbox.truncate_side)
        return ToolOutcome(text=_clean(text), reward=reward)

    async def rewards(self) -> dict[str, float]:
        """`calc_reward` of each tool that was created, by name. Raises ToolError when one gives no finite number."""
        rewards = {}
        for name, instance in list(self._instances.items()):
            tool = self.tools[name]
            given = self._given(name, "calc_reward_kwargs")
            try:
                reward = await self._guarded(tool, partial(tool.calc_reward, instance, **given))
                if not _is_number(reward):
                    raise _bad_result(tool, reward)
            except _Fault as fault:
                raise ToolError(f"calc_reward of tool {name} must give a finite number: {fault.text}") from None
            rewards[name] = float(reward)
        return rewards

    async def create(self, names: Iterable[str]) -> None:
        """Open instances of these tools now. Raises ToolError when one cannot be."""
        for name in names:
            try:
                await self._instance(self.tools[name])
            except _Fault as fault:
                raise ToolError(f"create of {fault.text}; check its create_kwargs in the task's tools_kwargs") from None

    async def release(self) -> None:
        """Release all instances; one that fails is logged and stops no other. Later calls find nothing."""
        self._over = True
        while self._instances:
            name, instance = self._instances.popitem()
            await self._release(self.tools[name], instance)

    async def _call(self, name: str, given: str | Mapping[str, Any]) -> tuple[ToolResponse, float]:
        tool = self.tools.get(name) if isinstance(name, str) else None  # a parser hands on what the model wrote
        if tool is None or tool.tool_schema is None:
            raise _Fault(ToolFault.UNKNOWN_TOOL, f"there is no tool {name!r:.100}; {nearest(str(name), self.tools)}")
        try:
            # In a thread: what a model writes may take seconds to check, and other episodes continue.
            arguments = await asyncio.to_thread(_checked_arguments, given, tool.tool_schema)
        except BadArguments as error:
            raise _Fault(ToolFault.BAD_ARGUMENTS if error.is_json else ToolFault.BAD_JSON, f"{name}: {error}") from None
        instance = await self._instance(tool)
        extra = self._given(name, "execute_kwargs")
        if self.agent_data is not None and _takes(tool.execute, "agent_data"):
            extra["agent_data"] = self.agent_data
        result = await self._guarded(tool, partial(tool.execute, instance, arguments, **extra))
        match result:
            case (ToolResponse(text=str() | None) as response, reward, dict() | None) if _is_number(reward):
                return response, float(reward)
        raise _bad_result(tool, result)

    async def _instance(self, tool: BaseTool) -> str:
        """The tool's instance in this episode, created if there is none."""
        async with self._creating[tool.name]:
            if self._over:
                raise _Fault(ToolFault.RAISED, f"{tool.name}: the episode is over")
            if tool.name not in self._instances:
                # Known before it is created, so that it is released if the episode is cancelled meanwhile.
                instance = self._instances[tool.name] = str(uuid4())
                given = _create_kwargs(tool, self._given(tool.name, "create_kwargs"))
                try:
                    result = await self._guarded(tool, partial(tool.create, instance, **given))
                    # Early tools of verl return the id alone.
                    created = result[0] if isinstance(result, tuple) and result else result
                    if not isinstance(created, str):
                        raise _bad_result(tool, result)
                except _Fault:
                    await self._release(tool, self._instances.pop(tool.name))  # as far as it was made
                    raise
                self._instances[tool.name] = created
            return self._instances[tool.name]

    async def _release(self, tool: BaseTool, instance: str) -> None:
        try:
            await self._guarded(tool, partial(tool.release, instance, **self._given(tool.name, "release_kwargs")))
        except _Fault as fault:
            logger.warning("release of %s", fault.text)

    def _given(self, name: str, kind: str) -> dict[str, Any]:
        return dict(self.kwargs.get(name, {}).get(kind) or {})

    async def _guarded(self, tool: BaseTool, work: Callable[[], Any]) -> Any:
        """Result of `work`. Raises _Fault when it raises, or is late."""
        deadline_s = float(tool.config.get(DEADLINE, self.toolbox.call_deadline_s))
        ended = await call_with_deadline(
            work, name=f"tool {tool.name}", deadline_s=deadline_s, left_behind=self.toolbox.left_behind
        )
        if ended.late:
            raise _Fault(ToolFault.DEADLINE, f"{tool.name} did not answer within {deadline_s:g} s")
        if (error := ended.error) is not None:
            logger.info("tool %s raised", tool.name, exc_info=error)
            raise _Fault(ToolFault.RAISED, f"{tool.name} failed: {type(error).__name__}: {_short(error, str)}")
        return ended.value


def _bad_result(tool: BaseTool, value: object) -> _Fault:
    return _Fault(ToolFault.BAD_RESULT, f"{tool.name} returned {_short(value, repr)}, which its interface forbids")


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


def _checked_kwargs(given: Mapping[str, ToolKwargs | None], *, tools: Mapping[str, BaseTool]) -> dict[str, ToolKwargs]:
    """A task's `tools_kwargs` without what is None. Raises ToolError for a name that nothing would be done with."""
    kept: dict[str, ToolKwargs] = {}
    for name, kinds in given.items():
        if kinds is None:
            continue
        if name not in tools:
            raise ToolError(f"tools_kwargs must name tools of the episode, got {name!r}; {nearest(name, tools)}")
        for kind in kinds:
            if kind not in KWARGS:
                raise ToolError(
                    f"tools_kwargs of {name} must be {', '.join(KWARGS)}, got {kind!r}; {nearest(kind, KWARGS)}"
                )
        kept[name] = kinds
    return kept
