"""verl's agent-loop interface, by its names: what an agent inside this project implements.

    @register("my_agent")
    class MyAgentLoop(AgentLoopBase):
        async def run(self, sampling_params, **kwargs) -> AgentLoopOutput: ...

`kwargs` are the columns of the task's row (`raw_prompt`, `extra_info`, `data_source`, ...), without its ground truth unless the
class says that it plays an environment (`sees_ground_truth`). A loop that was written for verl runs here with its import lines
changed: the constructor, `init_class`, `apply_chat_template`, `config`, `server_manager.generate`, `simple_timer` and
`rollout_trace_op` are those of verl's `verl/experimental/agent_loop` and its helpers. `agents.workers.worker` makes one
object for each episode and runs it.

Invariant: a token with mask 1 was sampled by `server_manager.generate`; no other caller knows its log-probability.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agents.chat_template_ids import opening_ids, tail_ids
from agents.server_manager import AsyncLLMServerManager

Loop = TypeVar("Loop", bound="type[AgentLoopBase]")
Function = TypeVar("Function", bound=Callable[..., Any])
_registry: dict[str, str] = {}
"""Agent name -> `module.Class`; filled by `register` while modules are imported, never changed afterwards."""


class AgentLoopMetrics(BaseModel):
    """Seconds of an episode by work, and the number of times that the engine set it aside."""

    model_config = ConfigDict(extra="allow")
    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = 0


class AgentLoopOutput(BaseModel):
    """One trajectory: a prompt and everything after it. A loop that branched returns a list of them."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    prompt_ids: list[int]
    """[P]"""
    response_ids: list[int]
    """[R] sampled tokens, and tokens of tools and environments."""
    response_mask: list[int]
    """[R] 1: sampled by the model and trained; 0: not."""
    response_logprobs: list[float] | None = None
    """[R] as the loop has them. Not needed: they are recorded when the tokens are sampled."""
    multi_modal_data: dict[str, Any] | None = None
    """verl's; must be empty, as only text is served."""
    routed_experts: None = None
    """verl's; experts are not replayed here."""
    reward_score: float | None = None
    """The trajectory's own score, of its `role` where it has one. None: `data.scorer` judges, or the tools do; or it shares that
    of the others."""
    role: str = ""
    """The role of the run that spoke in it, of each trajectory another one; empty: the policy, or the first role."""
    step_rewards: list[float] | None = None
    """One reward for each answer of the model, in order, beside the score: credited to that answer and those before it."""
    num_turns: int = 0
    """Chat turns, prompt included: user, assistant, tool."""
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _aligned(self) -> AgentLoopOutput:
        lengths = {len(self.response_ids), len(self.response_mask), len(self.response_logprobs or self.response_ids)}
        if len(lengths) != 1:
            raise ValueError(
                f"response_ids, response_mask and response_logprobs must have equal lengths, got {len(self.response_ids)}, "
                f"{len(self.response_mask)}, {len(self.response_logprobs or [])}"
            )
        if not set(self.response_mask) <= {0, 1}:
            raise ValueError(f"response_mask must hold 0 and 1 only, got {sorted(set(self.response_mask))}")
        if self.multi_modal_data:
            raise ValueError("multi_modal_data must be empty: only text is served")
        return self


class AgentLoopBase(ABC):
    """One episode's agent. Made for each episode; what all share is set up once, in `init_class`."""

    _class_initialized: ClassVar[bool] = False
    sees_ground_truth: ClassVar[bool] = False
    """True if `run` gets the task's `ground_truth`: for loops that hand it to an environment."""

    def __init__(
        self,
        trainer_config: Any,
        server_manager: AsyncLLMServerManager,
        tokenizer: Any,
        processor: Any = None,
        **kwargs: Any,
    ) -> None:
        """`trainer_config.config`: verl's tree (`verl_config`). `kwargs`: what the loop's entry in `agents.loops` says."""
        self.init_class(config=trainer_config.config, tokenizer=tokenizer, processor=processor, **kwargs)
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.loop = asyncio.get_running_loop()

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        """Set up what all episodes share; called for each, expected to work once (`cls._class_initialized`)."""
        cls._class_initialized = True

    @classmethod
    async def open_class(cls) -> None:
        """Start what all episodes share and `init_class` cannot: it runs on the worker's event loop, once, after it."""
        return

    @classmethod
    async def close_class(cls) -> None:
        """End it; called once, when the worker ends."""
        return

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Play one episode. `sampling_params`: to pass on to `generate`. An exception ends the episode as failed."""

    async def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, up to where the model answers. `remove_system_prompt`: of turns that come after
        an answer whose last token ended its turn, without a system prompt and without rendering what came before."""
        if images or videos:
            raise ValueError("apply_chat_template takes text only, got images or videos")
        if remove_system_prompt:
            return await asyncio.to_thread(tail_ids, self.tokenizer, messages, tools=tools, after=None)
        return await asyncio.to_thread(opening_ids, self.tokenizer, messages, tools=tools)


def register(agent_name: str) -> Callable[[Loop], Loop]:
    """Make a loop known by the name that rows give in `agent_name`."""

    def decorator(subclass: Loop) -> Loop:
        target = f"{subclass.__module__}.{subclass.__qualname__}"
        known = _registry.setdefault(agent_name, target)
        if known != target:
            raise ValueError(f"agent_name {agent_name!r} must name one loop, got {known} and {target}; rename one")
        return subclass

    return decorator


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """verl's: add the seconds of the block to `timing_raw[name]`."""
    began = time.monotonic()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.monotonic() - began


def rollout_trace_op(function: Function) -> Function:
    """verl's mark of a traced method. Here whole episodes are traced, from what was recorded."""
    return function


def verl_config(*, prompt_length: int, response_length: int, **rollout: Any) -> Any:
    """The part of verl's configuration tree that loops read: `config.actor_rollout_ref.rollout` and `config.data`."""
    multi_turn = SimpleNamespace(**rollout.pop("multi_turn", {}))
    place = SimpleNamespace(
        name="vllm",
        prompt_length=prompt_length,
        response_length=response_length,
        max_model_len=prompt_length + response_length,
        multi_turn=multi_turn,
        **rollout,
    )
    data = SimpleNamespace(apply_chat_template_kwargs={}, max_prompt_length=prompt_length)
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=place), data=data)
