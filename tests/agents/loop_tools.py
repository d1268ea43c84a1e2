"""Tools for tests of the tool agent."""

from __future__ import annotations

from typing import Any

from agents.tools.base_tool import BaseTool
from agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

SECRET = {
    "type": "function",
    "function": {
        "name": "secret",
        "description": "Says its secret.",
        "parameters": {"type": "object", "properties": {"repeat": {"type": "integer"}}, "required": ["repeat"]},
    },
}


class SecretTool(BaseTool):
    """Holds one secret for each episode; its reward is the number in it."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SECRET))
        self.secrets: dict[str, str] = {}

    async def create(self, instance_id: str | None = None, secret: str = "", **kwargs: Any) -> tuple[str, ToolResponse]:
        instance_id, response = await super().create(instance_id)
        self.secrets[instance_id] = secret
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        kwargs["agent_data"].extra_fields["asked_in_turn"] = kwargs["agent_data"].assistant_turns
        reward = -0.25 if parameters["repeat"] > 1 else 0.0  # once is enough
        return ToolResponse(text=self.secrets[instance_id] * parameters["repeat"]), reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float("".join(c for c in self.secrets[instance_id] if c.isdigit()) or 0)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.secrets[instance_id]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def fails() -> str:
    """Fails."""
    raise ValueError("on purpose")
