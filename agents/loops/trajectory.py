"""A trajectory while a loop makes it: prompt, answers, and what was said between them, as ids, mask and log-probabilities.

Used by the shipped loops. Invariants: an answer is appended as it was sampled (mask 1), everything else as the template
writes it after that answer (mask 0); the whole is never longer than its room; it ends with an answer unless nothing was
sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ValidationError

from agents.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from agents.chat_template_ids import tail_ids
from buffers.errors import AgentError, TaskError

Settings = TypeVar("Settings", bound=BaseModel)


@dataclass(slots=True, eq=False)
class Trajectory:
    """`room`: most tokens after the prompt; None: what the model's context leaves. `tools`: what the prompt offers. `role`: of
    the run, which answers; empty: the first."""

    loop: AgentLoopBase
    sampling_params: Mapping[str, Any]
    _: KW_ONLY
    room: int | None = None
    tools: list[dict[str, Any]] | None = None
    role: str = ""
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics, init=False)
    _request_id: str = field(default_factory=lambda: uuid4().hex, init=False)
    _ids: list[int] = field(default_factory=list, init=False)
    _mask: list[int] = field(default_factory=list, init=False)
    _logprobs: list[float] = field(default_factory=list, init=False)
    _room: int = field(default=0, init=False)

    async def begin(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """The prompt. Raises AgentError when it leaves no room for an answer."""
        self._ids = await self.loop.apply_chat_template([dict(message) for message in messages], tools=self.tools)
        longest = int(self.loop.rollout_config.max_model_len)
        left = longest - len(self._ids)
        if left < 1:
            raise AgentError(
                f"prompt too long: it must leave room for an answer within rollout.max_model_len={longest}, got "
                f"{len(self._ids)} tokens; raise it, or say less"
            )
        self._room = min(left, self.room or left)

    async def generate(self) -> list[int]:
        """The model's next answer [S], appended."""
        began = time.monotonic()
        left = self._room - len(self._mask)
        most = self.sampling_params.get("max_tokens")
        output = await self.loop.server_manager.generate(
            self._request_id,
            prompt_ids=list(self._ids),
            sampling_params={**self.sampling_params, "max_tokens": left if most is None else min(left, most)},
            **({"model": self.role} if self.role else {}),
        )
        self.metrics.generate_sequences += time.monotonic() - began
        self.metrics.num_preempted += output.num_preempted
        self._ids += output.token_ids
        self._mask += [int(output.is_trained)] * len(output)
        self._logprobs += output.log_probs
        return output.token_ids

    async def say(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Append what follows the last answer; False, and nothing is appended, when it would leave no room for another."""
        tail = await asyncio.to_thread(tail_ids, self.loop.tokenizer, messages, tools=self.tools, after=self._ids[-1])
        if len(self._mask) + len(tail) >= self._room:
            return False
        self._ids += tail
        self._mask += [0] * len(tail)
        self._logprobs += [0.0] * len(tail)
        return True

    @property
    def is_full(self) -> bool:
        """No room for another token."""
        return len(self._mask) >= self._room

    def output(
        self,
        *,
        num_turns: int,
        step_rewards: Sequence[float],
        reward_score: float | None = None,
        extra_fields: dict[str, Any],
    ) -> AgentLoopOutput:
        """The trajectory so far. `step_rewards`: one for each answer."""
        split = len(self._ids) - len(self._mask)
        return AgentLoopOutput(
            prompt_ids=self._ids[:split],
            response_ids=self._ids[split:],
            response_mask=self._mask,
            response_logprobs=self._logprobs,
            reward_score=reward_score,
            role=self.role,
            step_rewards=list(step_rewards) if any(step_rewards) else None,
            num_turns=num_turns,
            metrics=self.metrics,
            extra_fields=extra_fields,
        )


def read_settings(kind: type[Settings], arguments: Mapping[str, Any], *, name: str) -> Settings:
    """A loop's entry in `agents.loops` as its settings; raises TaskError naming the key, the rule and the value."""
    try:
        return kind.model_validate(dict(arguments))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r:.80}" for e in error.errors()]
        raise TaskError(f"agents.loops, {name}: {'; '.join(lines)}; see agents/loops/{name}.py") from error
