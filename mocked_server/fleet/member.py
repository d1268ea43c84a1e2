"""What the fleet asks of one engine, and what an engine says of itself.

`mocked_server.vllm.engine.VLLMEngine` is such an engine on this machine; `mocked_server.fleet.engine_fleet` routes to them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from uuid import uuid4

import numpy as np

from buffers.errors import EngineError
from buffers.records import UNKNOWN_EXPERT, UInt16
from buffers.wire.rpc import known_error

ADAPTER_OF = "adapter_of"
"""Argument of `generate`: the role whose adapter answers, where roles have adapters of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One completion of an interrupted generation, as far as it came: another engine continues it."""

    index: int
    """Number of the completion, among those of its request (n > 1)."""
    token_ids: list[int]
    """[S] sampled so far."""
    logprobs: Any
    """[S] entries, in vLLM's form."""
    versions: list[tuple[str, int]]
    """(weight version, index of the first token that it sampled)."""
    num_sent_chars: int = 0
    """Characters of its text that have left for the client."""
    cumulative: float | None = None
    """Sum of its log-probabilities, where vLLM keeps one."""
    output: Any = None
    """vLLM's CompletionOutput of one that had finished; None: it had not."""


def logprobs_of(completion: Any, ids: list[int]) -> list[float]:
    """Log-probabilities of the sampled tokens: vLLM gives a flat list where only they were requested, else one table for each
    position."""
    flat: list[float] | None = getattr(completion.logprobs, "logprobs", None)
    if flat is not None and len(flat) == len(ids):
        return flat
    return [entry[token].logprob for token, entry in zip(ids, completion.logprobs or (), strict=True)]


@known_error
class EngineLost(EngineError):
    """An engine died while it answered. `life`: its name, and which of its processes; `sampled`: each completion of an answer that
    comes as a whole, as far as it was sampled (what streams is known to its reader); empty: none of it is left. `by_itself`: it was
    seen to end as one does that a request kills, by an error or a crash of its own; False: something outside ended it (a kill, a
    stop, a node that is gone), or nobody saw how."""

    def __init__(
        self, message: str, *, life: tuple[str, int] = ("", 0), sampled: Sequence[Sampled] = (), by_itself: bool = False
    ) -> None:
        super().__init__(message)
        self.life = life
        self.sampled = list(sampled)
        self.by_itself = by_itself


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """Figures of an engine, now and since it started. Counts are of all its lives."""

    name: str
    is_up: bool
    version: int
    running: int
    """Generations under way."""
    waiting: int
    """Generations among them whose prompt waits for room in the cache."""
    tokens_held: int
    """Tokens of the generations under way: prompts and what was sampled."""
    kv_capacity: int
    """Tokens that its cache holds; 0: not known yet."""
    sampled_tokens: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that its cache held already."""
    preemptions: int
    restarts: int
    moved_in: int = 0
    """Episodes that came from another engine; the fleet counts them."""


class FleetEngine(Protocol):
    """One engine of a fleet. Any call may raise EngineLost when its process dies meanwhile."""

    name: str
    version: int
    """The policy version that it samples with."""

    @property
    def is_up(self) -> bool:
        """It takes requests."""
        ...

    def generate(
        self,
        prompt_token_ids: list[int],
        params: Any,
        *,
        request_id: str,
        sampled: Sequence[Sampled] = (),
        **extra: Any,
    ) -> AsyncGenerator[Any, None]:
        """Yield vLLM's RequestOutputs. `sampled`: what another engine sampled of this request already, which this one continues:
        outputs are as if it had been one engine all along."""
        ...

    async def start(self) -> None:
        """Returns when it takes requests. Raises EngineDied when its process was killed meanwhile, EngineError for other causes."""
        ...

    async def restart(self) -> None:
        """A new process in place of a dead one, with the weights that `load_weights` named last. Raises as `start`."""
        ...

    async def until_dead(self) -> None:
        """Returns when its present process is gone."""
        ...

    async def close(self) -> None: ...
    async def load_weights(self, folder: Path, *, version: int) -> float:
        """Sample with these weights from now on; only this engine pauses, for its own copy. One that is down gets them with its
        restart. Returns the seconds that it paused."""
        ...

    async def sleep(self) -> None:
        """Give memory back until `wake_up`. No effect on one that is down."""
        ...

    async def wake_up(self) -> None: ...
    def figures(self) -> EngineFigures: ...


@runtime_checkable
class LayerEngine(Protocol):
    """An engine that can show the states behind its layers."""

    async def layer_states(self, prompt_token_ids: Sequence[int], *, role: str = "") -> list[bytes]:
        """[layers] of [hidden] float32 in the machine's order, of the prompt's last token; empty: it does not say."""
        ...


@runtime_checkable
class AdapterEngine(Protocol):
    """An engine that can serve an adapter for each role."""

    async def load_adapter(self, folder: Path, *, role: str, version: int) -> float:
        """Answer this role's requests with this adapter from now on; see `FleetEngine.load_weights`."""
        ...


Probed = tuple[list[int], list[float], UInt16 | None]
"""The prompt with what was sampled after it, that one's log-probabilities, and the experts of all, as in `buffers.records.Row`."""


async def probe(engine: FleetEngine, prompt_token_ids: Sequence[int], *, params: Any, role: str = "") -> Probed:
    """Samples twice as much: the second half is a request of its own, which finds the first one's keys and states in the engine's
    cache. Raises EngineLost, RequestRefused, RequestFailed."""
    extra: dict[str, Any] = {ADAPTER_OF: role} if role else {}
    ids, logprobs, used = list(prompt_token_ids), list[float](), None
    for _ in range(2):
        outputs = engine.generate(ids.copy(), params, request_id=f"probe-{uuid4().hex}", **extra)
        async with aclosing(outputs) as stream:
            async for output in stream:
                if output.finished:
                    sampled = list(output.outputs[0].token_ids)
                    ids += sampled
                    logprobs += logprobs_of(output.outputs[0], sampled)
                    used = getattr(output.outputs[0], "routed_experts", None)  # of its prompt as well
    if used is None:
        return ids, logprobs, None
    experts = np.full((len(ids), *used.shape[1:]), UNKNOWN_EXPERT, dtype=np.uint16)
    experts[-1 - len(used) : -1] = used
    return ids, logprobs, experts
