"""The tools of a worker, and their life in one episode: open, call, rewards, released.

Built by an agent loop (or the program that starts it) from a YAML file or from tools themselves; one Toolbox serves all episodes of
a worker at once. Invariants: `call` never raises but for cancellation: what went wrong is in
its outcome, in words that the model can act on; every instance that was created is released, also when the episode is cancelled;
an episode reaches its own instances only.

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
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from agents.tools.arguments import check_schema
from agents.tools.base_tool import BaseTool
from agents.tools.episode_tools import DEADLINE, KWARGS, EpisodeTools, Limits, ToolKwargs
from agents.tools.tool_file import ToolSource, load_tools
from agents.tools.truncate import Side
from buffers.did_you_mean import nearest
from buffers.errors import ToolError

CALL_DEADLINE_S = 60.0
MAX_RESPONSE_CHARS = 4096


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
        self._tools: dict[str, BaseTool] = {}
        self._limits = Limits(
            call_deadline_s=call_deadline_s, max_response_chars=max_response_chars, truncate_side=truncate_side
        )
        self._sources = list(sources)
        self._stack = AsyncExitStack()
        self._left_behind: set[asyncio.Task[Any]] = set()
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
        tools = EpisodeTools(
            chosen, kwargs=kwargs, limits=self._limits, agent_data=agent_data, left_behind=self._left_behind
        )
        try:
            await tools.create(kwargs)
            yield tools
        finally:
            # In a task of its own: a second cancellation must not leave instances open.
            releasing = asyncio.create_task(tools.release(), name="release tools")
            self._left_behind.add(releasing)
            releasing.add_done_callback(self._left_behind.discard)
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
        deadline_s = tool.config.get(DEADLINE, self._limits.call_deadline_s)
        if not isinstance(deadline_s, int | float) or not deadline_s > 0:
            raise ToolError(
                f"deadline_s of tool {tool.name} must be seconds above 0, got {deadline_s!r}; correct its config"
            )
        self._tools[tool.name] = tool


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
