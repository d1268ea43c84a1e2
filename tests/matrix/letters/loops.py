"""Agent loops for whole runs: one that gives back two trajectories with a reward each, and one that shows what it was given."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

from agents.agent_loop import AgentLoopBase, AgentLoopOutput, register
from tests.matrix.letters.env import early_share


class _Letters(AgentLoopBase):
    async def _answer(self, sampling_params: dict[str, Any], prompt: list[dict[str, Any]]) -> AgentLoopOutput:
        ids = await self.apply_chat_template(prompt)
        output = await self.server_manager.generate(uuid4().hex, prompt_ids=ids, sampling_params=sampling_params)
        text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        return AgentLoopOutput(
            prompt_ids=ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output),
            reward_score=early_share(text),
            num_turns=2,
        )


@register("two_trajectories")
class TwoTrajectories(_Letters):
    """The first is judged by its letters, the last scores 0."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        first = await self._answer(sampling_params, list(kwargs["raw_prompt"]))
        last = await self._answer(sampling_params, [{"role": "user", "content": "Something else."}])
        return [first, last.model_copy(update={"reward_score": 0.0})]


@register("noting")
class Noting(_Letters):
    """Writes its arguments into the folder that `notes_path` of its entry names."""

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        cls.notes = Path(kwargs["notes_path"])

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await self._answer(sampling_params, list(kwargs["raw_prompt"]))
        (self.notes / f"{uuid4().hex}.json").write_text(json.dumps({"pid": os.getpid(), "row": kwargs}, default=str))
        return output
