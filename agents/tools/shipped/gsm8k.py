"""`calc_gsm8k_reward`: tells the model whether its answer to a GSM8K task is right; its reward counts where no scorer is set.

Named in configs/tools/gsm8k.yaml. A task gives the truth in `tools_kwargs: {calc_gsm8k_reward: {create_kwargs: {ground_truth}}}`;
the model never sees it. A step's reward is 0 where the answer is better than the one before, and -0.05 where it is not; the
episode's is that of the last answer. Invariant: an instance judges by its own truth.
What counts as right is `env_adapters.scoring.scorers`' matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from agents.tools.base_tool import BaseTool
from agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from buffers.errors import ToolError
from buffers.records import Task
from env_adapters.scoring.scorers import gsm8k_flexible

NO_BETTER = -0.05
"""The reward of an answer that is no better than the one before."""


@dataclass
class _Judged:
    """State of an instance."""

    task: Task
    answer: str = ""
    reward: float = 0.0


class Gsm8kTool(BaseTool):
    """An instance for each episode: the truth, the last answer, its reward."""

    own_schema = OpenAIFunctionToolSchema.of(
        "calc_gsm8k_reward",
        "Checks an answer to the problem: reward 1.0 if it is right, 0.0 if it is wrong or not a number.",
        {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer to the problem, in digits."}},
            "required": ["answer"],
        },
    )

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._instances: dict[str, _Judged] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Raises ToolError without a truth, which every answer would be wrong against."""
        if ground_truth is None:
            raise ToolError(
                f"tool {self.name} must know the truth, got none; give create_kwargs: {{ground_truth: ...}}"
            )
        instance_id = instance_id or str(uuid4())
        task = Task(task_id=instance_id, prompt=[], ground_truth=ground_truth)
        self._instances[instance_id] = _Judged(task=task)
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Judge `parameters["answer"]`, and remember it as the last one."""
        judged = self._instances[instance_id]
        before = judged.reward
        judged.answer = str(parameters.get("answer", ""))
        judged.reward = await self.calc_reward(instance_id)
        step = 0.0 if judged.reward > before else NO_BETTER
        text = f"Current parsed answer={judged.answer!r} reward={judged.reward}"
        return ToolResponse(text=text), step, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """1 when the last answer is right."""
        judged = self._instances[instance_id]
        return gsm8k_flexible(judged.task, judged.answer)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the truth."""
        self._instances.pop(instance_id, None)
