"""The interface of a tool, by verl's names (`verl/tools/base_tool.py`): a class written for verl runs with its imports changed.

Implemented by the shipped tools and by a user's own; called by `agents.tools.toolbox` only. One object serves all episodes of a
worker at once: `create` opens an instance of its state for one episode, `release` closes it. Invariant: what a tool keeps for
an episode lies under its instance_id. Deadlines, bad arguments and exceptions are the toolbox's matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar
from uuid import uuid4

from agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from buffers.errors import ToolError


class BaseTool(ABC):
    """`config`: the YAML entry's `config`. `tool_schema`: its `tool_schema`; without one `own_schema` is taken, or
    `get_openai_tool_schema` must give it."""

    own_schema: ClassVar[OpenAIFunctionToolSchema | None] = None

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema: OpenAIFunctionToolSchema | None = tool_schema
        schema = tool_schema or self.get_openai_tool_schema()
        if schema is None:
            raise ToolError(
                f"tool {type(self).__name__} must have a schema, got none; give `tool_schema` in its YAML entry, "
                f"or override get_openai_tool_schema"
            )
        self.tool_schema = schema
        self.name = schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """Schema that the model is shown; None when there is none yet."""
        return self.tool_schema or self.own_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Open an instance for one episode; `kwargs` are the task's `create_kwargs`. Returns its id."""
        return instance_id or str(uuid4()), ToolResponse()

    @abstractmethod
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """One call of the model. Returns the answer, a reward for this step, and figures, which nothing reads here."""

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The instance's reward at the end of its episode."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the instance. Called once for each `create`, however the episode ended."""
        return
