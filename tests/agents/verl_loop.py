"""An agent loop as verl's users write one: only its import lines name this project."""

import asyncio
from typing import Any
from uuid import uuid4

from agents.agent_loop import AgentLoopBase, AgentLoopOutput, register, rollout_trace_op, simple_timer


@register("verl_loop")
class VerlLoop(AgentLoopBase):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prompt_length = self.config.actor_rollout_ref.rollout.prompt_length
        self.response_length = self.config.actor_rollout_ref.rollout.response_length

    @classmethod
    def init_class(cls, config, tokenizer, **kwargs):
        if cls._class_initialized:
            return
        cls._class_initialized = True
        cls.max_turns = config.actor_rollout_ref.rollout.multi_turn.max_turns

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        metrics: dict[str, float] = {}
        request_id = uuid4().hex
        prompt_ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True),
        )
        response_mask: list[int] = []
        for turn in range(self.max_turns):
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
                )
            prompt_ids += output.token_ids
            response_mask += [1] * len(output.token_ids)
            if turn + 1 == self.max_turns:
                break
            with simple_timer("tool_calls", metrics):
                await asyncio.sleep(0)
                extra = self.tokenizer.encode(f"\nagain {kwargs['extra_info'].get('word', '')}\n")
            prompt_ids += extra
            response_mask += [0] * len(extra)
        response_ids = prompt_ids[-len(response_mask) :]
        return AgentLoopOutput(
            prompt_ids=prompt_ids[: len(prompt_ids) - len(response_mask)],
            response_ids=response_ids[: self.response_length],
            response_mask=response_mask[: self.response_length],
            num_turns=2 * self.max_turns,
            metrics=metrics,
        )


@register("bad_loop")
class BadLoop(AgentLoopBase):
    """Claims, dies, hangs or raises, as its row says."""

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        how = kwargs["extra_info"]["how"]
        output = await self.server_manager.generate("a", prompt_ids=[1, 2], sampling_params=sampling_params)
        if how == "raises":
            raise ValueError("on purpose")
        if how == "dies":
            import os

            os._exit(3)
        if how == "hangs":
            await asyncio.Event().wait()
        ids = [7] * len(output) if how == "claims" else output.token_ids
        return AgentLoopOutput(
            prompt_ids=[1, 2], response_ids=ids, response_mask=[1] * len(ids), reward_score=0.25, num_turns=2
        )
