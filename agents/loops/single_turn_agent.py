"""`single_turn_agent`: the prompt, one answer. verl's simplest loop, for rows that need no tools."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from agents.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """One generation."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """See `AgentLoopBase.run`."""
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        began = time.monotonic()
        output = await self.server_manager.generate(uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params)
        metrics = AgentLoopMetrics(generate_sequences=time.monotonic() - began, num_preempted=output.num_preempted)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output),
            response_logprobs=output.log_probs,
            num_turns=2,
            metrics=metrics,
        )
